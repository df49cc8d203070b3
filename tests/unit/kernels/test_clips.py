"""Every clip but PPO's and CISPO's, the selections and the entropy bonus, against formulas written token by token."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.loss_cases import Case, case, outcome, soiled
from titan_rl.config.methods import CLIPS, function_of
from titan_rl.kernels.off_policy import OffPolicy, off_policy_weights
from titan_rl.kernels.policy_loss import policy_loss
from titan_rl.kernels.surrogate import Surrogate

SURROGATES = {
    "sapo": Surrogate(clip="sapo", sapo_tau_positive=1.3, sapo_tau_negative=2.1),
    "dppo_tv": Surrogate(clip="dppo_tv", clip_low=0.05, clip_high=0.1),
    "dppo_tv_limited": Surrogate(clip="dppo_tv", clip_low=0.05, clip_high=0.1, dual_clip=1.2),
    "dppo_kl": Surrogate(clip="dppo_kl", clip_low=0.02, clip_high=0.03),
    "prob_diff": Surrogate(clip="prob_diff", clip_low=0.05, clip_high=0.1),
    "gmpo": Surrogate(clip="gmpo", ratio="sequence", clip_low=0.3, clip_high=0.2),
    "vespo": Surrogate(clip="vespo"),
    "clip_cov": Surrogate(clip="clip_cov", cov_share=0.1, cov_low=0.1, cov_high=2.0),
    "kl_cov": Surrogate(clip="kl_cov", cov_share=0.2, cov_kl_coef=0.7),
}
EVERY = pytest.mark.parametrize("name", SURROGATES)


@dataclass
class Token:
    place: tuple[int, int]
    logprob: float
    old: float
    advantage: float
    weight: float
    entropy: float
    sequence: list["Token"] = field(default_factory=list)

    @property
    def log_ratio(self) -> float:
        return max(-20.0, min(20.0, self.logprob - self.old))

    @property
    def moved(self) -> float:
        return math.exp(self.logprob) - math.exp(self.old)


@dataclass(frozen=True)
class Term:
    """A token's surrogate, its slope by the token's log-prob, and the counters that it adds to."""

    value: float
    slope: float
    counted: tuple[str, ...] = ()


def tokens_of(at: Case) -> list[Token]:
    t = at.tokens
    old = t.behaviour if t.proximal is None else t.proximal
    found, sequences = [], defaultdict[int, list[Token]](list)
    for i, j in torch.nonzero(t.mask > 0).tolist():
        token = Token(
            place=(i, j),
            logprob=float(at.logprob[i, j]),
            old=float(old[i, j]),
            advantage=float(t.advantage[i, j]),
            weight=float(t.weight[i, j]),
            entropy=float(at.entropy[i, j]),
            sequence=sequences[int(t.sequence[i, j])],
        )
        token.sequence.append(token)
        found.append(token)
    return found


def ratio(t: Token, gone: bool, *counted: str) -> Term:
    value = 0.0 if gone else -math.exp(t.log_ratio) * t.advantage
    return Term(value, value, counted)


def score(t: Token, weight: float, *counted: str) -> Term:
    return Term(-weight * t.advantage * t.logprob, -weight * t.advantage, counted)


def sapo(t: Token, s: Surrogate) -> Term:
    tau = s.sapo_tau_positive if t.advantage > 0 else s.sapo_tau_negative
    gate = 1 / (1 + math.exp(-tau * (math.exp(t.log_ratio) - 1)))
    return Term(-4 / tau * gate * t.advantage, -4 * gate * (1 - gate) * math.exp(t.log_ratio) * t.advantage)


def dppo(t: Token, s: Surrogate) -> Term:
    p, q = math.exp(t.logprob), math.exp(t.old)
    change = abs(p - q)
    if s.clip == "dppo_kl":
        other_p, other_q = max(0.0, 1 - p), max(0.0, 1 - q)
        change = q * (t.old - t.logprob) + other_q * math.log((other_q + 1e-8) / (other_p + 1e-8))
    if t.advantage > 0 and p > q and change > s.clip_high:
        return score(t, 0, "high")
    if t.advantage <= 0 and p < q and change > s.clip_low:
        return score(t, 0, "low")
    weight = math.exp(t.log_ratio)
    if s.dual_clip and weight > s.dual_clip:
        return score(t, s.dual_clip, "dual")
    return score(t, weight)


def prob_diff(t: Token, s: Surrogate) -> Term:
    if t.moved > s.clip_high:
        return ratio(t, True, "high")
    return ratio(t, True, "low") if t.moved < -s.clip_low else ratio(t, False)


def gmpo(t: Token, s: Surrogate) -> Term:
    def clipped(each: Token) -> float:
        log = each.logprob - each.old
        return min(log, s.clip_high) if each.advantage > 0 else max(log, -s.clip_low)

    value = -math.exp(sum(map(clipped, t.sequence)) / len(t.sequence)) * t.advantage
    if clipped(t) != t.logprob - t.old:
        return Term(value, 0.0, ("high" if t.advantage > 0 else "low",))
    return Term(value, value)


def vespo(t: Token, s: Surrogate) -> Term:
    w = math.exp(max(math.log(1e-8), min(20.0, sum(each.log_ratio for each in t.sequence))))
    k = s.vespo_k_positive if t.advantage >= 0 else s.vespo_k_negative
    decay = s.vespo_lambda_positive if t.advantage >= 0 else s.vespo_lambda_negative
    return score(t, w**k * math.exp(decay * (1 - w)))


TERMS: dict[str, Callable[[Token, Surrogate], Term]] = {
    "sapo": sapo,
    "dppo_tv": dppo,
    "dppo_kl": dppo,
    "prob_diff": prob_diff,
    "gmpo": gmpo,
    "vespo": vespo,
}


def covariances(tokens: list[Token]) -> list[float]:
    mean_a = sum(t.advantage for t in tokens) / len(tokens)
    mean_l = sum(t.logprob for t in tokens) / len(tokens)
    return [(t.advantage - mean_a) * (t.logprob - mean_l) for t in tokens]


def by_covariance(tokens: list[Token], s: Surrogate) -> list[Term]:
    covariance, terms = covariances(tokens), []
    count = max(1, int(s.cov_share * len(tokens)))
    if s.clip == "kl_cov":
        chosen = set(sorted(range(len(tokens)), key=lambda i: -covariance[i])[:count])
        for i, t in enumerate(tokens):
            penalty, sign = (s.cov_kl_coef, math.copysign(1, t.log_ratio)) if i in chosen else (0.0, 0.0)
            plain = ratio(t, False, *(["selected"] if i in chosen else []))
            terms.append(Term(plain.value + penalty * abs(t.log_ratio), plain.slope + penalty * sign, plain.counted))
        return terms
    sides = []
    for t in tokens:
        r = math.exp(t.log_ratio)
        beyond_low, beyond_high = t.advantage < 0 and r < 1 - s.clip_low, t.advantage > 0 and r > 1 + s.clip_high
        sides.append("low" if beyond_low else "high" if beyond_high else "")
    inside = [i for i, side in enumerate(sides) if not side and s.cov_low < covariance[i] < s.cov_high]
    count = min(count, len(inside))
    marks = [(n * count) // len(inside) for n in range(len(inside) + 1)] if inside else [0]
    chosen = {i for i, (before, after) in zip(inside, pairwise(marks), strict=True) if after > before}
    assert len(chosen) == count
    for i, (t, side) in enumerate(zip(tokens, sides, strict=True)):
        bound = {"low": 1 - s.clip_low, "high": 1 + s.clip_high}
        if side:
            terms.append(Term(-bound[side] * t.advantage, 0.0, (side,)))
        else:
            terms.append(ratio(t, i in chosen, *(["selected"] if i in chosen else [])))
    return terms


def terms_of(at: Case, s: Surrogate) -> list[tuple[Token, Term]]:
    tokens = tokens_of(at)
    if s.clip in TERMS:
        return [(t, TERMS[s.clip](t, s)) for t in tokens]
    return list(zip(tokens, by_covariance(tokens, s) if tokens else [], strict=True))


def assert_is(at: Case, s: Surrogate, terms: list[tuple[Token, Term]]) -> None:
    """Compare the loss, its gradient by the log-prob and the counters."""
    found = outcome(policy_loss, at, s, 1.0)
    slope, counted = torch.zeros_like(at.logprob), defaultdict[str, int](int)
    for token, term in terms:
        slope[token.place] = token.weight * term.slope
        for key in term.counted:
            counted[key] += 1
    assert float(found.loss) == pytest.approx(sum(t.weight * term.value for t, term in terms), rel=1e-9, abs=1e-9)
    torch.testing.assert_close(found.by_logprob, slope, rtol=1e-9, atol=1e-12)
    prefix = "clip_ratio/"
    counters = {k.removeprefix(prefix): int(v) for k, v in found.statistics.tokens.items() if k.startswith(prefix)}
    assert counters == {key: counted[key] for key in counters}


def test_every_clip_has_a_function() -> None:
    assert all(callable(function_of(clip)) for clip in CLIPS.values())
    assert {s.clip for s in SURROGATES.values()} == {*CLIPS} - {"ppo", "cispo", "none"}


@EVERY
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 80), proximal=st.booleans())
def test_a_clip_is_its_formula(name: str, seed: int, length: int, proximal: bool) -> None:
    at = case(seed, length=length, far=2.0, spread=0.6, proximal=proximal, reference=False)
    assert_is(at, SURROGATES[name], terms_of(at, SURROGATES[name]))


@EVERY
def test_a_clip_acts_on_some_tokens_and_not_on_all(name: str) -> None:
    terms = terms_of(case(1, rows=8, far=2.0, reference=False), SURROGATES[name])
    acted = sum(bool(term.counted) for _, term in terms)
    assert acted == 0 if name in ("sapo", "vespo") else 0 < acted < len(terms)


@EVERY
def test_on_policy_a_gate_passes_the_score_function(name: str) -> None:
    """Only clip_cov drops tokens whose ratio is 1."""
    at = case(3, proximal=False, reference=False)
    at = Case(at.tokens.behaviour, at.entropy, at.tokens)
    found = outcome(policy_loss, at, replace(SURROGATES[name], cov_low=4.0, cov_high=5.0), 1.0)
    torch.testing.assert_close(found.by_logprob, -at.tokens.weight * at.tokens.advantage * at.tokens.mask)


@EVERY
def test_masked_tokens_and_huge_ratios_leave_a_clip_finite(name: str) -> None:
    s = replace(SURROGATES[name], ratio_penalty=0.1, top_entropy_share=0.5, entropy_coef=0.1)
    clean = case(4, dtype=torch.float32)
    first = outcome(policy_loss, clean, s)
    for dirt in (math.nan, math.inf):
        other = outcome(policy_loss, soiled(clean, dirt), s)
        assert torch.equal(other.loss, first.loss)
        assert torch.equal(other.by_logprob, first.by_logprob)
    for moved in (200.0, -200.0):
        found = outcome(policy_loss, Case(clean.logprob.clamp(max=0) + min(moved, 0), clean.entropy, clean.tokens), s)
        assert torch.isfinite(found.loss)
        assert torch.isfinite(found.by_logprob).all()


@EVERY
def test_a_microbatch_without_a_trained_token_has_no_loss(name: str) -> None:
    at = case(7)
    nothing = replace(at.tokens, mask=torch.zeros_like(at.tokens.mask))
    found = outcome(
        policy_loss, Case(at.logprob, at.entropy, nothing), replace(SURROGATES[name], top_entropy_share=0.5)
    )
    assert float(found.loss) == 0
    assert not found.by_logprob.any()
    assert not any(found.statistics.tokens.values())


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 80), coef=st.floats(0.01, 2.0))
def test_the_penalty_is_the_square_of_the_tokens_own_log_ratio(seed: int, length: int, coef: float) -> None:
    at = case(seed, length=length, far=2.0, reference=False)
    for level in ("token", "sequence"):
        s = Surrogate(clip="none", ratio=level, ratio_penalty=coef)
        found, without = outcome(policy_loss, at, s, 1.0), outcome(policy_loss, at, replace(s, ratio_penalty=0.0), 1.0)
        tokens = tokens_of(at)
        added = sum(t.weight * coef * t.log_ratio**2 for t in tokens)
        assert float(found.loss - without.loss) == pytest.approx(added, rel=1e-9, abs=1e-9)
        for t in tokens:
            slope = float((found.by_logprob - without.by_logprob)[t.place])
            assert slope == pytest.approx(2 * t.weight * coef * t.log_ratio, rel=1e-7, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 80), share=st.floats(0.05, 0.95))
def test_only_the_tokens_of_highest_entropy_learn(seed: int, length: int, share: float) -> None:
    at = case(seed, length=length, far=2.0)
    s = Surrogate(top_entropy_share=share, entropy_coef=0.2, kl_coef=0.1)
    found = outcome(policy_loss, at, s, 1.0)
    tokens = tokens_of(at)
    least = np.quantile([t.entropy for t in tokens], 1 - share) if tokens else 0.0
    top = torch.zeros_like(at.tokens.mask)
    for t in tokens:
        top[t.place] = float(t.entropy >= least)
    learning = replace(at.tokens, mask=top, reference=None)
    others = outcome(policy_loss, at, replace(s, top_entropy_share=1.0, entropy_coef=0.0), 1.0)
    ungated = outcome(policy_loss, Case(at.logprob, at.entropy, replace(at.tokens, reference=None)), Surrogate(), 1.0)
    gated = outcome(policy_loss, Case(at.logprob, at.entropy, learning), Surrogate(entropy_coef=0.2), 1.0)
    kl = others.loss - ungated.loss  # every token has one
    assert float(found.loss) == pytest.approx(float(gated.loss + kl), rel=1e-9, abs=1e-9)
    torch.testing.assert_close(found.by_logprob, gated.by_logprob + others.by_logprob - ungated.by_logprob)
    torch.testing.assert_close(found.by_entropy, gated.by_entropy)
    sums = found.statistics.tokens
    assert float(sums["entropy/top_share"]) == float(top.sum())
    assert float(sums["entropy/top"]) == pytest.approx(sum(t.entropy for t in tokens if top[t.place]), rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), length=st.integers(1, 80), most=st.floats(1e-3, 1.0))
def test_the_second_moment_drops_the_largest_log_ratios(seed: int, length: int, most: float) -> None:
    at = case(seed, length=length, far=2.0)
    t = at.tokens
    assert t.proximal is not None
    log_T, on_T = t.proximal - t.behaviour, t.mask > 0
    made = OffPolicy(rejection="second_moment", rejection_moment=most)
    weights, _ = off_policy_weights(log_T, on_T, t.sequence, t.sequences, made)
    squares = sorted(log_T[on_T].square().tolist(), reverse=True)
    while len(squares) > 1 and sum(squares) / len(squares) >= most:
        squares.pop(0)
    kept = log_T[on_T & (weights == 1)].square()
    assert sorted(kept.tolist(), reverse=True) == pytest.approx(squares)
    assert not weights[on_T & (weights != 1)].any()
