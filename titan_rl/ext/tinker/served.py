"""What clients ask of a model that they train on a server: its adapters, a loss, a step of its optimizer."""

from dataclasses import dataclass
from typing import Literal

from titan_rl.config.choices import Level

FACTS = "model.json"
"""File beside the adapters of a saved model: base, rank, layers, steps."""
MAX_TOGETHER = 4
"""Adapters that one batch of an engine may use. Requests for others wait."""
LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo"]


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    rank: int
    alpha: float  # their product is multiplied by alpha / rank
    targets: tuple[str, ...]  # names of ext.adapters.layers.LAYERS
    seed: int

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class ServedLoss:
    """A loss, which is a sum over tokens. A ratio is clipped to [1 - low, 1 + high]."""

    name: LossName
    ratio: Level = "token"
    clip: str = "none"
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class AdamStep:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_norm: float  # larger gradients are clipped to it; 0: none are
