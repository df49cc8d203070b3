"""The memory of adapters: in trainers, in the slots of engines, and of activations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from titan_rl.config.sections import BYTES, Config, LoraSection
from titan_rl.ext.adapters.layers import (
    WHOLE_MODEL_FACTOR,
    adaptable,
    adapted_weights,
    adapter_parameters,
    cut_of,
    in_block,
    slot_rank,
    targets,
)
from titan_rl.preflight.added_parameters import AddedParameters
from titan_rl.preflight.memory import count, size
from titan_rl.wire.model_shape import ModelShape, SpecShape


@dataclass(frozen=True, slots=True)
class AdapterSizes(AddedParameters):
    lora: LoraSection
    shape: ModelShape

    def number(self, tp: int = 1) -> int:
        return adapter_parameters(self.lora, self.shape, tp)

    def slot(self, tp: int) -> tuple[int, int]:
        """Return the size of vLLM's slots with room for this rank: on all layers."""
        rank = slot_rank(self.lora.rank)
        return rank, adapter_parameters(replace(self.lora, rank=rank), self.shape, tp)

    def kept_per_token(self, tp: int, *, recomputes: bool) -> int:
        """Every second product is kept: with all adapters those with W and B of one layer, and that with A of the next.
        Without recomputation: what A computes, which B's gradient needs."""
        if not recomputes:
            return len(targets(self.lora, self.shape)) * self.lora.rank
        return max(map(self._second_products, self._blocks(tp)))

    def _second_products(self, block: Sequence[tuple[int, bool]]) -> int:
        """Return how many more numbers every second product has, for layers' outputs and whether each is adapted."""
        products = [[size] + [self.lora.rank, size] * adapted for size, adapted in block]
        kept, before = list(chain.from_iterable(products))[::2], [size for size, _ in block][::2]
        return sum(kept) - sum(before)

    def _blocks(self, tp: int) -> Iterator[list[tuple[int, bool]]]:
        """Yield the same of each kind of block, in the order in which a block computes them."""
        shape, adapted = self.shape, targets(self.lora, self.shape)
        if isinstance(shape, SpecShape):
            chosen = set(adapted_weights(self.lora, shape))
            for _, block in groupby(shape.adaptable, lambda weight: weight.removesuffix(f"{in_block(weight)}.weight")):
                cuts = {weight: tp if cut_of(weight, shape) == "rows" else 1 for weight in block}
                yield [(shape.tensors[weight][0] // cut, weight in chosen) for weight, cut in cuts.items()]
            return
        wide = shape.hidden_dim // tp
        sizes = {"q": shape.n_heads * shape.head_dim // tp, "k": shape.n_kv_heads * shape.head_dim // tp}
        sizes |= {"v": sizes["k"], "o": shape.dim // tp, "gate": wide, "up": wide, "down": shape.dim // tp}
        yield [(size, name in adapted) for name, size in sizes.items() if name in adaptable(shape)]

    def described(self, config: Config) -> str:
        lora, trained = self.lora, self.number()
        return (
            f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, of {', '.join(targets(lora, self.shape))}: "
            f"{count(trained)} trained parameters ({trained / self.shape.parameters:.2%}), "
            f"{size(trained * BYTES[config.training.dtype])}; the others frozen in {lora.base_dtype}; the best rate is "
            f"about {WHOLE_MODEL_FACTOR} times the whole model's "
            '("LoRA Without Regret", Thinking Machines, 2025)'
        )
