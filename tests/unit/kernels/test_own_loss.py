"""A user's loss: the same numbers as a built-in one that it repeats, and what refuses it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from titan_rl.kernels.own_loss import check
from titan_rl.kernels.policy_loss import Tokens, policy_loss
from titan_rl.kernels.surrogate import Surrogate

Loss = Callable[..., Any]


def ppo(logprob: torch.Tensor, proximal: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    ratio = (logprob - proximal).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def loss_of(own: Loss | None, *, seed: int, reference: bool = False, **keys: Any) -> tuple[torch.Tensor, Any]:
    """Return the gradient of the loss of random tokens, and its statistics."""
    generator = torch.Generator().manual_seed(seed)
    logprob_T, behaviour_T, old_T, reference_T = -torch.rand(4, 24, generator=generator)
    advantage_T = torch.randn(24, generator=generator)
    mask_T = (torch.rand(24, generator=generator) > 0.3).float()
    logprob_T.requires_grad_()
    tokens = Tokens(
        behaviour=behaviour_T,
        advantage=torch.where(mask_T > 0, advantage_T, torch.nan),  # padding may hold anything
        mask=mask_T,
        weight=mask_T / mask_T.sum(),
        sequence=torch.arange(24) // 6,
        sequences=4,
        proximal=old_T,
        reference=reference_T if reference else None,
        own_loss=own,
    )
    loss, statistics = policy_loss(logprob_T, torch.zeros(24), tokens, Surrogate(**keys))
    loss.backward()
    assert logprob_T.grad is not None
    return logprob_T.grad, statistics


@pytest.mark.parametrize("seed", range(20))
def test_one_that_repeats_ppo_has_its_gradient(seed: int) -> None:
    """With a KL to a reference around it."""
    keys: dict[str, Any] = {"reference": seed % 2 == 0, "kl_coef": 0.1, "entropy_coef": 0.0}
    own, _ = loss_of(ppo, seed=seed, **keys)
    built_in, _ = loss_of(None, seed=seed, **keys)
    torch.testing.assert_close(own, built_in)


def test_its_own_numbers_are_means_over_trained_tokens() -> None:
    def counted(logprob: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -logprob, {"on": mask.float(), "twice": torch.full_like(logprob, 2.0)}

    _, statistics = loss_of(counted, seed=0)
    assert statistics.tokens["own/twice"] == 2 * statistics.tokens["own/on"]


def test_a_reference_is_none_without_one() -> None:
    def to_reference(logprob: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
        return -logprob if reference is None else (logprob - reference).square()

    without, _ = loss_of(to_reference, seed=3)
    with_one, _ = loss_of(to_reference, seed=3, reference=True)
    assert not torch.equal(without, with_one)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logprob: -logprob.mean(), "expected a tensor of shape [12], found shape []"),
        (lambda logprob, advantage: -advantage * logprob * float("nan"), "expected finite losses"),
        (lambda logprob, advantage: -advantage * logprob.sqrt(), "expected finite losses"),
        (lambda advantage: -advantage, "expected a gradient with respect to `logprob`, found none"),
        (lambda logprob, advantage: -(advantage - advantage.mean()) * logprob, "it mixes tokens of several sequences"),
        (lambda logprob, mask: -logprob / mask.sum(), "it mixes tokens of several sequences"),
        (lambda logprob, ratios: logprob, "expected to require no arguments but logprob, behaviour, proximal"),
        (lambda logprob: 1 / 0, "ZeroDivisionError"),
        (lambda logprob: "loss", "expected a tensor of shape [12], found 'loss'"),
    ],
)
def test_a_wrong_one_is_named(loss: Loss, message: str) -> None:
    found = check(loss, "algorithm.loss = 'mine:loss'")
    assert found.startswith("algorithm.loss = 'mine:loss': ")
    assert message in found


def test_a_sound_one_passes() -> None:
    assert check(ppo, "mine") == ""
