"""Models on disk as checks see them, before anything loads a weight."""

import json
from pathlib import Path

from titan_rl.config.sections import Config, ModelSection
from titan_rl.preflight.setup import write_model_folder
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.model_shape import ModelShape


def write_hf(folder: Path, shape: ModelShape) -> Path:
    """config.json, tokenizer, and weights of no bytes."""
    write_model_folder(folder, shape)
    (folder / "model.safetensors").touch()
    return folder


def write_header(path: Path, *names: str) -> None:
    """A safetensors file of tensors without elements."""
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def write_models(config: Config) -> None:
    """The folders that a config takes its policy and its roles from, all of one shape."""
    if config.model.hf_assets_path:
        write_hf(Path(config.model.hf_assets_path), shape_of(ModelSection(name=config.model.name)))
    shape = shape_of(config.model)
    if config.algorithm.needs_teacher:
        write_hf(Path(config.teacher.hf_assets_path), shape)
    if config.task.reward == "model":
        write_hf(Path(config.reward_model.hf_assets_path), shape.with_value_head())
