"""The parameters that vLLM adds to a model for adapters, and the tensors that fill them."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter

from titan_rl.config.sections import LoraSection
from titan_rl.ext.adapters.layers import adapted_weights, adapter_names
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import Piece


def live_adapters(
    pieces: Iterable[Piece], lora: LoraSection, shape: ModelShape
) -> Iterator[tuple[str, tuple[int, int], Piece | None]]:
    """Yield A and B of each part of every layer that vLLM wraps because a part has an adapter, with their sizes. A is
    cut as the layer's columns are, B as its rows. `pieces`: the model's own. A part without an adapter stays zero."""
    adapted = set(adapted_weights(lora, shape))
    for param, group in groupby(pieces, attrgetter("param")):
        parts = list(group)
        if not any(part.name in adapted for part in parts):
            continue
        places = {(part.name, part.row0, part.rows, part.col0, part.cols) for part in parts}
        if len({part.name for part in parts}) < len(places):  # one place may fill two parts: keys that are values
            raise ValueError(f"[lora] targets: expected layers that vLLM does not cut into strips, found {param}")
        layer = param.removesuffix(".weight")
        for i, part in enumerate(parts):
            a, b = f"{layer}.lora_a.{i}", f"{layer}.lora_b.{i}"
            name_a, name_b = adapter_names(part.name)
            has = part.name in adapted
            of_a = Piece(a, 0, 0, name_a, 0, lora.rank, part.col0, part.cols) if has else None
            of_b = Piece(b, 0, 0, name_b, part.row0, part.rows, 0, lora.rank) if has else None
            yield a, (lora.rank, part.cols), of_a
            yield b, (part.rows, lora.rank), of_b
