"""Ours against TRL 1.16.0 and verl 0.9.1: values and gradients that their own functions made (tests/golden/README.md).

Every policy case runs as a step does: answers packed into microbatches of two shards, each microbatch's loss summed.
Where a peer computes something else on purpose, a test pins the difference; docs/algorithms.md lists them all.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from golden.replay import (
    GROUP,
    PROMPT,
    Case,
    Placed,
    Told,
    by_group,
    cases,
    columns,
    compare,
    compare_gradients,
    placed,
    policy_terms,
    samples,
    summed,
    tensor,
    trl_advantages,
    trl_loss,
    trl_setup,
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
    soft_overlong_punishment,
    whiten,
)
from titan_rl.batch.experience import with_advantages
from titan_rl.config.sections import AlgorithmSection
from titan_rl.kernels.kl import kl_estimate
from titan_rl.kernels.off_policy import off_policy_weights
from titan_rl.kernels.policy_loss import Surrogate, policy_loss
from titan_rl.kernels.preference_loss import Preference, bradley_terry_loss, dpo_loss
from titan_rl.kernels.value_loss import value_loss
from titan_rl.wire.types import Group, Prompt, Rollout

TRL_POLICY, TRL_RLOO = cases("trl_policy.json"), cases("trl_rloo.json")
TRL_PREFERENCE, TRL_ADVANTAGES = cases("trl_preference.json"), cases("trl_advantages.json")
VERL_POLICY, VERL_LOSSES = cases("verl_policy.json"), cases("verl_losses.json")
VERL_ADVANTAGES, VERL_EXPERIENCE = cases("verl_advantages.json"), cases("verl_experience.json")

EMPTIES_COUNTED = ("ppo_sequence_mean_counts_the_empty", "ppo_sequence_sum_counts_the_empty")
ENTROPY_BY_TOKEN = "entropy_sequence_mean"
WHOLE_SEQUENCE_GRADIENT = "gspo_token_tis"
REJECTED_OUT_OF_THE_MEAN = ("token_rejection", "geometric_rejection", "geometric_rejection_token_tis")
TRL_ALIKE = sorted(TRL_POLICY.keys() - {*EMPTIES_COUNTED, ENTROPY_BY_TOKEN, WHOLE_SEQUENCE_GRADIENT})
VERL_ALIKE = sorted(VERL_POLICY.keys() - set(REJECTED_OUT_OF_THE_MEAN))


def trained(inputs: Case) -> int:
    return int(np.sum(inputs["mask"]))


# TRL ----------------------------------------------------------------------------------------------------------------


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
    """TRL's ratio is of the whole answer, a product over its tokens; where it is 1, that is a sum over tokens."""
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


def preference(case: Case, kind: Preference) -> tuple[torch.Tensor, Counter[str], torch.Tensor]:
    """Loss, metrics' sums, and the leaf. TRL has all chosen answers first, then all rejected ones."""
    inputs, settings = case["inputs"], case["settings"]
    pairs = len(inputs["mask"]) // 2
    order = [half * pairs + pair for pair in range(pairs) for half in (0, 1)]
    logprob, reference = tensor(inputs["logprob"]).requires_grad_(), tensor(inputs["reference"])
    packed = samples({key: [inputs[key][i] for i in order] for key in ("length", "mask")})

    def terms(at: Placed) -> Told:
        return dpo_loss(
            at(logprob[order]),
            at(torch.zeros_like(reference)),
            reference_T=at(reference[order]),
            mask_T=at.mask,
            sequence_T=at.sequence,
            sequences=at.sequences,
            pairs=pairs,
            beta=settings["beta"],
            label_smoothing=settings["label_smoothing"],
            kind=kind,
        )

    return *summed(placed(packed, "token_mean", together=2), terms), logprob


