"""The torch reference, compared with its definition written token by token in plain Python."""

import math
from collections import defaultdict
from dataclasses import fields, replace
from itertools import product
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.loss_cases import Case, Outcome, case, outcome, soiled
from support.named import case_named
from titan_rl.config.sections import Level
from titan_rl.kernels.kl import Estimator
from titan_rl.kernels.off_policy import OffPolicy, Rejection, Weight
from titan_rl.kernels.policy_loss import Tokens, policy_loss, supervised_loss
from titan_rl.kernels.statistics import Statistics
from titan_rl.kernels.surrogate import Surrogate

LEVELS, ESTIMATORS = get_args(Level), get_args(Estimator)
CLIPS: tuple[str, ...] = ("ppo", "cispo", "none")  # the others: test_clips.py
WEIGHTS = get_args(Weight)
REJECTIONS: tuple[Rejection, ...] = ("none", "token", "geometric")

SURROGATES = [
    Surrogate(
        ratio=ratio,
        clip=clip,
        clip_high=0.28,
        dual_clip=1.5 if clip == "ppo" else 0.0,
        kl=kl,
        kl_coef=0.1,
        entropy_coef=0.01,
        off_policy=OffPolicy(weight=weight, high=1.6, rejection=rejection),
    )
    for ratio, clip, kl, weight, rejection in product(LEVELS, CLIPS, ESTIMATORS, WEIGHTS, REJECTIONS)
]


def name(surrogate: Surrogate) -> str:
    s, o = surrogate, surrogate.off_policy
    return f"{s.ratio}-{s.clip}-{s.kl}-weight_{o.weight}-reject_{o.rejection}"


def assert_same(got: Outcome, want: Outcome, tolerance: float) -> None:
    """Compare relatively and absolutely; a sum over tokens may differ by every term's rounding."""

    def same(what: str, mine: torch.Tensor, theirs: torch.Tensor, terms: int = 1) -> None:
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance * terms, msg=lambda message: f"{what}: {message}"
        )

    same("loss", got.loss, want.loss)
    same("gradient of the log-probs", got.by_logprob, want.by_logprob)
    same("gradient of the entropies", got.by_entropy, want.by_entropy)
    for kind in (f.name for f in fields(Statistics)):
        mine, theirs = getattr(got.statistics, kind), getattr(want.statistics, kind)
        assert mine.keys() == theirs.keys(), kind
        for key, value in theirs.items():
            same(f"{kind} {key}", mine[key], value, terms=want.by_logprob.numel())


def held(x: float) -> float:
    return max(-20.0, min(20.0, x))


def correction_by_hand(o: OffPolicy, log_trust: float, logs: list[float]) -> float:
    """Return the factor of one token whose sequence has the log-ratios `logs`."""
    correction = 1.0
    if o.weight != "none":
        trust = math.exp(held(log_trust if o.weight.startswith("token") else sum(logs)))
        correction = min(trust, o.high) if o.weight.endswith("tis") else trust if o.low <= trust <= o.high else 0.0
    if o.rejection != "none":
        trust = math.exp(held(log_trust if o.rejection == "token" else sum(logs) / len(logs)))
        correction *= o.rejection_low <= trust <= o.rejection_high
    return correction


