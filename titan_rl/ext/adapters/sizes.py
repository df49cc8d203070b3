"""The memory of adapters: in trainers, in the slots of engines, and of activations."""

from dataclasses import dataclass, replace
from itertools import chain

from titan_rl.config.sections import BYTES, Config, LoraSection
from titan_rl.ext.adapters.layers import WHOLE_MODEL_FACTOR, adaptable, adapter_parameters, slot_rank, targets
from titan_rl.preflight.added_parameters import AddedParameters
from titan_rl.preflight.memory import count, size
from titan_rl.wire.model_shape import ModelShape


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
        adapted, shape = targets(self.lora, self.shape), self.shape
        if not recomputes:
            return len(adapted) * self.lora.rank
        wide = shape.hidden_dim // tp
        sizes = {"q": shape.n_heads * shape.head_dim // tp, "k": shape.n_kv_heads * shape.head_dim // tp}
        sizes |= {"v": sizes["k"], "o": shape.dim // tp, "gate": wide, "up": wide, "down": shape.dim // tp}
        layers = [name for name in sizes if name in adaptable(shape)]  # in the order in which they are computed
        products = [[sizes[name]] + [self.lora.rank, sizes[name]] * (name in adapted) for name in layers]
        kept, before = list(chain.from_iterable(products))[::2], [sizes[name] for name in layers][::2]
        return sum(kept) - sum(before)

    def described(self, config: Config) -> str:
        lora, trained = self.lora, self.number()
        return (
            f"adapters of rank {lora.rank}, alpha {lora.alpha:g}, of {', '.join(targets(lora, self.shape))}: "
            f"{count(trained)} trained parameters ({trained / self.shape.parameters:.2%}), "
            f"{size(trained * BYTES[config.training.dtype])}; the others frozen in {lora.base_dtype}; the best rate is "
            f"about {WHOLE_MODEL_FACTOR} times the whole model's "
            '("LoRA Without Regret", Thinking Machines, 2025)'
        )
