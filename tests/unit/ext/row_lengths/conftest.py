from pathlib import Path

import pytest

from support.folders import write_hf
from titan_rl.config.sections import ModelSection
from titan_rl.preflight.shapes import shape_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder; nothing reads the weights themselves."""
    return write_hf(tmp_path / "model", shape_of(ModelSection()))
