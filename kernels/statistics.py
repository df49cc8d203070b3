"""Statistics of a loss, as sums that microbatches and ranks can add up, and sums over a microbatch's sequences.

Every loss returns `Statistics`. Sums over tokens are divided by the batch's trained tokens, sums over sequences by its
trained sequences, both fixed at packing; maxima and minima are reduced as such; counts (histograms) are added. Of
records, one is kept.

`sequence_T` holds each token's sequence index within the packed microbatch, -1 for padding.
"""

from dataclasses import dataclass, field

import torch

from titan_rl.kernels.kl import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class Statistics:
    """Scalars by metric name, and histograms as vectors of counts. Detached."""

    tokens: dict[str, torch.Tensor] = field(default_factory=dict)
    sequences: dict[str, torch.Tensor] = field(default_factory=dict)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    minima: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, torch.Tensor] = field(default_factory=dict)


Loss = tuple[torch.Tensor, Statistics]


def masked_sum(values_T: torch.Tensor, on_T: torch.Tensor) -> torch.Tensor:
    """Sum the selected values. `where` selects them, so that masked values may be anything, NaN included."""
    return torch.where(on_T, values_T.detach(), torch.zeros_like(values_T)).sum()


def masked_max(values_T: torch.Tensor, on_T: torch.Tensor) -> torch.Tensor:
    """Return the largest selected value; -inf if none is selected."""
    selected_T = torch.where(on_T, values_T.detach(), torch.full_like(values_T, -torch.inf))
    return selected_T.amax() if selected_T.numel() else selected_T.new_tensor(-torch.inf)


def masked_min(values_T: torch.Tensor, on_T: torch.Tensor) -> torch.Tensor:
    return -masked_max(-values_T, on_T)


def add_gaps(
    to: Statistics,
    logprob_T: torch.Tensor,
    behaviour_T: torch.Tensor,
    on_T: torch.Tensor,
    image_T: torch.Tensor | None = None,
) -> None:
    """Add how far the trainer's log-probs are from the sampling log-probs, and where a sample has images."""
    gap_T = (logprob_T.detach() - behaviour_T).abs()
    to.tokens["logprob_gap/mean"] = masked_sum(gap_T, on_T)
    to.tokens["logprob_gap/mult"] = masked_sum(gap_T.clamp(max=MAX_LOG_RATIO).exp(), on_T)
    to.maxima["logprob_gap/max"] = masked_max(gap_T, on_T)
    if image_T is not None:
        seen_T = on_T & (image_T > 0)
        to.tokens["logprob_gap/image"] = masked_sum(gap_T, seen_T)
        to.tokens["logprob_gap/image_share"] = seen_T.to(gap_T.dtype).sum()


def histogram(values_T: torch.Tensor, on_T: torch.Tensor, edges: tuple[float, ...]) -> torch.Tensor:
    """Count the selected values in [edges[i], edges[i + 1]); values outside all bins count into the outermost ones.

    Each bin is a difference of two counts of values >= an edge: half the time of `bucketize`, and no wait on a GPU."""
    at_least = [on_T.sum(), *((on_T & (values_T >= edge)).sum() for edge in edges[1:-1])]
    counts = torch.stack([*at_least, torch.zeros_like(at_least[0])])
    return (counts[:-1] - counts[1:]).to(torch.float32)


def sequence_sums(values_T: torch.Tensor, on_T: torch.Tensor, sequence_T: torch.Tensor, count: int) -> torch.Tensor:
    """Sum the selected tokens' values by sequence: [S]."""
    selected = torch.where(on_T, values_T, torch.zeros_like(values_T)).flatten()
    return values_T.new_zeros(count + 1).index_add(0, spare(sequence_T, count).flatten(), selected)[:count]


def sequence_lengths(on_T: torch.Tensor, sequence_T: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Count the selected tokens by sequence: [S]."""
    return sequence_sums(torch.ones_like(sequence_T, dtype=dtype), on_T, sequence_T, count)


def broadcast(values_S: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """Return each token's value of its sequence: [T]; 0 on padding."""
    return torch.cat([values_S, values_S.new_zeros(1)])[spare(sequence_T, len(values_S))]


def spare(sequence_T: torch.Tensor, count: int) -> torch.Tensor:
    """Replace the padding index -1 by an extra last sequence, `count`."""
    return torch.where(sequence_T < 0, count, sequence_T)