def by_hand(at: Case, surrogate: Surrogate) -> tuple[float, dict[str, float]]:
    """Return the loss, and the statistics that are sums over tokens."""
    s, t = surrogate, at.tokens
    places = [(i, j) for i in range(t.mask.shape[0]) for j in range(t.mask.shape[1]) if t.mask[i, j] > 0]

    def number(column: torch.Tensor, place: tuple[int, int]) -> float:
        return float(column[place])

    old = t.behaviour if t.proximal is None else t.proximal
    trusted = at.logprob if t.proximal is None else t.proximal
    members = defaultdict(list)
    for place in places:
        members[int(t.sequence[place])].append(place)

    def differences(a: torch.Tensor, b: torch.Tensor, place: tuple[int, int]) -> list[float]:
        """Return a - b of all trained tokens of the token's sequence."""
        return [number(a, p) - number(b, p) for p in members[int(t.sequence[place])]]

    total, sums = 0.0, defaultdict(float)
    for place in places:
        logprob, advantage = number(at.logprob, place), number(t.advantage, place)
        log_ratio = logprob - number(old, place)
        if s.ratio == "sequence":
            logs = differences(at.logprob, old, place)
            log_ratio = sum(logs) / len(logs)
        ratio = math.exp(held(log_ratio))
        clipped = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
        if s.clip == "cispo":
            loss = -clipped * advantage * logprob
        elif s.clip == "none":
            loss = -ratio * advantage
        else:
            loss = -min(ratio * advantage, clipped * advantage)
            if s.dual_clip and advantage < 0:
                loss = min(loss, -s.dual_clip * advantage)
                sums["clip_ratio/dual"] += ratio > s.dual_clip
        if s.clip != "none":
            sums["clip_ratio/low"] += ratio < 1 - s.clip_low and (s.clip == "cispo" or advantage < 0)
            sums["clip_ratio/high"] += ratio > 1 + s.clip_high and (s.clip == "cispo" or advantage > 0)

        log_trust = number(trusted, place) - number(t.behaviour, place)
        correction = correction_by_hand(s.off_policy, log_trust, differences(trusted, t.behaviour, place))
        loss *= correction

        if t.reference is not None:
            log_r = number(t.reference, place) - logprob
            kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": math.exp(held(log_r)) - held(log_r) - 1}[s.kl]
            loss += s.kl_coef * kl
            sums[f"kl/{s.kl}"] += kl
        loss -= s.entropy_coef * number(at.entropy, place)
        total += number(t.weight, place) * loss
        gap = abs(logprob - number(t.behaviour, place))
        sums["logprob_gap/mean"] += gap
        sums["logprob_gap/mult"] += math.exp(held(gap))
        sums["ratio/mean"] += ratio
        sums["entropy"] += number(at.entropy, place)
        sums["off_policy/weight_mean"] += correction
        sums["off_policy/weight_square"] += correction**2
        sums["off_policy/masked"] += correction == 0
    return total, sums


def test_the_loss_is_its_definition() -> None:
    for seed, surrogate in enumerate(SURROGATES):
        at = case(seed, proximal=seed % 2 > 0)
        with case_named(name(surrogate)):
            loss, statistics = policy_loss(at.logprob, at.entropy, at.tokens, surrogate)
            want, sums = by_hand(at, surrogate)
            assert float(loss) == pytest.approx(want, rel=1e-9, abs=1e-9)
            sums |= {key: sums[key] for key in ("clip_ratio/low", "clip_ratio/high", "clip_ratio/dual")}
            found = {key: float(value) for key, value in statistics.tokens.items()}
            assert found == pytest.approx(sums, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), surrogate=st.sampled_from(SURROGATES), length=st.integers(1, 60))
def test_the_loss_is_its_definition_on_any_microbatch(seed: int, surrogate: Surrogate, length: int) -> None:
    at = case(seed, rows=1, length=length, proximal=seed % 2 > 0)
    loss, _ = policy_loss(at.logprob, at.entropy, at.tokens, surrogate)
    assert float(loss) == pytest.approx(by_hand(at, surrogate)[0], rel=1e-9, abs=1e-9)


DIFFERENTIATED = [
    s for s in SURROGATES if s.clip != "cispo" and s.ratio == "token" and s.off_policy.rejection == "none"
]


def test_the_gradient_is_the_numerical_one() -> None:
    """Test the settings that differentiate their whole loss: cispo and the sequence ratio stop gradients by design."""
    at = case(3, rows=1, length=24, far=2.0)
    logprob, entropy = at.logprob.clone().requires_grad_(), at.entropy.clone().requires_grad_()
    for surrogate in DIFFERENTIATED:
        with case_named(name(surrogate)):
            assert torch.autograd.gradcheck(
                lambda x, y, surrogate=surrogate: policy_loss(x, y, at.tokens, surrogate)[0], (logprob, entropy)
            )


