"""The policy losses, as one composition: ratio level x clip x off-policy correction x KL x entropy x aggregation.

    r_t   = exp(logprob_t - old_t)                     ratio = "token"       PPO, GRPO, ...
    r     = exp(mean_t(logprob_t - old_t))             ratio = "sequence"    GSPO

    loss = sum_t weight_t (correction_t surrogate_t + kl_coef KL_t + ratio_penalty (log r_t)^2 - entropy_coef H_t)

`surrogate_t` is a function of the ratio r and the advantage A, which the key `clip` names (config/methods.py); or with
`distill_top_k` the divergence from the teacher, divergence.py, times the clipped ratio if `clip` is "cispo". With
`top_entropy_share` only the tokens of highest entropy have a surrogate and an entropy bonus.
`weight_t` holds mask, aggregation and the global denominator (packing.py), so the sum over microbatches and ranks *is*
the loss. `old` is the proximal policy's log-prob if there is one (decoupled PPO), else the sampling log-prob.

All operations are plain torch, differentiated by autograd.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from titan_rl.config.methods import CLIPS, function_of
from titan_rl.config.sections import Level
from titan_rl.kernels.kl import MAX_LOG_RATIO, kl_estimate
from titan_rl.kernels.off_policy import off_policy_weights
from titan_rl.kernels.own_loss import own_loss
from titan_rl.kernels.selections import largest_share
from titan_rl.kernels.statistics import (
    Statistics,
    add_gaps,
    histogram,
    masked_max,
    masked_min,
    masked_sum,
)
from titan_rl.kernels.surrogate import Clipped, Policies, Surrogate, sequence_log_ratio
from titan_rl.wire.types import RATIO_EDGES


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs of the loss per token of a microbatch, besides the policy's log-prob. All tensors have one shape."""

    behaviour: torch.Tensor  # log-prob when the token was sampled
    advantage: torch.Tensor
    mask: torch.Tensor  # above 0 on trained tokens; values at a 0 (padding, prompts) may be anything
    weight: torch.Tensor  # weight of the token in the loss
    sequence: torch.Tensor  # index of the token's sequence, -1 on padding
    sequences: int  # number of sequences
    proximal: torch.Tensor | None = None  # log-prob before the step's first update
    reference: torch.Tensor | None = None
    divergence: torch.Tensor | None = None  # from the teacher, with its gradient
    own_loss: Callable[..., Any] | None = None  # a user's, in the place of the surrogate (own_loss.py)
    image: torch.Tensor | None = None  # above 0 in a sample with images


