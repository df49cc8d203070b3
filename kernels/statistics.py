"""What a loss tells beside its value: sums that microbatches and ranks can add up, and how they become metrics.

Every loss returns `Statistics`. Sums over tokens are divided by the batch's trained tokens, sums over sequences by its
trained sequences, both fixed at packing; maxima and minima are reduced as such; counts (histograms) are added.
"""

from dataclasses import dataclass, field

import torch

from titan_rl.wire.types import RATIO_EDGES as RATIO_EDGES


@dataclass(frozen=True, slots=True)
class Statistics:
    """Scalars by metric name, and histograms as vectors of counts. Detached."""

    tokens: dict[str, torch.Tensor] = field(default_factory=dict)
    sequences: dict[str, torch.Tensor] = field(default_factory=dict)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    minima: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, torch.Tensor] = field(default_factory=dict)


def masked_sum(values_T: torch.Tensor, on_T: torch.Tensor) -> torch.Tensor:
    """Selected by `where`, so that what lies under the mask may be anything, NaN included."""
    return torch.where(on_T, values_T.detach(), torch.zeros_like(values_T)).sum()


def masked_max(values_T: torch.Tensor, on_T: torch.Tensor) -> torch.Tensor:
    """-inf where nothing is selected."""
    selected_T = torch.where(on_T, values_T.detach(), torch.full_like(values_T, -torch.inf))
    return selected_T.amax() if selected_T.numel() else selected_T.new_tensor(-torch.inf)


def masked_min(values_T: torch.Tensor, on_T: torch.Tensor) -> torch.Tensor:
    return -masked_max(-values_T, on_T)


def histogram(values_T: torch.Tensor, on_T: torch.Tensor, edges: tuple[float, ...]) -> torch.Tensor:
    """Counts of the selected values in [edges[i], edges[i + 1]); what lies outside counts into the outermost bins.
    Differences of how many are at least an edge: half the time of `bucketize`, and a GPU need not wait."""
    at_least = [on_T.sum(), *((on_T & (values_T >= edge)).sum() for edge in edges[1:-1])]
    counts = torch.stack([*at_least, torch.zeros_like(at_least[0])])
    return (counts[:-1] - counts[1:]).to(torch.float32)
