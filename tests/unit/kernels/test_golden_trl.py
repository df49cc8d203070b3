"""Ours against TRL 1.16.0: values and gradients that its own functions made (tests/golden/README.md).

Every policy case runs as a step does: answers packed into microbatches of two shards, each microbatch's loss summed.
If TRL computes something else on purpose, a test pins the difference; docs/algorithms.md lists them all.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from golden.replay import (
    by_group,
    cases,
    columns,
    compare,
    compare_gradients,
    compare_off_policy,
    compare_overlong,
    pairs_loss,
    placed,
    policy_terms,
    samples,
    summed,
    tensor,
    trained,
    trl_advantages,
    trl_loss,
    trl_setup,
)
from titan_rl.batch.advantages import (
    kl_penalty,
    leave_one_out,
)
from titan_rl.ext.preference.ranks.preference_loss import Pairs, Preference, bradley_terry_loss
from titan_rl.kernels.policy_loss import policy_loss
from titan_rl.kernels.surrogate import Surrogate

TRL_POLICY, TRL_RLOO = cases("trl_policy.json"), cases("trl_rloo.json")
TRL_PREFERENCE, TRL_ADVANTAGES = cases("trl_preference.json"), cases("trl_advantages.json")

EMPTIES_COUNTED = ("ppo_sequence_mean_counts_the_empty", "ppo_sequence_sum_counts_the_empty")
ENTROPY_BY_TOKEN = "entropy_sequence_mean"
WHOLE_SEQUENCE_GRADIENT = "gspo_token_tis"
TRL_ALIKE = sorted(TRL_POLICY.keys() - {*EMPTIES_COUNTED, ENTROPY_BY_TOKEN, WHOLE_SEQUENCE_GRADIENT})


@pytest.mark.parametrize("name", TRL_ALIKE)
def test_rewards_become_the_loss_and_gradients_that_trl_computes(name: str) -> None:
    case = TRL_POLICY[name]
    theirs = case["outputs"]
    loss, sums, x = trl_loss(case, policy_loss)
    loss.backward()
    compare(trl_advantages(case), theirs["advantages"])
    compare(loss, theirs["loss"])
    compare_gradients(x, case)
    metrics = {"entropy": "entropy", "kl": "kl/k3"}
    if trl_setup(case["settings"])[0].clip == "ppo":
        metrics |= {"clip_ratio/low_mean": "clip_ratio/low", "clip_ratio/high_mean": "clip_ratio/high"}
    for their, our in metrics.items():
        if their in theirs:
            compare(sums[our] / trained(case["inputs"]), theirs[their])


@pytest.mark.parametrize("name", EMPTIES_COUNTED)
def test_trl_counts_a_sequence_without_trained_tokens_in_a_mean_over_sequences(name: str) -> None:
    case = TRL_POLICY[name]
    loss, _, x = trl_loss(case, policy_loss)
    loss.backward()
    counted = float(np.any(case["inputs"]["mask"], axis=1).mean())
    assert counted == 7 / 8
    compare(counted * loss, case["outputs"]["loss"])
    compare_gradients(x, case, counted)


def test_trl_averages_the_entropy_over_tokens_whatever_the_losss_aggregation() -> None:
    case = TRL_POLICY[ENTROPY_BY_TOKEN]
    surrogate, aggregation = trl_setup(case["settings"])
    x, packed = columns(case["inputs"], trl_advantages(case)), samples(case["inputs"])
    policy = policy_terms(policy_loss, replace(surrogate, entropy_coef=0.0), x)
    entropy = policy_terms(policy_loss, surrogate, {**x, "advantage": torch.zeros_like(x["advantage"])})
    loss = summed(placed(packed, aggregation), policy)[0] + summed(placed(packed, "token_mean"), entropy)[0]
    loss.backward()
    compare(loss, case["outputs"]["loss"])
    compare_gradients(x, case)


def test_trl_spreads_a_sequence_ratios_gradient_evenly_where_token_weights_differ() -> None:
    """GSPO against GSPO-token: one value; the same gradient's sum over each sequence, shared out differently."""
    case = TRL_POLICY[WHOLE_SEQUENCE_GRADIENT]
    loss, _, x = trl_loss(case, policy_loss)
    loss.backward()
    gradient = x["logprob"].grad
    assert gradient is not None
    compare(loss, case["outputs"]["loss"])
    compare(gradient.sum(1), np.sum(case["gradients"]["logprob"], axis=1))
    with pytest.raises(AssertionError):
        compare_gradients(x, case)


