"""Ours against verl 0.9.1: values and gradients that its own functions made (tests/golden/README.md).

Every policy case runs as a step does: answers packed into microbatches of two shards, each microbatch's loss summed.
If verl computes something else on purpose, a test pins the difference; docs/algorithms.md lists them all.
"""

from typing import Any

import numpy as np
import pytest
import torch

from golden.replay import (
    GROUP,
    PROMPT,
    Case,
    LossResult,
    Placed,
    by_group,
    cases,
    columns,
    compare,
    compare_gradients,
    compare_off_policy,
    compare_overlong,
    placed,
    policy_terms,
    samples,
    summed,
    tensor,
    trained,
    verl_gae_inputs,
    verl_loss,
    verl_off_policy,
    verl_setup,
)
from titan_rl.batch.advantages import (
    discounted,
    gae,
    group_relative,
    kl_penalty,
    leave_one_out,
    whiten,
)
from titan_rl.batch.experience import with_advantages
from titan_rl.config.sections import AlgorithmSection
from titan_rl.kernels.kl import kl_estimate
from titan_rl.kernels.policy_loss import policy_loss
from titan_rl.kernels.surrogate import Surrogate
from titan_rl.kernels.value_loss import value_loss
from titan_rl.wire.types import Branch, Group, Prompt, Rollout

VERL_POLICY, VERL_LOSSES = cases("verl_policy.json"), cases("verl_losses.json")
VERL_ADVANTAGES, VERL_EXPERIENCE = cases("verl_advantages.json"), cases("verl_experience.json")

REJECTED_OUT_OF_THE_MEAN = ("token_rejection", "geometric_rejection", "geometric_rejection_token_tis")
VERL_ALIKE = sorted(VERL_POLICY.keys() - set(REJECTED_OUT_OF_THE_MEAN))


@pytest.mark.parametrize("name", VERL_ALIKE)
def test_policy_losses_and_gradients_are_verls(name: str) -> None:
    case = VERL_POLICY[name]
    loss, sums, x = verl_loss(case, policy_loss)
    loss.backward()
    compare(loss, case["outputs"]["loss"])
    compare_gradients(x, case)
    tokens = trained(case["inputs"])
    compare((sums["clip_ratio/low"] + sums["clip_ratio/high"]) / tokens, case["outputs"]["clipped"])
    if verl_setup(case["settings"])[0].clip == "ppo":
        compare(sums["clip_ratio/dual"] / tokens, case["outputs"]["dual_clipped"])


@pytest.mark.parametrize("name", REJECTED_OUT_OF_THE_MEAN)
def test_verl_takes_rejected_tokens_out_of_the_mean(name: str) -> None:
    case = VERL_POLICY[name]
    loss, _, x = verl_loss(case, policy_loss)
    loss.backward()
    kept, tokens = int(np.sum(case["outputs"]["kept"])), trained(case["inputs"])
    assert 0 < kept < tokens
    compare(tokens / kept * loss, case["outputs"]["loss"])
    compare_gradients(x, case, tokens / kept)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_and_their_gradients_are_verls(estimator: Any) -> None:
    case = VERL_LOSSES[estimator]
    logprob, reference = tensor(case["inputs"]["logprob"]).requires_grad_(), tensor(case["inputs"]["reference"])
    kl = kl_estimate(logprob, reference, estimator)
    kl.sum().backward()
    compare(kl, case["outputs"]["kl"])
    compare(logprob.grad, case["gradients"]["logprob"])
    compare(kl_penalty(logprob.detach().numpy(), reference.numpy(), estimator), case["outputs"]["kl"])


def test_verl_holds_k3_at_10_and_lets_such_tokens_go() -> None:
    case = VERL_LOSSES["k3_far_apart"]
    logprob, reference = tensor(case["inputs"]["logprob"]).requires_grad_(), tensor(case["inputs"]["reference"])
    kl = kl_estimate(logprob, reference, "k3")
    kl.sum().backward()
    assert logprob.grad is not None
    assert int((kl > 10).sum()) > 0
    compare(kl.clamp(max=10), case["outputs"]["kl"])
    compare(torch.where(kl > 10, 0.0, logprob.grad), case["gradients"]["logprob"])


@pytest.mark.parametrize("name", [name for name in VERL_LOSSES if name.startswith("value")])
def test_the_value_loss_is_verls(name: str) -> None:
    case = VERL_LOSSES[name]
    inputs, settings = case["inputs"], case["settings"]
    value = tensor(inputs["value"]).requires_grad_()
    old, returns = tensor(inputs["old_value"]), tensor(inputs["return"])

    def terms(at: Placed) -> LossResult:
        return value_loss(
            at(value),
            old_T=at(old),
            return_T=at(returns),
            mask_T=at.mask,
            weight_T=at.weight,
            clip=settings["cliprange_value"],
        )

    loss, sums = summed(placed(samples(inputs), verl_setup(settings)[1]), terms)
    loss.backward()
    compare(loss, case["outputs"]["loss"])
    compare(value.grad, case["gradients"]["value"])
    compare(sums["value/clipped"] / trained(inputs), case["outputs"]["clipped"])


@pytest.mark.parametrize("clip", ["ppo", "none"])
def test_on_policy_distillation_is_verls(clip: Any) -> None:
    case = VERL_LOSSES["distillation"]
    inputs = case["inputs"]
    sampled = inputs["logprob"]
    advantages = -kl_penalty(np.array(sampled), np.array(inputs["reference"]), "k1")
    x = columns({**inputs, "old": sampled, "behaviour": sampled, "entropy": sampled}, advantages)
    loss, _ = summed(placed(samples(inputs), "token_mean"), policy_terms(policy_loss, Surrogate(clip=clip), x))
    loss.backward()
    compare(loss, case["outputs"]["loss"])
    compare_gradients(x, case)


