import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.kernels.policy_loss import grpo, supervised
from titan_rl.kernels.token_logprob import token_logprob

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


def tensors(n: int, seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(n, generator=g, dtype=torch.float64) * 3
    return {
        "logprob_T": behaviour + 0.4 * torch.randn(n, generator=g, dtype=torch.float64),
        "entropy_T": torch.rand(n, generator=g, dtype=torch.float64),
        "behaviour_T": behaviour,
        "advantage_T": torch.randn(n, generator=g, dtype=torch.float64),
        "mask_T": (torch.rand(n, generator=g) > 0.3).double(),
        "reference_T": behaviour + 0.2 * torch.randn(n, generator=g, dtype=torch.float64),
    }


def by_hand(t: dict[str, torch.Tensor], kl_coef: float) -> float:
    """The definition, token by token, in Python."""
    total = 0.0
    for i in range(len(t["mask_T"])):
        if not t["mask_T"][i]:
            continue
        lp, old, ref, a = (float(t[k][i]) for k in ("logprob_T", "behaviour_T", "reference_T", "advantage_T"))
        ratio = math.exp(lp - old)
        surrogate = min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
        total += -surrogate + kl_coef * (math.exp(ref - lp) - (ref - lp) - 1)
    return total


@given(seed=st.integers(0, 10_000), n=st.integers(1, 40), kl_coef=st.sampled_from([0.0, 0.1]))
def test_grpo_is_its_definition(seed: int, n: int, kl_coef: float) -> None:
    t = tensors(n, seed)
    loss, sums = grpo(**t, **CLIP, kl_coef=kl_coef)
    assert float(loss) == pytest.approx(by_hand(t, kl_coef), rel=1e-9, abs=1e-9)
    on = t["mask_T"] > 0
    assert float(sums.gap) == pytest.approx(float((t["logprob_T"] - t["behaviour_T"]).abs()[on].sum()))


def test_gradient_checks_numerically() -> None:
    t = tensors(12)
    logprob = t.pop("logprob_T").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: grpo(x, **t, **CLIP, kl_coef=0.1)[0], (logprob,))


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    t = tensors(10)
    logprob = t["behaviour_T"].clone().requires_grad_()
    loss, sums = grpo(**(t | {"logprob_T": logprob, "reference_T": None}), **CLIP)
    loss.backward()
    torch.testing.assert_close(logprob.grad, -t["advantage_T"] * t["mask_T"])
    assert float(sums.gap_max) == 0
    assert float(sums.ratio) == pytest.approx(float(t["mask_T"].sum()))
    assert float(sums.clip_low) == float(sums.clip_high) == 0


def test_what_lies_under_the_mask_is_never_seen() -> None:
    """Padding may hold anything: infinities in the data give neither NaN losses nor NaN gradients."""
    t = tensors(10)
    clean, _ = grpo(**t, **CLIP, kl_coef=0.1)
    off = t["mask_T"] == 0
    dirty = {
        k: torch.where(off, torch.inf if k != "advantage_T" else torch.nan, v) for k, v in t.items() if k != "mask_T"
    }
    logprob = torch.where(off, torch.zeros_like(t["logprob_T"]), t["logprob_T"]).requires_grad_()
    loss, _ = grpo(**(dirty | {"logprob_T": logprob, "mask_T": t["mask_T"]}), **CLIP, kl_coef=0.1)
    loss.backward()
    assert loss.item() == pytest.approx(clean.item())
    assert logprob.grad is not None
    assert (logprob.grad[off] == 0).all()
    assert torch.isfinite(logprob.grad).all()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "low", "high"), [(1, 1, 0, 1), (1, -1, 0, 0), (-1, -1, 1, 0), (-1, 1, 0, 0)]
)
def test_only_the_clip_that_binds_is_counted(log_ratio: float, advantage: float, low: int, high: int) -> None:
    one = torch.ones(1, dtype=torch.float64)
    _, sums = grpo(log_ratio * one, one, behaviour_T=0 * one, advantage_T=advantage * one, mask_T=one, **CLIP)
    assert (int(sums.clip_low), int(sums.clip_high)) == (low, high)


def test_a_huge_log_ratio_stays_finite() -> None:
    one = torch.ones(1)
    loss, _ = grpo(200 * one, one, behaviour_T=0 * one, advantage_T=-one, mask_T=one, **CLIP)
    assert torch.isfinite(loss)


def test_supervised_is_cross_entropy() -> None:
    logits = torch.randn(3, 7, 11, dtype=torch.float64)
    targets = torch.randint(0, 11, (3, 7))
    mask = (torch.rand(3, 7) > 0.5).double()
    logprob, entropy = token_logprob(logits.double(), targets)
    loss, _ = supervised(logprob, entropy, mask_T=mask)
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(3, 7)
    assert float(loss) == pytest.approx(float((want * mask).sum()), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprob_is_log_softmax_at_the_temperature(temperature: float) -> None:
    logits = torch.randn(2, 5, 9)
    targets = torch.randint(0, 9, (2, 5))
    logprob, entropy = token_logprob(logits, targets, temperature)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    torch.testing.assert_close(logprob, distribution.log_prob(targets))
    torch.testing.assert_close(entropy, distribution.entropy())
