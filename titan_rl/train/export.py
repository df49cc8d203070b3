"""Exports the policy as a Hugging Face folder, which transformers and vLLM load as it is."""

import json
import shutil
from pathlib import Path

from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.preflight.setup import Setup
from titan_rl.record.run_folder import aside

ASSETS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


async def export(setup: Setup, trainers: ModelMesh, final: Path) -> Path:
    """Write under a temporary name, then rename: the folder is whole or absent. An older one is moved aside."""
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    await trainers.export(str(partial))
    for name in ASSETS:
        if (setup.model_folder / name).exists():
            shutil.copyfile(setup.model_folder / name, partial / name)
    config = json.loads((partial / "config.json").read_text(encoding="utf-8")) | setup.shape.hf_head
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if final.exists():
        final.rename(aside(final))
    partial.rename(final)
    return final
