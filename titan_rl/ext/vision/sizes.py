"""Counts what a model that sees takes of a device besides its text model."""

import math
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from titan_rl.config.sections import BYTES, Config
from titan_rl.ext.vision.pixels import MOST_BYTES
from titan_rl.preflight.memory import MemoryPart, count
from titan_rl.wire.model_shape import ModelShape


def seeing(config: Config, shape: ModelShape, *, trains: bool) -> dict[str, MemoryPart]:
    """Return the memory of a tower, which every rank has as a whole, and of the features that trainers keep."""
    found = parameters(config.model.hf_assets_path, frozenset(shape.folder_tensors()))
    each = BYTES[config.training.mixed_precision_param if trains else config.generator.dtype]
    tower = {"tower": MemoryPart(found * each, f"{count(found)} parameters x {each}")}
    kept = MemoryPart(MOST_BYTES, "of images, at most")
    return tower | ({"features": kept} if trains else {})


@lru_cache(maxsize=8)  # a plan asks again and again
def parameters(folder: str, text: Collection[str]) -> int:
    """Return the number of parameters besides the text model's, by the headers of the files."""
    from safetensors import safe_open

    total = 0
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "np") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in {*file.keys()} - {*text})
    return total