def policy_loss(
    logprob_T: torch.Tensor, entropy_T: torch.Tensor, tokens: Tokens, surrogate: Surrogate
) -> tuple[torch.Tensor, Statistics]:
    on_T, zero_T = tokens.mask > 0, torch.zeros_like(logprob_T)

    def selected(values_T: torch.Tensor) -> torch.Tensor:
        return torch.where(on_T, values_T, zero_T)

    current_T, behaviour_T = selected(logprob_T), selected(tokens.behaviour)
    advantage_T, entropy_T, weight_T = selected(tokens.advantage), selected(entropy_T), selected(tokens.weight)
    old_T = behaviour_T if tokens.proximal is None else selected(tokens.proximal)

    log_ratio_T = ratio_of(current_T, old_T, on_T, tokens, surrogate.ratio)
    ratio_T = log_ratio_T.exp()
    policies = Policies(on_T, current_T, old_T, ratio_T, advantage_T, tokens.sequence, tokens.sequences)
    own = dict[str, torch.Tensor]()
    if tokens.own_loss is not None:
        loss_T, own = own_loss(tokens.own_loss, policies, behaviour_T, tokens.reference)
        clipped = Clipped(loss_T)
    else:
        clipped = function_of(CLIPS[surrogate.clip])(policies, surrogate)
    if tokens.divergence is not None:
        loss_T, limited_T = selected(tokens.divergence), ratio_T.clamp(1 - surrogate.clip_low, 1 + surrogate.clip_high)
        clipped = replace(clipped, loss_T=limited_T.detach() * loss_T if surrogate.clip == "cispo" else loss_T)

    # Without a proximal policy the ratio itself corrects; a rejection then compares the current policy.
    trusted_T = current_T.detach() if tokens.proximal is None else old_T
    correction_T, statistics = off_policy_weights(
        trusted_T - behaviour_T, on_T, tokens.sequence, tokens.sequences, surrogate.off_policy
    )
    surrogate_T, bonus_T = correction_T * clipped.loss_T, entropy_T
    top_T = None
    if surrogate.top_entropy_share < 1:
        top_T = largest_share(entropy_T.detach(), on_T, surrogate.top_entropy_share)
        surrogate_T, bonus_T = torch.where(top_T, surrogate_T, zero_T), torch.where(top_T, entropy_T, zero_T)
    loss_T = surrogate_T - surrogate.entropy_coef * bonus_T
    if surrogate.ratio_penalty:
        loss_T = loss_T + surrogate.ratio_penalty * policies.log_ratio_T.square()
    kl_T = zero_T
    if tokens.reference is not None:
        kl_T = kl_estimate(current_T, torch.where(on_T, tokens.reference, current_T.detach()), surrogate.kl)
        loss_T = loss_T + surrogate.kl_coef * kl_T
    loss = (weight_T * loss_T).sum()

    with torch.no_grad():

        def count(tokens_T: torch.Tensor | None) -> torch.Tensor:
            return ratio_T.new_zeros(()) if tokens_T is None else (on_T & tokens_T).to(ratio_T.dtype).sum()

        add_gaps(statistics, current_T, behaviour_T, on_T, tokens.image)
        statistics.tokens.update(
            {
                "entropy": masked_sum(entropy_T, on_T),
                "ratio/mean": masked_sum(ratio_T, on_T),
                "clip_ratio/low": count(clipped.low_T),
                "clip_ratio/high": count(clipped.high_T),
                **{f"own/{name}": masked_sum(values_T, on_T) for name, values_T in own.items()},
                "clip_ratio/dual": count(clipped.dual_T),
            }
        )
        if clipped.selected_T is not None:
            statistics.tokens["clip_ratio/selected"] = count(clipped.selected_T)
        if top_T is not None:
            statistics.tokens.update({"entropy/top_share": count(top_T), "entropy/top": masked_sum(entropy_T, top_T)})
        if tokens.divergence is not None:
            statistics.tokens["distill/divergence"] = masked_sum(tokens.divergence, on_T)
        if tokens.reference is not None:
            statistics.tokens[f"kl/{surrogate.kl}"] = masked_sum(kl_T, on_T)
        statistics.sums["loss"] = loss.detach()
        statistics.maxima["ratio/max"] = masked_max(ratio_T, on_T)
        statistics.minima["ratio/min"] = masked_min(ratio_T, on_T)
        statistics.counts["ratio/histogram"] = histogram(ratio_T, on_T, RATIO_EDGES)
    return loss, statistics


def ratio_of(
    current_T: torch.Tensor, old_T: torch.Tensor, on_T: torch.Tensor, tokens: Tokens, level: Level
) -> torch.Tensor:
    """Return the log of each token's importance ratio, [T].

    At sequence level all tokens of a sequence share one value, and each keeps the gradient of its log-prob. GSPO's
    paper calls this GSPO-token; its gradient equals GSPO's if a sequence has one advantage and its tokens one weight.
    """
    log_ratio_T = current_T - old_T
    if level == "token":
        return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return sequence_log_ratio(log_ratio_T, on_T, tokens.sequence, tokens.sequences)


def supervised_loss(
    logprob_T: torch.Tensor, entropy_T: torch.Tensor, mask_T: torch.Tensor, weight_T: torch.Tensor
) -> tuple[torch.Tensor, Statistics]:
    """Cross-entropy: -sum_t weight_t logprob_t."""
    on_T = mask_T > 0
    loss = -torch.where(on_T, weight_T * logprob_T, torch.zeros_like(logprob_T)).sum()
    return loss, Statistics(tokens={"entropy": masked_sum(entropy_T, on_T)}, sums={"loss": loss.detach()})
