"""`fused_policy_loss.py` for a GPU: one kernel, one program a block of tokens.

    [T] columns, [S] levels -> by_logprob [T], by_entropy [T], and per program a column of sums and one of extremes

The columns are reduced by torch, so that no atomics make a run differ from its repetition. A token under the mask is
never loaded: what lies there may be anything. Settings are compile-time constants, and fixed in a run.
"""

# A kernel's arguments and values have Triton's types.
# ruff: noqa: ANN001, ANN201
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl

from titan_rl.kernels.fused_policy_loss import OnePass
from titan_rl.kernels.kl import MAX_LOG_RATIO
from titan_rl.kernels.policy_loss import Surrogate, Tokens
from titan_rl.kernels.sequences import sequence_lengths, sequence_sums
from titan_rl.kernels.statistics import RATIO_EDGES, Statistics

BLOCK = 1024
SUMS: tuple[str, ...] = (  # the rows of the kernel's sums, in its order; the histogram's bins follow
    "loss",
    "entropy",
    "logprob_gap/mean",
    "logprob_gap/mult",
    "ratio/mean",
    "clip_ratio/low",
    "clip_ratio/high",
    "clip_ratio/dual",
    "off_policy/weight_mean",
    "off_policy/weight_square",
    "off_policy/masked",
    "kl",
)
MAXIMA: tuple[str, ...] = ("logprob_gap/max", "ratio/max", "off_policy/weight_max")  # the rows of its extremes
MINIMA: tuple[str, ...] = ("ratio/min", "off_policy/weight_min")  # the rows that follow, negated


@triton.jit
def clamped(x, bound: tl.constexpr):
    return tl.minimum(tl.maximum(x, -bound), bound)


@triton.jit
def level_of(log_ratio_T, level_S, sequence_T, on_T, bound: tl.constexpr, by_sequence: tl.constexpr):
    """The token's ratio, or its sequence's."""
    if by_sequence:
        log_ratio_T = tl.load(level_S + sequence_T, mask=on_T & (sequence_T >= 0), other=0.0)
    return tl.exp(clamped(log_ratio_T, bound))


