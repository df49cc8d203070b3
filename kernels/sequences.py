"""Sums over the sequences of a packed microbatch: `sequence_T` holds each token's sequence index, -1 for padding."""

import torch


def sequence_sums(values_T: torch.Tensor, on_T: torch.Tensor, sequence_T: torch.Tensor, count: int) -> torch.Tensor:
    """[S]: the sum of the selected tokens' values, by sequence."""
    selected = torch.where(on_T, values_T, torch.zeros_like(values_T)).flatten()
    return values_T.new_zeros(count + 1).index_add(0, spare(sequence_T, count).flatten(), selected)[:count]


def sequence_lengths(on_T: torch.Tensor, sequence_T: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """[S]: how many tokens are selected, by sequence."""
    return sequence_sums(torch.ones_like(sequence_T, dtype=dtype), on_T, sequence_T, count)


def broadcast(values_S: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """Each token's own sequence's value; 0 on padding."""
    return torch.cat([values_S, values_S.new_zeros(1)])[spare(sequence_T, len(values_S))]


def spare(sequence_T: torch.Tensor, count: int) -> torch.Tensor:
    """Padding counted into one sequence too many."""
    return torch.where(sequence_T < 0, count, sequence_T)
