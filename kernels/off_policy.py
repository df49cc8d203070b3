"""Corrections for data sampled by another policy: the generator's engine, or an older version of the weights.

Let r_t = exp(proximal_t - behaviour_t), where the proximal policy is the trainer's before the step's first update:

    token_tis        w_t = min(r_t, high)                              truncated importance sampling
    sequence_tis     w = min(prod_t r_t, high)
    token_mask       w_t = r_t if low <= r_t <= high else 0            masked importance sampling, IcePop
    sequence_mask    w = prod_t r_t if low <= prod_t r_t <= high else 0

Independently of the weight, a rejection drops tokens without weighting the others:

    token            keep t    if low <= r_t <= high
    geometric        keep all of the sequence if low <= (prod_t r_t)^(1/n) <= high
    second_moment    keep the tokens with the smallest (log r_t)^2 whose mean is below `rejection_moment`    M2PO

Weights multiply the surrogate, never the KL or the entropy, and carry no gradient. They change the numerator only: the
loss's denominator stays as packing fixed it, as in TRL (verl takes rejected tokens out of the mean).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from titan_rl.config.sections import Rejection, Weight
from titan_rl.kernels.kl import MAX_LOG_RATIO
from titan_rl.kernels.selections import small_squares
from titan_rl.kernels.statistics import (
    Statistics,
    broadcast,
    masked_max,
    masked_min,
    masked_sum,
    sequence_lengths,
    sequence_sums,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    weight: Weight = "none"
    low: float = 0.5  # bounds of the masks; `high` also bounds truncation
    high: float = 2.0
    rejection: Rejection = "none"
    rejection_low: float = 0.5
    rejection_high: float = 2.0
    rejection_moment: float = 0.04


def off_policy_weights(
    log_ratio_T: torch.Tensor,  # proximal - behaviour, detached
    on_T: torch.Tensor,
    sequence_T: torch.Tensor,
    count: int,
    settings: OffPolicy,
) -> tuple[torch.Tensor, Statistics]:
    """Return the factor of each token's surrogate, [T], and statistics of these weights."""
    weight_T = correction_of(log_ratio_T, on_T, sequence_T, count, settings)
    return weight_T, Statistics(
        tokens={
            "off_policy/weight_mean": masked_sum(weight_T, on_T),
            "off_policy/weight_square": masked_sum(weight_T.square(), on_T),  # for the effective sample size
            "off_policy/masked": masked_sum((weight_T == 0).to(weight_T.dtype), on_T),
        },
        maxima={"off_policy/weight_max": masked_max(weight_T, on_T)},
        minima={"off_policy/weight_min": masked_min(weight_T, on_T)},
    )


def correction_of(
    log_ratio_T: torch.Tensor, on_T: torch.Tensor, sequence_T: torch.Tensor, count: int, settings: OffPolicy
) -> torch.Tensor:
    def ratio(level: Literal["token", "sequence", "geometric"]) -> torch.Tensor:
        log_T = log_ratio_T
        if level != "token":
            log_S = sequence_sums(log_ratio_T, on_T, sequence_T, count)
            if level == "geometric":
                log_S = log_S / sequence_lengths(on_T, sequence_T, count, log_S.dtype).clamp(min=1)
            log_T = broadcast(log_S, sequence_T)
        return log_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    weight_T = torch.ones_like(log_ratio_T)
    if settings.weight != "none":
        ratio_T = ratio("sequence" if settings.weight.startswith("sequence") else "token")
        if settings.weight.endswith("tis"):
            weight_T = ratio_T.clamp(max=settings.high)
        else:
            weight_T = torch.where((ratio_T >= settings.low) & (ratio_T <= settings.high), ratio_T, 0.0)
    if settings.rejection == "second_moment":
        weight_T = torch.where(small_squares(log_ratio_T, on_T, settings.rejection_moment), weight_T, 0.0)
    elif settings.rejection != "none":
        ratio_T = ratio(settings.rejection)
        kept_T = (ratio_T >= settings.rejection_low) & (ratio_T <= settings.rejection_high)
        weight_T = torch.where(kept_T, weight_T, 0.0)
    return weight_T