@pytest.mark.parametrize("name", ["group", "group_unscaled"])
def test_group_advantages_are_verls_with_its_epsilon(name: str) -> None:
    case = VERL_ADVANTAGES[name]
    scaled = case["settings"]["norm_adv_by_std_in_grpo"]
    ours = by_group(case["inputs"], lambda rewards: group_relative(rewards, normalize_std=scaled, eps=1e-6))
    compare(on_tokens(ours, case["inputs"]), case["outputs"]["advantages"])


def test_leave_one_out_advantages_are_verls() -> None:
    case = VERL_ADVANTAGES["leave_one_out"]
    compare(on_tokens(by_group(case["inputs"], leave_one_out), case["inputs"]), case["outputs"]["advantages"])


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_discounted", "reinforce_pp_token_rewards"])
def test_reinforce_pp_is_verls(name: str) -> None:
    case = VERL_ADVANTAGES[name]
    inputs = case["inputs"]
    masks = np.array(inputs["mask"])
    rewards = np.array(inputs["reward"]) if "reward" in inputs else at_the_end(inputs)
    returns = [discounted(r, m, case["settings"]["gamma"]) for r, m in zip(rewards, masks, strict=True)]
    compare(returns, case["outputs"]["returns"])
    compare(whiten(returns, list(masks)), case["outputs"]["advantages"])


def test_reinforce_pp_baseline_is_verls() -> None:
    case = VERL_ADVANTAGES["reinforce_pp_baseline"]
    ours = by_group(case["inputs"], lambda rewards: group_relative(rewards, normalize_std=False))
    centred = on_tokens(ours, case["inputs"])
    compare(whiten(list(centred), case["inputs"]["mask"]), case["outputs"]["advantages"])


@pytest.mark.parametrize("name", ["gae", "gae_discounted", "gae_monte_carlo"])
def test_gae_passes_over_tool_tokens_as_verls_does(name: str) -> None:
    case = VERL_ADVANTAGES[name]
    gamma, lam = case["settings"]["gamma"], case["settings"]["lam"]
    inputs = verl_gae_inputs(case["inputs"])
    found = [gae(rewards, values, mask, gamma=gamma, lam=lam) for rewards, values, mask in inputs]
    compare(whiten([a for a, _ in found], case["inputs"]["mask"]), case["outputs"]["advantages"])
    compare([r for _, r in found], case["outputs"]["returns"])


def on_tokens(advantages: list[float], inputs: Case) -> np.ndarray:
    return np.array(advantages)[:, None] * np.array(inputs["mask"])


def at_the_end(inputs: Case) -> np.ndarray:
    """[N, L]: each answer's reward at its last token."""
    rewards = np.zeros(np.shape(inputs["mask"]))
    rewards[np.arange(len(rewards)), np.array(inputs["length"]) - 1] = inputs["rewards"]
    return rewards


ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "group", "normalize": "none"},
    "rloo": {"advantage": "leave_one_out", "normalize": "none"},
    "reinforce_plus_plus": {"advantage": "return", "normalize": "batch"},
    "reinforce_plus_plus_baseline": {"advantage": "group", "normalize": "batch"},
    "gae": {"advantage": "gae", "normalize": "batch"},
}


@pytest.mark.parametrize("name", sorted(VERL_EXPERIENCE))
def test_rewards_and_kl_become_the_advantages_of_verls_step(name: str) -> None:
    case = VERL_EXPERIENCE[name]
    inputs, settings = case["inputs"], case["settings"]
    algorithm = AlgorithmSection(
        kl=settings["kl_penalty"] or "k3",
        kl_in="reward",
        kl_coef=settings.get("kl_coef", 0.0),
        gamma=settings.get("gamma", 1.0),
        gae_lambda=settings.get("lam", 1.0),
        **ESTIMATORS[settings["adv_estimator"]],
    )
    rollouts = [Rollout([Branch([])], text="", reward=reward) for reward in inputs["rewards"]]
    groups = [
        Group(Prompt(i, "", [], ""), rollouts[start : start + GROUP])
        for i, start in enumerate(range(0, len(rollouts), GROUP))
    ]

    def column(of: str, i: int) -> np.ndarray:
        return np.concatenate([np.full(PROMPT, -1.0), inputs[of][i][: inputs["length"][i]]])

    made = [
        sample.with_columns(behaviour=column("old", i), reference=column("reference", i), value=column("old_value", i))
        for i, sample in enumerate(samples(inputs))
    ]
    _, found = with_advantages(groups, made, algorithm)
    for i, sample in enumerate(found):
        inside = slice(inputs["length"][i])
        assert not np.any(sample.columns["advantage"][:PROMPT])
        compare(sample.columns["advantage"][PROMPT:], case["outputs"]["advantages"][i][inside])
        if algorithm.advantage == "gae":
            compare(sample.columns["return"][PROMPT:], case["outputs"]["returns"][i][inside])


@pytest.mark.parametrize("name", [name for name, case in VERL_POLICY.items() if "kept" in case["outputs"]])
def test_off_policy_weights_are_verls(name: str) -> None:
    compare_off_policy(VERL_POLICY[name], verl_off_policy(VERL_POLICY[name]["settings"]))


def test_the_overlong_punishment_is_verls_up_to_the_longest_answer() -> None:
    """Beyond it verl's falls on, and ours stops at -1 as TRL's does; but a generator ends there."""
    assert compare_overlong(VERL_ADVANTAGES["overlong"]) < -1