@pytest.mark.parametrize("name", sorted(TRL_ADVANTAGES.keys() - {"overlong", "leave_one_out"}))
def test_group_advantages_are_trls(name: str) -> None:
    compare(trl_advantages(TRL_ADVANTAGES[name]), TRL_ADVANTAGES[name]["outputs"]["advantages"])


def test_leave_one_out_advantages_are_trls() -> None:
    case = TRL_ADVANTAGES["leave_one_out"]
    compare(by_group(case["inputs"], leave_one_out), case["outputs"]["advantages"])


@pytest.mark.parametrize("clip", ["ppo", "none"])
@pytest.mark.parametrize("name", sorted(TRL_RLOO))
def test_on_policy_rloo_has_trls_gradients(name: str, clip: Any) -> None:
    """TRL's ratio covers the whole answer, a product over its tokens; at 1 its gradient is a sum over tokens."""
    case = TRL_RLOO[name]
    inputs = case["inputs"]
    k1 = kl_penalty(np.array(inputs["old"]), np.array(inputs["reference"]), "k1")
    penalty = case["settings"].get("beta", 0.0) * (k1 * np.array(inputs["mask"])).sum(1)
    charged = {"rewards": (np.array(inputs["rewards"]) - penalty).tolist()}
    advantages = by_group(charged, leave_one_out)
    compare(advantages, case["outputs"]["advantages"])
    x = columns(inputs, advantages)
    terms = policy_terms(policy_loss, Surrogate(clip=clip), x)
    summed(placed(samples(inputs), "sequence_sum", length=1), terms)[0].backward()
    compare_gradients(x, case)


@pytest.mark.parametrize("name", sorted(TRL_PREFERENCE.keys() - {"bradley_terry"}))
def test_preference_losses_and_their_metrics_are_trls(name: str) -> None:
    case = TRL_PREFERENCE[name]
    theirs, settings = case["outputs"], case["settings"]
    setup = Preference(
        name="ipo" if name == "ipo" else "dpo", beta=settings["beta"], label_smoothing=settings["label_smoothing"]
    )
    loss, sums, logprob = pairs_loss(case, setup)
    loss.backward()
    compare(loss, theirs["loss"])
    compare(logprob.grad, case["gradients"]["logprob"])
    if name == "ipo":
        sums = pairs_loss(case, replace(setup, name="dpo"))[
            1
        ]  # TRL's loss averages over tokens, but it logs rewards of sums
    for key in (key for key in theirs if "/" in key):
        compare(sums[key] / len(case["inputs"]["mask"]), theirs[key])


def test_the_reward_models_loss_and_metrics_are_trls() -> None:
    case = TRL_PREFERENCE["bradley_terry"]
    score = tensor(case["inputs"]["score"]).requires_grad_()
    count = len(score)
    ordered = score.reshape(2, -1).T.reshape(-1)  # theirs: all chosen, then all rejected
    loss, statistics = bradley_terry_loss(ordered, Pairs(torch.ones(count), torch.arange(count), count, count // 2))
    loss.backward()
    theirs = case["outputs"]
    compare(loss, theirs["loss"])
    compare(score.grad, case["gradients"]["score"])
    compare(statistics.sequences["accuracy"] / count, theirs["accuracy"])
    compare(statistics.sequences["margin"] / count, theirs["margin"])
    compare(statistics.sequences["score/mean"] / count, theirs["mean_reward"])
    compare(statistics.maxima["score/max"], theirs["max_reward"])
    compare(statistics.minima["score/min"], theirs["min_reward"])


@pytest.mark.parametrize("name", [name for name, case in TRL_POLICY.items() if "importance_ratio" in case["outputs"]])
def test_off_policy_weights_are_trls(name: str) -> None:
    compare_off_policy(TRL_POLICY[name], trl_setup(TRL_POLICY[name]["settings"])[0].off_policy)


def test_the_overlong_punishment_is_trls() -> None:
    assert compare_overlong(TRL_ADVANTAGES["overlong"]) == -1