@pytest.mark.parametrize("name", sorted(TRL_PREFERENCE.keys() - {"bradley_terry"}))
def test_preference_losses_and_their_metrics_are_trls(name: str) -> None:
    case = TRL_PREFERENCE[name]
    theirs = case["outputs"]
    loss, sums, logprob = preference(case, "ipo" if name == "ipo" else "dpo")
    loss.backward()
    compare(loss, theirs["loss"])
    compare(logprob.grad, case["gradients"]["logprob"])
    if name == "ipo":
        sums = preference(case, "dpo")[1]  # TRL logs rewards of sums over tokens beside a loss of means
    for key in (key for key in theirs if "/" in key):
        compare(sums[key] / len(case["inputs"]["mask"]), theirs[key])


def test_the_reward_models_loss_and_metrics_are_trls() -> None:
    case = TRL_PREFERENCE["bradley_terry"]
    score = tensor(case["inputs"]["score"]).requires_grad_()
    count = len(score)
    ordered = score.reshape(2, -1).T.reshape(-1)  # theirs: all chosen, then all rejected
    loss, statistics = bradley_terry_loss(
        ordered, mask_T=torch.ones(count), sequence_T=torch.arange(count), sequences=count, pairs=count // 2
    )
    loss.backward()
    theirs = case["outputs"]
    compare(loss, theirs["loss"])
    compare(score.grad, case["gradients"]["score"])
    compare(statistics.sequences["accuracy"] / count, theirs["accuracy"])
    compare(statistics.sequences["margin"] / count, theirs["margin"])
    compare(statistics.sequences["score/mean"] / count, theirs["mean_reward"])
    compare(statistics.maxima["score/max"], theirs["max_reward"])
    compare(statistics.minima["score/min"], theirs["min_reward"])


# verl ---------------------------------------------------------------------------------------------------------------


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


CORRECTED = [
    *(
        pytest.param(case, id=f"trl-{name}")
        for name, case in TRL_POLICY.items()
        if "importance_ratio" in case["outputs"]
    ),
    *(pytest.param(case, id=f"verl-{name}") for name, case in VERL_POLICY.items() if "kept" in case["outputs"]),
]


@pytest.mark.parametrize("case", CORRECTED)
def test_off_policy_weights_are_the_peers(case: Case) -> None:
    settings, inputs, theirs = case["settings"], case["inputs"], case["outputs"]
    made = verl_off_policy(settings) if "kept" in theirs else trl_setup(settings)[0].off_policy
    on = tensor(inputs["mask"]) > 0
    owner = torch.arange(len(on))[:, None].expand_as(on)
    weights, _ = off_policy_weights(tensor(inputs["old"]) - tensor(inputs["behaviour"]), on, owner, len(on), made)
    kept = tensor(theirs.get("kept", inputs["mask"]))
    compare(weights * on, tensor(theirs["importance_ratio"]) * kept if "importance_ratio" in theirs else kept)
    bound = made.high if made.weight.endswith("tis") else 0.0  # 0 of a mask or a rejection
    assert 0 < int((weights[on] == bound).sum()) < int(on.sum())


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

    def terms(at: Placed) -> Told:
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
    rollouts = [Rollout(turns=[], text="", reward=reward) for reward in inputs["rewards"]]
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


# Both ---------------------------------------------------------------------------------------------------------------


def test_the_overlong_punishment_is_the_peers_up_to_the_longest_answer() -> None:
    """Beyond it TRL stops at -1, as ours does, and verl falls on; but a generator ends there."""
    for case in (TRL_ADVANTAGES["overlong"], VERL_ADVANTAGES["overlong"]):
        lengths, theirs = case["inputs"]["length"], case["outputs"]["reward"]
        ours = [soft_overlong_punishment(n, longest=20, buffer=6) for n in lengths]
        longest = lengths.index(20)
        compare(ours[: longest + 1], theirs[: longest + 1])
        assert ours[longest] == ours[-1] == -1
        assert theirs[-1] == -1 if case is TRL_ADVANTAGES["overlong"] else theirs[-1] < -1
