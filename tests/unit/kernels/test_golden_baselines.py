"""Baselines of 2025 and 2026 against verl 0.9.1 and TRL 1.16.0: values that their own functions made
(tests/golden/README.md)."""

import numpy as np
import pytest

from golden.replay import GROUP, PROMPT, Case, by_group, cases, compare, samples
from titan_rl.batch.advantages import length_weighted, pass_at_k, per_reward, whiten
from titan_rl.batch.experience import with_advantages
from titan_rl.config.sections import AlgorithmSection
from titan_rl.wire.types import Branch, Group, Prompt, Rollout

VERL, TRL = cases("verl_baselines.json"), cases("trl_gdpo.json")


def of_groups(table: np.ndarray, weights: list[float], eps: float) -> np.ndarray:
    """Return [N]: GDPO's advantages of rewards [N, K], before the step is normalized."""
    starts = range(0, len(table), GROUP)
    return np.array([a for at in starts for a in per_reward(table[at : at + GROUP].tolist(), weights, eps)])


@pytest.mark.parametrize("name", ["gdpo", "gdpo_weighted"])
def test_gdpo_is_verls_with_its_epsilon(name: str) -> None:
    inputs, weights = VERL[name]["inputs"], VERL[name]["settings"]["gdpo_reward_weights"]
    table = np.stack([inputs[f"reward_{k}"] for k in range(len(weights))], 1)
    summed = of_groups(table, weights, eps=1e-6)[:, None] * np.array(inputs["mask"])
    compare(whiten(list(summed), inputs["mask"]), VERL[name]["outputs"]["advantages"])


@pytest.mark.parametrize("name", sorted(TRL))
def test_gdpos_rewards_are_trls_which_normalizes_the_step_over_samples(name: str) -> None:
    inputs, weights = TRL[name]["inputs"], TRL[name]["settings"]["reward_weights"]
    table = np.where(np.array(inputs["applies"]) > 0, inputs["rewards"], np.nan)
    summed = of_groups(table, weights, eps=1e-4)
    compare((summed - summed.mean()) / (summed.std(ddof=1) + 1e-4), TRL[name]["outputs"]["advantages"])


@pytest.mark.parametrize("name", ["passk", "passk_unscaled"])
def test_pass_at_the_groups_size_is_verls_with_its_epsilon(name: str) -> None:
    case = VERL[name]
    scaled = case["settings"]["norm_adv_by_std_in_grpo"]
    ours = by_group(case["inputs"], lambda rewards: pass_at_k(rewards, GROUP, normalize_std=scaled, eps=1e-6))
    compare(np.array(ours)[:, None] * np.array(case["inputs"]["mask"]), case["outputs"]["advantages"])


@pytest.mark.parametrize("name", ["opo", "opo_without_tools"])
def test_length_weighted_advantages_are_verls(name: str) -> None:
    inputs, ours = VERL[name]["inputs"], list[float]()
    lengths = np.sum(inputs["mask"], 1).tolist()
    for at in range(0, len(lengths), GROUP):
        ours += length_weighted(inputs["rewards"][at : at + GROUP], lengths[at : at + GROUP])
    compare(np.array(ours)[:, None] * np.array(inputs["mask"]), VERL[name]["outputs"]["advantages"])


def trained(inputs: Case, baselines: list[float] | None, algorithm: AlgorithmSection) -> np.ndarray:
    """Return [N, L]: the advantages of the step."""
    rollouts = [Rollout([Branch([])], text="", reward=reward) for reward in inputs["rewards"]]
    starts = range(0, len(rollouts), GROUP)
    made = samples(inputs)
    if algorithm.advantage == "optimal_token":
        norms = 1 - 2 * np.exp(inputs["old"]) + np.array(inputs["squares"])
        columns = [
            [9.0] * PROMPT + norm[: len(s.tokens) - PROMPT].tolist() for norm, s in zip(norms, made, strict=True)
        ]
        made = [s.with_columns(score_norm=column) for s, column in zip(made, columns, strict=True)]
    found = np.zeros(np.shape(inputs["mask"]))
    groups = [Group(Prompt(i, "", [], ""), rollouts[at : at + GROUP]) for i, at in enumerate(starts)]
    if baselines is not None:  # ours has one greedy answer to a prompt, and verl's cases one for every sample
        groups = [
            Group(Prompt(i, "", [], ""), [r], baseline=b)
            for i, (r, b) in enumerate(zip(rollouts, baselines, strict=True))
        ]
    for row, sample in zip(found, with_advantages(groups, made, algorithm)[1], strict=True):
        assert not np.any(sample.columns["advantage"][:PROMPT])
        row[: len(sample.tokens) - PROMPT] = sample.columns["advantage"][PROMPT:]
    return found


def test_greedy_baselines_are_verls() -> None:
    inputs = VERL["remax"]["inputs"]
    ours = trained(inputs, inputs["greedy"], AlgorithmSection(advantage="greedy", normalize="none"))
    compare(ours, VERL["remax"]["outputs"]["advantages"])


@pytest.mark.parametrize("name", [name for name in VERL if name.startswith("otb")])
def test_optimal_token_baselines_are_both_of_verls(name: str) -> None:
    """One for answers, one that counts trained tokens only, which is the same where a tool wrote none."""
    algorithm = AlgorithmSection(advantage="optimal_token", normalize="none")
    compare(trained(VERL[name]["inputs"], None, algorithm), VERL[name]["outputs"]["advantages"])
