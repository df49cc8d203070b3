"""After each sync, vLLM computes with all of gpt-oss's weights: sinks, biases and experts, of which it packs some."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.family_folders import make_folder
from support.forked_programs import IMPORTS, results_of

ENGINE = (
    IMPORTS
    + """
import json
from pathlib import Path
from support.synced_engine import SyncedEngine

quantized, *folders = map(Path, sys.argv[1:])
for completions in SyncedEngine(quantized, folders[0]).sampled(folders):
    print("FOUND", json.dumps([[c.tokens, c.logprobs] for c in completions]))
"""
)


def test_all_weights_of_a_version_are_computed_with(tmp_path: Path) -> None:
    """No parameter of the second version is the first's. By the engine's config.json, experts have 4 bits."""
    folders = [tmp_path / "first", tmp_path / "second"]
    make_folder("gpt-oss, window 16", folders[0])
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(folders[1])
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    config = json.loads((folders[0] / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    for folder, found in zip(folders, results_of("generator", ENGINE, quantized, *folders), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        for tokens, logprobs in found:
            ids = torch.tensor([[1, 5, 6, 7, *tokens]])
            with torch.no_grad():
                expected = model(ids).logits[0, 3:-1].log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0]
            assert np.abs(np.array(logprobs) - expected.numpy()).mean() < 5e-6