@pytest.mark.parametrize("clip", ["ppo", "none"])
def test_at_sequence_level_the_gradient_is_gspos(clip: str) -> None:
    """GSPO differentiates one ratio per sequence, which is the same if a sequence has one advantage and one weight."""
    at = case(5, spread=0.05)
    t = at.tokens
    spread = torch.randn(t.sequences, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    on_T = t.mask > 0
    tokens = replace(t, advantage=spread[t.sequence.clamp(min=0)], weight=t.mask / 40, proximal=None, reference=None)
    got = outcome(policy_loss, Case(at.logprob, at.entropy, tokens), Surrogate(ratio="sequence", clip=clip), 1.0)

    logprob = at.logprob.clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(t.sequences):
        mine_T = on_T & (t.sequence == i)
        if mine_T.any():
            ratio = (logprob - t.behaviour)[mine_T].mean().clamp(-20, 20).exp()
            clipped = ratio.clamp(0.8, 1.2) if clip == "ppo" else ratio
            loss = loss - torch.minimum(ratio * spread[i], clipped * spread[i]) * mine_T.sum() / 40
    loss.backward()
    torch.testing.assert_close(got.loss, loss.detach(), rtol=1e-12, atol=1e-12)
    assert logprob.grad is not None
    torch.testing.assert_close(got.by_logprob, logprob.grad, rtol=1e-9, atol=1e-12)


def test_cispo_weighs_the_score_function() -> None:
    at = case(2)
    got = outcome(policy_loss, at, Surrogate(clip="cispo", clip_low=0.1, clip_high=0.3), 1.0)
    assert at.tokens.proximal is not None
    ratio = (at.logprob - at.tokens.proximal).exp().clamp(0.9, 1.3)
    torch.testing.assert_close(got.by_logprob, -at.tokens.weight * ratio * at.tokens.advantage * at.tokens.mask)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("ratio", LEVELS)
def test_on_policy_the_gradient_is_minus_the_advantage(ratio: str, clip: str) -> None:
    at = case(1, proximal=False, reference=False)
    on_policy = Case(at.tokens.behaviour, at.entropy, at.tokens)
    got = outcome(policy_loss, on_policy, Surrogate(ratio=ratio, clip=clip), 1.0)  # pyright: ignore[reportArgumentType]
    trained = float(at.tokens.mask.sum())
    torch.testing.assert_close(got.by_logprob, -at.tokens.weight * at.tokens.advantage * at.tokens.mask)
    s = got.statistics
    assert float(s.tokens["ratio/mean"]) == float(s.tokens["logprob_gap/mult"]) == trained
    assert float(s.maxima["logprob_gap/max"]) == 0
    assert float(s.minima["ratio/min"]) == float(s.maxima["ratio/max"]) == 1
    assert s.counts["ratio/histogram"].tolist() == [0, 0, 0, 0, 0, trained, 0, 0, 0, 0, 0]
    assert all(float(s.tokens[f"clip_ratio/{side}"]) == 0 for side in ("low", "high", "dual"))


def test_what_lies_under_the_mask_is_never_seen() -> None:
    at = case(4)
    dirty = [soiled(at, dirt) for dirt in (math.nan, math.inf)]
    for surrogate in SURROGATES:
        with case_named(name(surrogate)):
            clean = outcome(policy_loss, at, surrogate)
            for each in dirty:
                assert_same(outcome(policy_loss, each, surrogate), clean, tolerance=0.0)


def one_token(log_ratio: float, advantage: float, surrogate: Surrogate) -> dict[str, int]:
    """Return the clip counters of a microbatch of one token."""
    one = torch.ones(1, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.int64)
    tokens = Tokens(0 * one, advantage * one, mask=one, weight=one, sequence=zero, sequences=1)
    _, statistics = policy_loss(log_ratio * one, one, tokens, surrogate)
    return {k.removeprefix("clip_ratio/"): int(v) for k, v in statistics.tokens.items() if k.startswith("clip_ratio/")}


@pytest.mark.parametrize(
    ("clip", "log_ratio", "advantage", "binding"),
    [
        ("ppo", 1, 1, {"high"}),
        ("ppo", 1, -1, set()),
        ("ppo", -1, -1, {"low"}),
        ("ppo", -1, 1, set()),
        ("ppo", 2, -1, {"dual"}),
        ("ppo", 2, 1, {"high"}),
        ("cispo", 1, -1, {"high"}),
        ("cispo", -1, 1, {"low"}),
        ("cispo", 2, -1, {"high"}),
        ("none", 2, -1, set()),
        ("none", -1, -1, set()),
    ],
)
def test_only_the_clip_that_binds_is_counted(clip: str, log_ratio: float, advantage: float, binding: set[str]) -> None:
    counted = one_token(log_ratio, advantage, Surrogate(clip=clip, dual_clip=3.0))
    assert {side for side, count in counted.items() if count} == binding


def test_a_huge_log_ratio_stays_finite() -> None:
    at = case(6, dtype=torch.float32)
    for surrogate, log_ratio in product(SURROGATES, (200.0, -200.0)):
        with case_named(name(surrogate)):
            got = outcome(policy_loss, Case(at.logprob + log_ratio, at.entropy, at.tokens), surrogate)
            assert torch.isfinite(got.loss)
            assert torch.isfinite(got.by_logprob).all()
            s = got.statistics
            assert all(torch.isfinite(v) for v in (*s.tokens.values(), *s.maxima.values(), *s.minima.values()))


@pytest.mark.parametrize("padding", [True, False])
def test_a_microbatch_without_a_trained_token_has_no_loss_and_no_gradient(padding: bool) -> None:
    at = case(7)
    tokens = replace(at.tokens, mask=torch.zeros_like(at.tokens.mask))
    if padding:
        tokens = replace(tokens, sequence=torch.full_like(tokens.sequence, -1), sequences=0)
    for surrogate in SURROGATES[::7]:
        got = outcome(policy_loss, Case(at.logprob, at.entropy, tokens), surrogate)
        assert float(got.loss) == 0
        assert not got.by_logprob.any()
        assert not got.by_entropy.any()
        assert not any(got.statistics.tokens.values())
        assert float(got.statistics.maxima["ratio/max"]) == -math.inf
        assert float(got.statistics.minima["ratio/min"]) == math.inf


@pytest.mark.parametrize("kl", ESTIMATORS)
def test_the_kl_and_the_entropy_are_not_weighed_by_the_correction(kl: str) -> None:
    """A rejection of everything leaves exactly these terms."""
    at = case(8, spread=0.0, far=0.0)
    nothing = OffPolicy(rejection="token", rejection_low=5.0, rejection_high=6.0)
    surrogate = Surrogate(kl=kl, kl_coef=0.5, entropy_coef=0.25, off_policy=nothing)  # pyright: ignore[reportArgumentType]
    loss, statistics = policy_loss(at.logprob + 0.1, at.entropy, at.tokens, surrogate)
    value = {"k1": 0.1, "k2": 0.1**2 / 2, "k3": math.exp(-0.1) + 0.1 - 1}[kl]
    want = at.tokens.mask * at.tokens.weight * (0.5 * value - 0.25 * at.entropy)
    assert float(loss) == pytest.approx(float(want.sum()), rel=1e-9)
    assert float(statistics.tokens["off_policy/masked"]) == float(at.tokens.mask.sum())


def test_the_sums_over_microbatches_are_the_batchs() -> None:
    whole, surrogate = case(9, rows=4), SURROGATES[0]
    loss, statistics = policy_loss(whole.logprob, whole.entropy, whole.tokens, surrogate)
    parts = []
    for row in range(4):
        columns = {k: v[row] for k, v in whole.columns().items()}
        tokens = replace(whole.tokens, mask=whole.tokens.mask[row], sequence=whole.tokens.sequence[row], **columns)
        parts.append(policy_loss(whole.logprob[row], whole.entropy[row], tokens, surrogate))
    assert float(sum(part for part, _ in parts)) == pytest.approx(float(loss), rel=1e-12)
    for key, value in statistics.tokens.items():
        assert float(sum(s.tokens[key] for _, s in parts)) == pytest.approx(float(value), rel=1e-12)
    histograms = torch.stack([s.counts["ratio/histogram"] for _, s in parts])
    assert torch.equal(histograms.sum(0), statistics.counts["ratio/histogram"])


def test_the_histogram_counts_half_open_bins() -> None:
    ratios = torch.tensor([0.1, 0.5, 0.8, 0.99, 1.0, 1.01, 2.0, 50.0], dtype=torch.float64)
    one = torch.ones_like(ratios)
    tokens = Tokens(0 * one, one, mask=one, weight=one, sequence=torch.arange(8), sequences=8)
    # the log of an edge may come back a bit below it, so each ratio is moved a bit up
    _, statistics = policy_loss((ratios * (1 + 1e-12)).log(), one, tokens, Surrogate())
    assert statistics.counts["ratio/histogram"].tolist() == [1, 1, 1, 0, 0, 2, 1, 0, 0, 0, 2]


def test_supervised_is_cross_entropy() -> None:
    at = case(10)
    logits = torch.randn(2, 40, 11, dtype=torch.float64)
    targets = torch.randint(0, 11, (2, 40))
    logprob = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    loss, statistics = supervised_loss(logprob, at.entropy, at.tokens.mask, at.tokens.weight)
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 40)
    assert float(loss) == pytest.approx(float((want * at.tokens.mask * at.tokens.weight).sum()), rel=1e-9)
    assert float(statistics.sums["loss"]) == float(loss)


def test_the_gap_on_images_is_the_mean_over_their_tokens() -> None:
    at = case(3, proximal=False)
    image = torch.zeros_like(at.tokens.mask)
    image[..., ::2] = 1
    _, statistics = policy_loss(at.logprob, at.entropy, replace(at.tokens, image=image), SURROGATES[0])
    on = (at.tokens.mask > 0) & (image > 0)
    share = float(statistics.tokens["logprob_gap/image_share"])
    assert share == on.sum() > 0
    gaps = (at.logprob - at.tokens.behaviour).abs()[on]
    assert float(statistics.tokens["logprob_gap/image"]) / share == pytest.approx(float(gaps.mean()))
