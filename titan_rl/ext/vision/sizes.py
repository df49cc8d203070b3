"""Counts what a model that sees takes of a device besides its trained weights."""

import json
import math
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from titan_rl.config.sections import BYTES, Config
from titan_rl.ext.vision.pixels import MOST_BYTES, Placeholders
from titan_rl.preflight.memory import MemoryPart, count
from titan_rl.wire.model_shape import ModelShape

OF_LAYER = 8  # vectors of a patch in a layer: two norms, q, k, v, attended, projected, added


def seeing(config: Config, shape: ModelShape, *, trains: bool) -> dict[str, MemoryPart]:
    """Return the memory of frozen parts, which every rank has as a whole, and of everything kept for images."""
    found = parameters(config.model.hf_assets_path, frozenset(shape.folder_tensors()))
    each = BYTES[config.training.mixed_precision_param if trains else config.generator.dtype]
    tower = {"tower": MemoryPart(found * each, f"{count(found)} parameters x {each}")}
    kept = MemoryPart(MOST_BYTES, "of images, at most")
    return tower | ({"features": kept, **encoding(config, shape)} if trains else {})


def encoding(config: Config, shape: ModelShape) -> dict[str, MemoryPart]:
    """Return the activations of a trained encoder, for a microbatch of images alone. Its layers keep their inputs, and
    compute the others again."""
    tensors = shape.folder_tensors()
    widened = [size for name, size in tensors.items() if name.endswith(".mlp.fc1.weight")]  # one of each layer
    if not widened:
        return {}
    layers, (rows, dim) = len(widened), widened[0]
    keys = json.loads((Path(config.model.hf_assets_path) / "config.json").read_text())
    run, patches = Placeholders.of(keys).run, Placeholders.patches_of(keys)
    tiles = config.training.local_batch_size * (config.training.seq_len // run)
    each = patches * (dim * (layers + OF_LAYER) + 2 * rows) * BYTES[config.training.mixed_precision_param]
    return {"encoder": MemoryPart(tiles * each, f"{tiles} tiles x {patches} patches x {layers} layers")}


@lru_cache(maxsize=8)  # a plan asks again and again
def parameters(folder: str, text: Collection[str]) -> int:
    """Return the number of parameters besides the text model's, by the headers of the files."""
    from safetensors import safe_open

    total = 0
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "np") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in {*file.keys()} - {*text})
    return total
