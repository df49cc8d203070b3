"""Selections among the tokens of a microbatch. All are exact, deterministic and without a wait on the GPU.

A microbatch is all that a loss sees, so a quantile or a mean here is the microbatch's, not the step's.
"""

import torch


def ranks(values_T: torch.Tensor, on_T: torch.Tensor) -> torch.Tensor:
    """Return each token's place among the selected ones, the largest value first; ties go by position. Other tokens
    come after them."""
    order = torch.where(on_T, values_T, -torch.inf).flatten().argsort(descending=True, stable=True)
    return order.argsort().view_as(values_T)


def share_of(share: float, on_T: torch.Tensor) -> torch.Tensor:
    """Return a share of the selected tokens as a number, at least 1."""
    return (share * on_T.sum().double()).floor().clamp(min=1).long()


def evenly_spaced(candidates_T: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Select `count` of the candidates, or all if there are fewer, at even distances."""
    number_T = candidates_T.flatten().cumsum(0).view_as(candidates_T)  # 1 is the first candidate
    total = number_T.amax().clamp(min=1)
    count = torch.minimum(count, total)
    return candidates_T & ((number_T * count) // total > ((number_T - 1) * count) // total)


def largest_share(values_T: torch.Tensor, on_T: torch.Tensor, share: float) -> torch.Tensor:
    """Select the tokens whose value is at least the quantile 1 - `share`, interpolated linearly."""
    ordered = torch.where(on_T, values_T, torch.inf).flatten().sort().values
    place = (1 - share) * (on_T.sum() - 1).clamp(min=0).double()
    low, high = ordered[place.floor().long()], ordered[place.ceil().long()]
    return on_T & (values_T >= torch.lerp(low, high, place.frac().to(low.dtype)))


def small_squares(values_T: torch.Tensor, on_T: torch.Tensor, most: float) -> torch.Tensor:
    """Drop the largest squares until the mean of the others is below `most`. Select the others, at least one."""
    square_T = torch.where(on_T, values_T.square(), torch.inf)
    ascending = square_T.flatten().sort().values
    means = ascending.cumsum(0) / torch.arange(1, ascending.numel() + 1, device=ascending.device)  # never falls
    count = (means < most).sum().clamp(min=1)
    return on_T & (square_T <= ascending[count - 1])
