"""An engine before it serves, in a separate process."""

import json
import os
import subprocess
import sys
from pathlib import Path

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import ENV
from titan_rl.config.sections import ModelSection
from titan_rl.preflight.shapes import shape_of

BUILD = """
import sys
from titan_rl.actors.vllm.engine import Engine, EngineSettings
engine = Engine(EngineSettings(model_dir=sys.argv[1], max_model_len=128, kv_cache_memory_mb=32))
print(type(engine._llm.model_executor.driver_worker.get_model()).__name__)
"""


def test_a_machines_first_engine_is_built_without_another_process(tmp_path: Path) -> None:
    """vLLM caches properties of a model's class. If that cache is empty, it starts a process to find them."""
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    shape = shape_of(ModelSection(name="qwen3", dim=64, n_layers=1, n_heads=2, n_kv_heads=2, hidden_dim=64))
    (folder / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
    env = {**os.environ, "OMP_NUM_THREADS": "1", **ENV, **vllm_cpu.ENV, "VLLM_CACHE_ROOT": str(cache)}
    built = subprocess.run([sys.executable, "-c", BUILD, str(folder)], env=env, capture_output=True, text=True)
    assert built.stdout.split() == ["Qwen3ForCausalLM"], built.stderr
    assert not (cache / "modelinfos").exists()
