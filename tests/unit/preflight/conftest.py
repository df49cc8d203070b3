import json
from pathlib import Path

import pytest

from titan_rl.config.sections import ModelSection
from titan_rl.preflight.shapes import shape_of
from titan_rl.tasks import tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder; nothing reads the weights themselves."""
    folder = tmp_path / "model"
    tokenizer.build(folder)
    (folder / "config.json").write_text(json.dumps(shape_of(ModelSection()).hf_config(bos=1, eos=2, pad=0)))
    (folder / "model.safetensors").touch()
    return folder
