"""The one-pass policy loss is its torch reference: value, both gradients and every statistic."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_cases import (
    CLIPS,
    ESTIMATORS,
    LEVELS,
    REJECTIONS,
    SURROGATES,
    WEIGHTS,
    Case,
    assert_same,
    case,
    name,
    outcome,
    soiled,
)
from titan_rl.kernels import fused_policy_loss as fused
from titan_rl.kernels.fused_policy_loss import fused_policy_loss
from titan_rl.kernels.policy_loss import OffPolicy, Surrogate, policy_loss

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
EVERY_SURROGATE = pytest.mark.parametrize("surrogate", SURROGATES, ids=name)


def assert_is_the_reference(at: Case, surrogate: Surrogate) -> None:
    want = outcome(policy_loss, at, surrogate)
    assert_same(outcome(fused_policy_loss, at, surrogate), want, TOLERANCES[at.logprob.dtype])


@EVERY_SURROGATE
def test_the_pass_is_the_reference(surrogate: Surrogate) -> None:
    seed = SURROGATES.index(surrogate)
    for dtype in TOLERANCES:
        for proximal in (True, False):
            assert_is_the_reference(case(seed, dtype=dtype, proximal=proximal, reference=seed % 4 > 0), surrogate)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_the_pass_is_the_reference_whatever_the_settings(data: st.DataObject) -> None:
    low, high = st.floats(0.05, 0.95), st.floats(1.05, 4.0)
    off_policy = OffPolicy(
        weight=data.draw(st.sampled_from(WEIGHTS)),
        low=data.draw(low),
        high=data.draw(high),
        rejection=data.draw(st.sampled_from(REJECTIONS)),
        rejection_low=data.draw(low),
        rejection_high=data.draw(high),
    )
    surrogate = Surrogate(
        ratio=data.draw(st.sampled_from(LEVELS)),
        clip=data.draw(st.sampled_from(CLIPS)),
        clip_low=data.draw(st.floats(0.0, 0.9)),
        clip_high=data.draw(st.floats(0.0, 2.0)),
        dual_clip=data.draw(st.one_of(st.just(0.0), st.floats(1.01, 5.0))),
        kl=data.draw(st.sampled_from(ESTIMATORS)),
        kl_coef=data.draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
        entropy_coef=data.draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
        off_policy=off_policy,
    )
    at = case(
        data.draw(st.integers(0, 10_000)),
        rows=data.draw(st.integers(1, 3)),
        length=data.draw(st.integers(1, 64)),
        proximal=data.draw(st.booleans()),
        reference=data.draw(st.booleans()),
        far=data.draw(st.sampled_from([0.0, 2.0, 30.0])),
    )
    assert_is_the_reference(at, surrogate)


@EVERY_SURROGATE
def test_what_lies_under_the_mask_is_never_seen(surrogate: Surrogate) -> None:
    clean = outcome(fused_policy_loss, case(4), surrogate)
    for dirt in (math.nan, math.inf):
        assert_same(outcome(fused_policy_loss, soiled(case(4), dirt), surrogate), clean, tolerance=0.0)


@pytest.mark.parametrize("surrogate", SURROGATES[::7], ids=name)
@pytest.mark.parametrize("length", [0, 40])
def test_an_empty_microbatch_is_the_references(surrogate: Surrogate, length: int) -> None:
    at = case(7, length=length)
    padding, nothing = torch.full_like(at.tokens.sequence, -1), torch.zeros_like(at.tokens.mask)
    assert_is_the_reference(replace(at, tokens=replace(at.tokens, mask=nothing)), surrogate)
    without = replace(at.tokens, mask=nothing, sequence=padding, sequences=0)
    assert_is_the_reference(replace(at, tokens=without), surrogate)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("ratio", LEVELS)
def test_on_policy_nothing_is_clipped_away(ratio: str, clip: str) -> None:
    """Both branches of the clip tie at every token there, and each passes the gradient."""
    at = case(1, proximal=False)
    surrogate = Surrogate(ratio=ratio, clip=clip, clip_low=0.0, clip_high=0.0)  # pyright: ignore[reportArgumentType]
    assert_is_the_reference(replace(at, logprob=at.tokens.behaviour), surrogate)


@pytest.mark.parametrize("log_ratio", [20.0, 20.5, -20.0, -20.5])
@pytest.mark.parametrize("kl", ESTIMATORS)
def test_the_clamps_end_where_the_references_end(log_ratio: float, kl: str) -> None:
    at = case(2, spread=0.0, far=0.0)
    zero = torch.zeros_like(at.logprob)
    tokens = replace(at.tokens, behaviour=zero, proximal=None, reference=zero)
    surrogate = Surrogate(clip="none", kl=kl, kl_coef=0.1)  # pyright: ignore[reportArgumentType]
    got = outcome(fused_policy_loss, Case(zero + log_ratio, at.entropy, tokens), surrogate)
    want = outcome(policy_loss, Case(zero + log_ratio, at.entropy, tokens), surrogate)
    torch.testing.assert_close(got.by_logprob, want.by_logprob, rtol=1e-12, atol=1e-12)


def test_columns_may_be_views_of_any_stride_and_the_mask_of_booleans() -> None:
    at = case(3, rows=6, length=30)
    columns = {k: v.T for k, v in at.columns().items()}
    tokens = replace(at.tokens, mask=(at.tokens.mask > 0).T, sequence=at.tokens.sequence.T, **columns)
    surrogate = SURROGATES[-1]
    got = outcome(fused_policy_loss, Case(at.logprob.T, at.entropy.T, tokens), surrogate)
    want = outcome(policy_loss, at, surrogate)
    torch.testing.assert_close(got.by_logprob.T, want.by_logprob)
    torch.testing.assert_close(got.loss, want.loss)


def test_an_entropy_without_a_coefficient_gets_no_gradient_to_pass_on() -> None:
    at = case(5)
    logprob, entropy = at.logprob.clone().requires_grad_(), at.entropy.clone().requires_grad_()
    loss, _ = fused_policy_loss(logprob, entropy, at.tokens, Surrogate())
    loss.backward()
    assert entropy.grad is None


def test_statistics_carry_no_graph() -> None:
    at = case(6)
    _, s = fused_policy_loss(at.logprob.requires_grad_(), at.entropy, at.tokens, SURROGATES[0])
    kinds = (s.tokens, s.sequences, s.sums, s.maxima, s.minima, s.counts)
    assert not any(value.requires_grad for kind in kinds for value in kind.values())


def test_a_gpu_without_triton_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    fused.implementation.cache_clear()
    with pytest.warns(UserWarning, match="triton is not installed"):
        assert fused.implementation("cuda") is fused.torch_pass
    fused.implementation.cache_clear()
