"""The policy loss in one pass: value, statistics and gradients together, the gradients in closed form.

    d loss / d logprob_t = weight_t (correction_t surrogate'_t + kl_coef KL'_t)
    d loss / d entropy_t = -entropy_coef weight_t

    surrogate'     ppo, none: -r A, but 0 where a clip is the loss or the log-ratio is clamped;  cispo: -clip(r) A
    KL'            k1: 1    k2: logprob - reference    k3: 1 - exp(reference - logprob), but 0 where clamped

Both are made in the forward pass and kept, [T] each; backward multiplies them by the incoming scalar. The few sums over
sequences (GSPO's ratio, sequence weights, geometric rejection) come first, all else is elementwise. A CPU works on the
trained tokens alone, picked once, so that nothing after that needs the mask; a GPU runs `fused_policy_loss_triton.py`.

Where two branches of a clip tie outside the clip range (r = dual_clip), autograd halves the gradient; here it is whole.
"""

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from titan_rl.kernels.kl import MAX_LOG_RATIO, Estimator, kl_estimate
from titan_rl.kernels.off_policy import correction_of
from titan_rl.kernels.policy_loss import Surrogate, Tokens, ratio_of, surrogate_of
from titan_rl.kernels.statistics import RATIO_EDGES, Statistics, histogram

# The loss, its gradients by log-prob and by entropy [T], and the statistics. A gradient of None is zero, and spares
# whoever computed the entropy its backward.
OnePass = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Statistics]


def fused_policy_loss(
    logprob_T: torch.Tensor, entropy_T: torch.Tensor, tokens: Tokens, surrogate: Surrogate
) -> tuple[torch.Tensor, Statistics]:
    """`policy_loss`: same arguments, same results."""
    loss, statistics = FusedPolicyLoss.apply(logprob_T, entropy_T, tokens, surrogate)
    return loss, statistics


class FusedPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprob_T: torch.Tensor, entropy_T: torch.Tensor, tokens: Tokens, surrogate: Surrogate
    ) -> tuple[torch.Tensor, Statistics]:
        one_pass = implementation(logprob_T.device.type)
        loss, by_logprob_T, by_entropy_T, statistics = one_pass(logprob_T, entropy_T, tokens, surrogate)
        ctx.save_for_backward(by_logprob_T, by_entropy_T)
        return loss, statistics

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator makes ctx positional
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        by_logprob_T, by_entropy_T = ctx.saved_tensors
        return grads[0] * by_logprob_T, None if by_entropy_T is None else grads[0] * by_entropy_T, None, None


@cache
def implementation(device: str) -> Callable[[torch.Tensor, torch.Tensor, Tokens, Surrogate], OnePass]:
    if device == "cuda":
        if find_spec("triton"):
            from titan_rl.kernels.fused_policy_loss_triton import triton_pass

            return triton_pass
        warnings.warn("triton is not installed: the policy loss runs as separate torch operations", stacklevel=2)
    return torch_pass


def torch_pass(logprob_T: torch.Tensor, entropy_T: torch.Tensor, tokens: Tokens, surrogate: Surrogate) -> OnePass:
    trained_K = (tokens.mask > 0).flatten().nonzero().squeeze(1)  # K of T tokens are trained

    def pick(values_T: torch.Tensor) -> torch.Tensor:
        return values_T.reshape(-1).index_select(0, trained_K)

    def place(values_K: torch.Tensor) -> torch.Tensor:
        return values_K.new_zeros(logprob_T.numel()).index_copy_(0, trained_K, values_K).view(logprob_T.shape)

    on_K = torch.ones_like(trained_K, dtype=torch.bool)
    trained = Tokens(
        behaviour=pick(tokens.behaviour),
        advantage=pick(tokens.advantage),
        mask=on_K,
        weight=pick(tokens.weight),
        sequence=pick(tokens.sequence),
        sequences=tokens.sequences,
        proximal=None if tokens.proximal is None else pick(tokens.proximal),
        reference=None if tokens.reference is None else pick(tokens.reference),
    )
    current_K, entropy_K = pick(logprob_T), pick(entropy_T)
    old_K = trained.behaviour if trained.proximal is None else trained.proximal
    trusted_K = current_K if trained.proximal is None else old_K

    ratio_K = ratio_of(current_K, old_K, on_K, trained, surrogate.ratio).exp_()
    correction_K = correction_of(
        trusted_K - trained.behaviour, on_K, trained.sequence, trained.sequences, surrogate.off_policy
    )
    surrogate_K = surrogate_of(ratio_K, current_K, trained.advantage, surrogate)
    slope_K = surrogate_slope(surrogate_K, ratio_K, current_K - old_K, trained.advantage, surrogate) * correction_K
    statistics = statistics_of(ratio_K, correction_K, current_K, entropy_K, trained, surrogate)

    loss = torch.dot(trained.weight, surrogate_K * correction_K)
    if trained.reference is not None:
        kl_K = kl_estimate(current_K, trained.reference, surrogate.kl)
        statistics.tokens[f"kl/{surrogate.kl}"] = kl_K.sum()
        if surrogate.kl_coef:
            loss += surrogate.kl_coef * torch.dot(trained.weight, kl_K)
            slope_K += surrogate.kl_coef * kl_slope(current_K, trained.reference, surrogate.kl)
    by_entropy_T = None
    if surrogate.entropy_coef:
        loss -= surrogate.entropy_coef * torch.dot(trained.weight, entropy_K)
        by_entropy_T = place(-surrogate.entropy_coef * trained.weight)
    statistics.sums["loss"] = loss.clone()
    return loss, place(slope_K.mul_(trained.weight)), by_entropy_T, statistics


