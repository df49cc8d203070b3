"""The policy losses, as one composition: ratio level x clip x off-policy correction x KL x entropy x aggregation.

    r_t   = exp(logprob_t - old_t)                     ratio = "token"       PPO, GRPO, ...
    r     = exp(mean_t(logprob_t - old_t))             ratio = "sequence"    GSPO

    -min(r A, clip(r, 1 - low, 1 + high) A)            clip = "ppo"; where A < 0, at most -dual_clip A (dual clip)
    -sg(clip(r, 1 - low, 1 + high)) A logprob_t        clip = "cispo"
    -r A                                               clip = "none"

    loss = sum_t weight_t (correction_t surrogate_t + kl_coef KL_t - entropy_coef H_t)

`weight_t` holds mask, aggregation and the global denominator (packing.py), so the sum over microbatches and ranks *is*
the loss. `old` is the proximal policy's log-prob if there is one (decoupled PPO), else the sampling log-prob.

All operations are plain torch, differentiated by autograd.
"""

from dataclasses import dataclass, field

import torch

from titan_rl.config.sections import Clip, Level
from titan_rl.kernels.kl import MAX_LOG_RATIO, Estimator, kl_estimate
from titan_rl.kernels.off_policy import OffPolicy, off_policy_weights
from titan_rl.kernels.statistics import (
    Statistics,
    broadcast,
    histogram,
    masked_max,
    masked_min,
    masked_sum,
    sequence_lengths,
    sequence_sums,
)
from titan_rl.wire.types import RATIO_EDGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    ratio: Level = "token"
    clip: Clip = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0  # above 1; 0 disables it
    kl: Estimator = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    off_policy: OffPolicy = field(default_factory=OffPolicy)


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
    surrogate_T = surrogate_of(ratio_T, current_T, advantage_T, surrogate)

    # Without a proximal policy the ratio itself corrects; a rejection then compares the current policy.
    trusted_T = current_T.detach() if tokens.proximal is None else old_T
    correction_T, statistics = off_policy_weights(
        trusted_T - behaviour_T, on_T, tokens.sequence, tokens.sequences, surrogate.off_policy
    )
    loss_T = correction_T * surrogate_T - surrogate.entropy_coef * entropy_T
    kl_T = zero_T
    if tokens.reference is not None:
        kl_T = kl_estimate(current_T, torch.where(on_T, tokens.reference, current_T.detach()), surrogate.kl)
        loss_T = loss_T + surrogate.kl_coef * kl_T
    loss = (weight_T * loss_T).sum()

    with torch.no_grad():
        gap_T = (current_T - behaviour_T).abs()
        low_T = on_T & (ratio_T < 1 - surrogate.clip_low) & (advantage_T < 0)
        high_T = on_T & (ratio_T > 1 + surrogate.clip_high) & (advantage_T > 0)
        dual_T = on_T & (ratio_T > surrogate.dual_clip) & (advantage_T < 0) & bool(surrogate.dual_clip)
        if surrogate.clip == "cispo":  # clips the weight for advantages of both signs
            low_T, high_T = on_T & (ratio_T < 1 - surrogate.clip_low), on_T & (ratio_T > 1 + surrogate.clip_high)
            dual_T = torch.zeros_like(on_T)  # cispo has no dual clip
        if surrogate.clip == "none":
            low_T = high_T = dual_T = torch.zeros_like(on_T)
        statistics.tokens.update(
            {
                "entropy": masked_sum(entropy_T, on_T),
                "logprob_gap/mean": masked_sum(gap_T, on_T),
                "logprob_gap/mult": masked_sum(gap_T.clamp(max=MAX_LOG_RATIO).exp(), on_T),
                "ratio/mean": masked_sum(ratio_T, on_T),
                "clip_ratio/low": low_T.to(ratio_T.dtype).sum(),
                "clip_ratio/high": high_T.to(ratio_T.dtype).sum(),
                "clip_ratio/dual": dual_T.to(ratio_T.dtype).sum(),
            }
        )
        if tokens.reference is not None:
            statistics.tokens[f"kl/{surrogate.kl}"] = masked_sum(kl_T, on_T)
        statistics.sums["loss"] = loss.detach()
        statistics.maxima["logprob_gap/max"] = masked_max(gap_T, on_T)
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
    log_ratio_T = (current_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "token":
        return log_ratio_T
    detached_T = (current_T - old_T).detach()
    lengths_S = sequence_lengths(on_T, tokens.sequence, tokens.sequences, current_T.dtype).clamp(min=1)
    mean_S = sequence_sums(detached_T, on_T, tokens.sequence, tokens.sequences) / lengths_S
    level_T = broadcast(mean_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), tokens.sequence)
    return torch.where(on_T, level_T + (current_T - current_T.detach()), torch.zeros_like(current_T))


def surrogate_of(
    ratio_T: torch.Tensor, logprob_T: torch.Tensor, advantage_T: torch.Tensor, surrogate: Surrogate
) -> torch.Tensor:
    clipped_T = ratio_T.clamp(1 - surrogate.clip_low, 1 + surrogate.clip_high)
    if surrogate.clip == "cispo":
        return -clipped_T.detach() * advantage_T * logprob_T
    if surrogate.clip == "none":
        return -ratio_T * advantage_T
    loss_T = -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    if surrogate.dual_clip:
        loss_T = torch.where(advantage_T < 0, torch.minimum(loss_T, -surrogate.dual_clip * advantage_T), loss_T)
    return loss_T


def supervised_loss(
    logprob_T: torch.Tensor, entropy_T: torch.Tensor, mask_T: torch.Tensor, weight_T: torch.Tensor
) -> tuple[torch.Tensor, Statistics]:
    """Cross-entropy: -sum_t weight_t logprob_t."""
    on_T = mask_T > 0
    loss = -torch.where(on_T, weight_T * logprob_T, torch.zeros_like(logprob_T)).sum()
    return loss, Statistics(tokens={"entropy": masked_sum(entropy_T, on_T)}, sums={"loss": loss.detach()})