@triton.jit
def policy_loss_kernel(
    logprob_ptr,
    entropy_ptr,
    behaviour_ptr,
    proximal_ptr,
    reference_ptr,
    advantage_ptr,
    mask_ptr,
    weight_ptr,
    sequence_ptr,
    ratio_S,
    correction_S,
    rejection_S,
    by_logprob_ptr,
    by_entropy_ptr,
    sums_ptr,
    extremes_ptr,
    T,
    HAS_PROXIMAL: tl.constexpr,
    HAS_REFERENCE: tl.constexpr,
    RATIO: tl.constexpr,
    CLIP: tl.constexpr,
    CLIP_LEAST: tl.constexpr,
    CLIP_MOST: tl.constexpr,
    DUAL_CLIP: tl.constexpr,
    KL: tl.constexpr,
    KL_COEF: tl.constexpr,
    ENTROPY_COEF: tl.constexpr,
    WEIGHT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    REJECTION: tl.constexpr,
    REJECTION_LOW: tl.constexpr,
    REJECTION_HIGH: tl.constexpr,
    BOUND: tl.constexpr,
    EDGES: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    at_T = program * BLOCK + tl.arange(0, BLOCK)
    on_T = tl.load(mask_ptr + at_T, mask=at_T < T, other=0) > 0
    logprob_T = tl.load(logprob_ptr + at_T, mask=on_T, other=0.0)
    entropy_T = tl.load(entropy_ptr + at_T, mask=on_T, other=0.0)
    behaviour_T = tl.load(behaviour_ptr + at_T, mask=on_T, other=0.0)
    advantage_T = tl.load(advantage_ptr + at_T, mask=on_T, other=0.0)
    weight_T = tl.load(weight_ptr + at_T, mask=on_T, other=0.0)
    sequence_T = tl.load(sequence_ptr + at_T, mask=on_T, other=-1)
    old_T = behaviour_T
    trusted_T = logprob_T
    if HAS_PROXIMAL:
        old_T = tl.load(proximal_ptr + at_T, mask=on_T, other=0.0)
        trusted_T = old_T
    zero_T = tl.zeros_like(logprob_T)
    one_T = zero_T + 1.0
    none_T = on_T & False

    # the surrogate, and its slope
    difference_T = logprob_T - old_T
    ratio_T = level_of(difference_T, ratio_S, sequence_T, on_T, BOUND, RATIO == "sequence")
    clipped_T = tl.minimum(tl.maximum(ratio_T, CLIP_LEAST), CLIP_MOST)
    low_T = on_T & (ratio_T < CLIP_LEAST)
    high_T = on_T & (ratio_T > CLIP_MOST)
    dual_T = none_T
    if CLIP == "cispo":
        slope_T = -clipped_T * advantage_T
        loss_T = slope_T * logprob_T
    else:
        slope_T = -ratio_T * advantage_T
        loss_T = slope_T
        if CLIP == "ppo":
            loss_T = tl.maximum(slope_T, -clipped_T * advantage_T)
            low_T = low_T & (advantage_T < 0)
            high_T = high_T & (advantage_T > 0)
            if DUAL_CLIP > 0:
                loss_T = tl.where(advantage_T < 0, tl.minimum(loss_T, -DUAL_CLIP * advantage_T), loss_T)
                dual_T = on_T & (ratio_T > DUAL_CLIP) & (advantage_T < 0)
        else:
            low_T = none_T
            high_T = none_T
        moves_T = loss_T == slope_T  # no clip is the loss
        if RATIO == "token":
            moves_T = moves_T & (tl.abs(difference_T) <= BOUND)
        slope_T = tl.where(moves_T, slope_T, 0.0)

    # the off-policy correction
    correction_T = one_T
    if WEIGHT != "none":
        by_sequence: tl.constexpr = WEIGHT == "sequence_tis" or WEIGHT == "sequence_mask"
        trust_T = level_of(trusted_T - behaviour_T, correction_S, sequence_T, on_T, BOUND, by_sequence)
        if WEIGHT == "token_tis" or WEIGHT == "sequence_tis":
            correction_T = tl.minimum(trust_T, HIGH)
        else:
            correction_T = tl.where((trust_T >= LOW) & (trust_T <= HIGH), trust_T, 0.0)
    if REJECTION != "none":
        kept_T = level_of(trusted_T - behaviour_T, rejection_S, sequence_T, on_T, BOUND, REJECTION == "geometric")
        correction_T = tl.where((kept_T >= REJECTION_LOW) & (kept_T <= REJECTION_HIGH), correction_T, 0.0)
    loss_T = loss_T * correction_T
    slope_T = slope_T * correction_T

    # KL and entropy
    kl_T = zero_T
    if HAS_REFERENCE:
        log_r_T = tl.load(reference_ptr + at_T, mask=on_T, other=0.0) - logprob_T
        if KL == "k1":
            kl_T = -log_r_T
            kl_slope_T = one_T
        elif KL == "k2":
            kl_T = 0.5 * log_r_T * log_r_T
            kl_slope_T = -log_r_T
        else:
            held_T = clamped(log_r_T, BOUND)
            kl_T = tl.exp(held_T) - held_T - 1
            kl_slope_T = tl.where(tl.abs(log_r_T) <= BOUND, 1 - tl.exp(held_T), 0.0)
        loss_T += KL_COEF * kl_T
        slope_T += KL_COEF * kl_slope_T
    if ENTROPY_COEF != 0:
        loss_T -= ENTROPY_COEF * entropy_T
        tl.store(by_entropy_ptr + at_T, -ENTROPY_COEF * weight_T, mask=at_T < T)
    tl.store(by_logprob_ptr + at_T, slope_T * weight_T, mask=at_T < T)

    # the statistics; the rows are those of SUMS, MAXIMA and MINIMA
    gap_T = tl.abs(logprob_T - behaviour_T)
    sums_ptr += program
    tl.store(sums_ptr, tl.sum(loss_T * weight_T))
    tl.store(sums_ptr + 1 * programs, tl.sum(entropy_T))
    tl.store(sums_ptr + 2 * programs, tl.sum(gap_T))
    tl.store(sums_ptr + 3 * programs, tl.sum(tl.where(on_T, tl.exp(tl.minimum(gap_T, BOUND)), 0.0)))
    tl.store(sums_ptr + 4 * programs, tl.sum(tl.where(on_T, ratio_T, 0.0)))
    tl.store(sums_ptr + 5 * programs, tl.sum(low_T.to(tl.int32)))
    tl.store(sums_ptr + 6 * programs, tl.sum(high_T.to(tl.int32)))
    tl.store(sums_ptr + 7 * programs, tl.sum(dual_T.to(tl.int32)))
    tl.store(sums_ptr + 8 * programs, tl.sum(tl.where(on_T, correction_T, 0.0)))
    tl.store(sums_ptr + 9 * programs, tl.sum(tl.where(on_T, correction_T * correction_T, 0.0)))
    tl.store(sums_ptr + 10 * programs, tl.sum((on_T & (correction_T == 0)).to(tl.int32)))
    tl.store(sums_ptr + 11 * programs, tl.sum(tl.where(on_T, kl_T, 0.0)))
    extremes_ptr += program
    tl.store(extremes_ptr, tl.max(tl.where(on_T, gap_T, -float("inf"))))
    tl.store(extremes_ptr + 1 * programs, tl.max(tl.where(on_T, ratio_T, -float("inf"))))
    tl.store(extremes_ptr + 2 * programs, tl.max(tl.where(on_T, correction_T, -float("inf"))))
    tl.store(extremes_ptr + 3 * programs, tl.max(tl.where(on_T, -ratio_T, -float("inf"))))
    tl.store(extremes_ptr + 4 * programs, tl.max(tl.where(on_T, -correction_T, -float("inf"))))
    above = tl.sum(on_T.to(tl.int32))
    for i in tl.static_range(1, BINS):
        beyond = tl.sum((on_T & (ratio_T >= EDGES[i])).to(tl.int32))
        tl.store(sums_ptr + (11 + i) * programs, above - beyond)
        above = beyond
    tl.store(sums_ptr + (11 + BINS) * programs, above)


def triton_pass(logprob_T: torch.Tensor, entropy_T: torch.Tensor, tokens: Tokens, surrogate: Surrogate) -> OnePass:
    count, on_T, off_policy = logprob_T.numel(), tokens.mask > 0, surrogate.off_policy
    old_T = tokens.behaviour if tokens.proximal is None else tokens.proximal
    trusted_T = logprob_T if tokens.proximal is None else tokens.proximal

    def level_S(log_ratio_T: torch.Tensor, *, mean: bool) -> torch.Tensor:
        sums_S = sequence_sums(log_ratio_T, on_T, tokens.sequence, tokens.sequences)
        if not mean:
            return sums_S
        return sums_S / sequence_lengths(on_T, tokens.sequence, tokens.sequences, sums_S.dtype).clamp(min=1)

    by_sequence = off_policy.weight.startswith("sequence")
    ratio_S = level_S(logprob_T - old_T, mean=True) if surrogate.ratio == "sequence" else None
    correction_S = level_S(trusted_T - tokens.behaviour, mean=False) if by_sequence else None
    rejection_S = level_S(trusted_T - tokens.behaviour, mean=True) if off_policy.rejection == "geometric" else None

    programs, bins = max(triton.cdiv(count, BLOCK), 1), len(RATIO_EDGES) - 1
    by_logprob_T = torch.empty_like(logprob_T, memory_format=torch.contiguous_format)
    by_entropy_T = torch.empty_like(by_logprob_T) if surrogate.entropy_coef else None
    sums = logprob_T.new_empty(len(SUMS) + bins, programs)
    extremes = logprob_T.new_empty(len(MAXIMA) + len(MINIMA), programs)
    policy_loss_kernel[(programs,)](
        logprob_T.contiguous(),
        entropy_T.contiguous(),
        tokens.behaviour.contiguous(),
        None if tokens.proximal is None else tokens.proximal.contiguous(),
        None if tokens.reference is None else tokens.reference.contiguous(),
        tokens.advantage.contiguous(),
        on_T.contiguous(),
        tokens.weight.contiguous(),
        tokens.sequence.contiguous(),
        ratio_S,
        correction_S,
        rejection_S,
        by_logprob_T,
        by_entropy_T,
        sums,
        extremes,
        count,
        HAS_PROXIMAL=tokens.proximal is not None,
        HAS_REFERENCE=tokens.reference is not None,
        RATIO=surrogate.ratio,
        CLIP=surrogate.clip,
        CLIP_LEAST=1 - surrogate.clip_low,
        CLIP_MOST=1 + surrogate.clip_high,
        DUAL_CLIP=surrogate.dual_clip,
        KL=surrogate.kl,
        KL_COEF=surrogate.kl_coef,
        ENTROPY_COEF=surrogate.entropy_coef,
        WEIGHT=off_policy.weight,
        LOW=off_policy.low,
        HIGH=off_policy.high,
        REJECTION=off_policy.rejection,
        REJECTION_LOW=off_policy.rejection_low,
        REJECTION_HIGH=off_policy.rejection_high,
        BOUND=MAX_LOG_RATIO,
        EDGES=RATIO_EDGES,
        BINS=bins,
        BLOCK=BLOCK,
    )
    total, most = sums.sum(1), extremes.amax(1)
    named = dict(zip(SUMS, total[: len(SUMS)], strict=True))
    loss, kl = named.pop("loss"), named.pop("kl")
    if tokens.reference is not None:
        named[f"kl/{surrogate.kl}"] = kl
    statistics = Statistics(
        tokens=named,
        sums={"loss": loss},
        maxima=dict(zip(MAXIMA, most[: len(MAXIMA)], strict=True)),
        minima=dict(zip(MINIMA, -most[len(MAXIMA) :], strict=True)),
        counts={"ratio/histogram": total[len(SUMS) :].to(torch.float32)},
    )
    return loss.clone(), by_logprob_T, by_entropy_T, statistics
