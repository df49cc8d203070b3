"""Models on disk as checks see them, before anything loads a weight."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_rl.config.sections import Config, ModelSection
from titan_rl.ext.vision import tiny_folder
from titan_rl.preflight.plan import write_model_folder
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.model_shape import ModelShape


def write_hf(folder: Path, shape: ModelShape) -> Path:
    """config.json, tokenizer, and weights without content: a file of their size that takes no disk."""
    write_model_folder(folder, shape)
    write_header(folder / "model.safetensors", shape.hf_tensors())
    return folder


def write_header(path: Path, tensors: Mapping[str, tuple[int, ...]], dtype: str = "F32") -> None:
    """A safetensors file of these tensors: its header, and a hole."""
    header, end = {}, 0
    for name, size in tensors.items():
        begin, end = end, end + math.prod(size) * (4 if dtype == "F32" else 2)
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_models(config: Config) -> None:
    """The folders that a config takes its policy and its roles from, all of one shape."""
    if config.model.vision != "none":
        tiny_folder.write_folder(Path(config.model.hf_assets_path))
        return
    if config.model.hf_assets_path:
        write_hf(Path(config.model.hf_assets_path), shape_of(ModelSection(name=config.model.name)))
    shape = shape_of(config.model)
    if config.algorithm.loads_teacher:
        write_hf(Path(config.teacher.hf_assets_path), shape)
    if config.task.reward == "model":
        write_hf(Path(config.reward_model.hf_assets_path), shape.with_value_head())


def tensors_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}