def surrogate_slope(
    loss_K: torch.Tensor,
    ratio_K: torch.Tensor,
    difference_K: torch.Tensor,
    advantage_K: torch.Tensor,
    surrogate: Surrogate,
) -> torch.Tensor:
    """d surrogate_of / d logprob."""
    if surrogate.clip == "cispo":
        return -ratio_K.clamp(1 - surrogate.clip_low, 1 + surrogate.clip_high) * advantage_K
    slope_K = -ratio_K * advantage_K
    moves_K = loss_K == slope_K  # no clip is the loss
    if surrogate.ratio == "token":
        moves_K &= difference_K.abs() <= MAX_LOG_RATIO
    return slope_K * moves_K  # a third of `where`'s time, and the slope is finite


def kl_slope(logprob_K: torch.Tensor, reference_K: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """d kl_estimate / d logprob."""
    if estimator == "k1":
        return torch.ones_like(logprob_K)
    difference_K = reference_K - logprob_K
    if estimator == "k2":
        return -difference_K
    inside_K = difference_K.abs() <= MAX_LOG_RATIO
    return -difference_K.clamp(max=MAX_LOG_RATIO).expm1() * inside_K


def statistics_of(
    ratio_K: torch.Tensor,
    correction_K: torch.Tensor,
    current_K: torch.Tensor,
    entropy_K: torch.Tensor,
    trained: Tokens,
    surrogate: Surrogate,
) -> Statistics:
    """All but the loss and the KL."""
    gap_K = (current_K - trained.behaviour).abs_()
    low_K, high_K = ratio_K < 1 - surrogate.clip_low, ratio_K > 1 + surrogate.clip_high
    dual_K = torch.zeros_like(trained.mask)
    if surrogate.clip == "none":
        low_K = high_K = dual_K
    elif surrogate.clip == "ppo":
        falls_K = trained.advantage < 0
        low_K, high_K = low_K & falls_K, high_K & (trained.advantage > 0)
        if surrogate.dual_clip:
            dual_K = falls_K & (ratio_K > surrogate.dual_clip)

    def count(which_K: torch.Tensor) -> torch.Tensor:
        return which_K.sum().to(ratio_K.dtype)

    def extremes(values_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not values_K.numel():
            return values_K.new_tensor(-torch.inf), values_K.new_tensor(torch.inf)
        least, most = values_K.aminmax()
        return most, least

    ratio_max, ratio_min = extremes(ratio_K)
    weight_max, weight_min = extremes(correction_K)
    return Statistics(
        tokens={
            "off_policy/weight_mean": correction_K.sum(),
            "off_policy/weight_square": torch.dot(correction_K, correction_K),
            "off_policy/masked": count(correction_K == 0),
            "entropy": entropy_K.sum(),
            "logprob_gap/mean": gap_K.sum(),
            "logprob_gap/mult": gap_K.clamp(max=MAX_LOG_RATIO).exp_().sum(),
            "ratio/mean": ratio_K.sum(),
            "clip_ratio/low": count(low_K),
            "clip_ratio/high": count(high_K),
            "clip_ratio/dual": count(dual_K),
        },
        maxima={
            "off_policy/weight_max": weight_max,
            "logprob_gap/max": extremes(gap_K)[0],
            "ratio/max": ratio_max,
        },
        minima={"off_policy/weight_min": weight_min, "ratio/min": ratio_min},
        counts={"ratio/histogram": histogram(ratio_K, trained.mask, RATIO_EDGES)},
    )
