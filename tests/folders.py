"""Models on disk as checks see them, before anything loads a weight."""

from pathlib import Path

from titan_rl.config import Config
from titan_rl.model_shape import ModelShape, shape_of
from titan_rl.setup import write_model_folder


def write_hf(folder: Path, shape: ModelShape) -> Path:
    """config.json, tokenizer, and weights of no bytes."""
    write_model_folder(folder, shape)
    (folder / "model.safetensors").touch()
    return folder


def write_roles(config: Config) -> None:
    """The folders of the roles that a config names, each of the policy's shape."""
    shape = shape_of(config.model)
    if config.algorithm.needs_teacher:
        write_hf(Path(config.teacher.hf_assets_path), shape)
    if config.task.reward == "model":
        write_hf(Path(config.reward_model.hf_assets_path), shape.with_value_head())
