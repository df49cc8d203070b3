"""The product of vLLM's layers with adapters on a CPU."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BASE = -1
"""vLLM's index of the slot of a token whose request has no adapter."""


def apply_adapters() -> None:
    """Make adapted layers multiply the tokens of each slot by A and B of its adapter, and skip tokens of the base.

    vLLM copies A and B for every token, to serve several adapters: memory grows with tokens x rank x width. For tokens
    of the base it takes index -1 as the last slot (docs/upstream/issues/vllm-cpu-lora-base.md).
    """
    from torch.nn.functional import linear
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    def apply(
        self: Any,
        y: "Tensor",
        x: "Tensor",
        lora_a_stacked: "tuple[Tensor, ...]",
        lora_b_stacked: "tuple[Tensor, ...]",
        scale: float,  # 1: B carries alpha / rank
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        parts = [*zip(y.split(output_slices, dim=-1), lora_a_stacked, lora_b_stacked, strict=True)]
        slots = self.token_lora_indices
        if bool((slots == slots[0]).all()):
            if (slot := int(slots[0])) != BASE:
                for part, a, b in parts:
                    part += linear(linear(x, a[slot, 0]), b[slot, 0])
            return
        if x.shape[:-1] != slots.shape:
            raise RuntimeError(f"expected a slot for each of {x.shape[:-1].numel()} tokens, found {len(slots)}")
        for slot in slots.unique().tolist():
            if slot == BASE:
                continue
            rows = (slots == slot).nonzero().squeeze(1)
            for part, a, b in parts:
                part.index_add_(0, rows, linear(linear(x[rows], a[slot, 0]), b[slot, 0]))

    patched: Any = PunicaWrapperCPU
    patched.add_lora_linear = apply
