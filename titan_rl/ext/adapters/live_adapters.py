"""The parameters that vLLM adds to a model for adapters, and the tensors that fill them."""

from collections.abc import Iterable, Iterator

from titan_rl.actors.vllm.vllm_params import LivePart
from titan_rl.config.sections import LoraSection
from titan_rl.ext.adapters.layers import adapted, adapter_names
from titan_rl.wire.model_shape import ModelShape


def live_adapters(
    parameters: Iterable[tuple[str, list[LivePart]]], lora: LoraSection, shape: ModelShape
) -> Iterator[tuple[str, list[LivePart]]]:
    """Yield A and B of each part of every layer that vLLM wraps because a part has an adapter. A is cut as the layer's
    columns are, B as its rows. `parameters`: the model's own."""
    ends = tuple(f".{layer}.weight" for layer in adapted(shape, lora))
    for param, parts in parameters:
        if not any(part.name.endswith(ends) for part in parts):
            continue
        layer = param.removesuffix(".weight")
        for i, part in enumerate(parts):
            a, b = adapter_names(part.name) if part.name.endswith(ends) else ("", "")
            yield f"{layer}.lora_a.{i}", [LivePart(a, lora.rank, part.cols, col_cuts=part.col_cuts)]
            yield f"{layer}.lora_b.{i}", [LivePart(b, part.rows, lora.rank, row_cuts=part.row_cuts)]
