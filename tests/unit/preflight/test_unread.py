"""Keys that are warned of as without an effect have none, in drawn algorithms; all others have one somewhere."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support import loss_cases
from support.judged_groups import RL, advantages, group, rollout, with_column, with_tool
from titan_rl.actors.titan.objectives import surrogate_of
from titan_rl.batch.experience import samples_of, with_advantages
from titan_rl.config.methods import ADVANTAGES, CLIPS, PAIR_LOSSES, rules_of
from titan_rl.config.presets import preset
from titan_rl.config.sections import AlgorithmSection, Config
from titan_rl.config.toml import Key, find, load, planned, schema, shipped, variants
from titan_rl.ext.preference.ranks import preference_loss
from titan_rl.kernels.policy_loss import policy_loss
from titan_rl.preflight.checks.unread import OF_PAIRS, unread, unread_keys

KEYS = schema()["algorithm"]
DRAWS = 220
METHODS = ("advantage", "correction", "rejection", "credit", "kl_coef", "kl_in", "normalize", "ratio")
OF_METHODS = {key for method in (*ADVANTAGES.values(), *CLIPS.values()) for key in method.reads}
OTHERS = {"kl", "correction_low", "correction_high", "rejection_low", "rejection_high", "rejection_moment"}
SHOWN = sorted(OF_METHODS - {"role_decay"} | OTHERS)
"""Keys that `learned` can show an effect of: role_decay acts on the next step."""


def other_value(key: Key, value: Any, r: random.Random) -> Any:
    """Return another value that the key accepts, and that fits this file's groups."""
    if key.choices:
        return r.choice([choice for choice in key.choices if choice != value])
    if key.type is bool:
        return not value
    if key.type is int:
        return r.choice([n for n in (0, 2) if n != value])
    return round(r.uniform(0.05, 0.9 if key.lt or key.le == 1 else 3.0), 3)


def drawn(r: random.Random, clip: str) -> AlgorithmSection:
    """Return an algorithm with some of its keys changed, such that its methods fit each other."""
    while True:
        a = preset(r.choice(RL), lag=r.choice((0, 1)), clip=clip, cov_share=0.5)  # there are few tokens
        for name in (*METHODS, *r.sample(SHOWN, 3)):
            a = replace(a, **{name: r.choice((getattr(a, name), other_value(KEYS[name], getattr(a, name), r)))})
        if a.advantage != "per_reward" and all(rule.holds(getattr(a, rule.key)) for _, rule in rules_of(a)):
            return a


def learned(a: AlgorithmSection) -> list[np.ndarray | torch.Tensor]:
    """Return all that the algorithm makes of fixed rewards and log-probs: advantages, the loss, its gradients."""
    groups = [group(rollout(1, 3), rollout(0.25, 1), with_tool(0.5)), group(rollout(0, 2), rollout(1, 2))]
    samples = with_column(samples_of(groups, a), reference=-1.0, teacher=-1.5, value=0.5, score_norm=0.25)
    estimated = advantages(with_advantages(groups, samples, a)[1])
    case = loss_cases.case(seed=3, spread=0.8)
    found = loss_cases.outcome(policy_loss, case, surrogate_of(a, a.entropy_coef))
    return [np.concatenate(estimated), found.loss, found.by_logprob, found.by_entropy]


def same(first: list[Any], second: list[Any]) -> bool:
    return all((np.asarray(one) == np.asarray(other)).all() for one, other in zip(first, second, strict=True))


def test_an_unread_key_changes_nothing_and_each_key_changes_what_some_algorithm_learns() -> None:
    r, read = random.Random(11), set[str]()
    for clip in [*CLIPS] * (DRAWS // len(CLIPS)):
        a = drawn(r, clip)
        before, found = learned(a), unread(replace(Config(), algorithm=a))
        for name in r.sample(SHOWN, 8):
            changed = replace(a, **{name: other_value(KEYS[name], getattr(a, name), r)})
            if not all(rule.holds(getattr(changed, rule.key)) for _, rule in rules_of(changed)):
                continue  # refused
            unchanged = same(before, learned(changed))
            assert unchanged or name not in found, f"{name} of {a} has an effect"
            read |= set() if unchanged else {name}
    assert read == set(SHOWN)


@pytest.mark.parametrize("name", [*PAIR_LOSSES])
def test_the_losses_of_pairs_read_the_keys_that_they_declare(name: str) -> None:
    ratios = preference_loss.Ratios(*torch.tensor([[-0.5, -1.5], [-2.0, -0.75], [0.1, 0.1]]).double())
    usual = preset(name)

    def loss(a: AlgorithmSection) -> torch.Tensor:
        keys = {key: getattr(a, key) for key in OF_PAIRS}
        return preference_loss.LOSSES[name](ratios, preference_loss.Preference(name=name, **keys))

    changed = {key for key in OF_PAIRS if not loss(usual).equal(loss(replace(usual, **{key: 0.37})))}
    assert changed == set(PAIR_LOSSES[name])


def test_no_shipped_config_sets_a_key_in_vain() -> None:
    for name in (*shipped(), *variants(), *planned()):
        assert not [*unread_keys(load(find(name)))], name


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        (
            "dpo_llama",
            {"algorithm.kl_coef": "0.1"},
            'algorithm.kl_coef = 0.1: no effect, because algorithm.name is "dpo"',
        ),
        (
            "sft_llama",
            {"rollout.group_size": "4", "rollout.top_p": "0.9"},
            "rollout.group_size = 4, rollout.top_p = 0.9: no effect, because the algorithm samples no answers",
        ),
        (
            "grpo_llama",
            {"task.path": "mine.jsonl", "task.answer_key": "sum"},
            'task.path = "mine.jsonl", task.answer_key = "sum": no effect, because task.name has its own problems',
        ),
        ("grpo_llama", {"task.path": "mine.jsonl", "task.name": "jsonl"}, ""),
        ("grpo_llama", {"lora.alpha": "16"}, "lora.alpha = 16.0: no effect, because lora.rank is 0"),
        ("grpo_llama", {"lora.alpha": "16", "lora.rank": "4"}, ""),
        ("grpo_llama", {"reference.mesh": "own", "algorithm.kl_coef": "0.1"}, ""),
        ("dpo_llama", {"reference.mesh": "own"}, ""),
        ("grpo_llama", {"critic.lr": "0.1"}, "critic.lr = 0.1: no effect, because the algorithm needs no critic"),
        ("ppo_llama", {"critic.lr": "0.1"}, ""),
        (
            "grpo_llama",
            {"training.global_batch_size": "8"},
            "training.global_batch_size = 8: no effect, because a step has rollout.groups_per_step x group_size "
            "samples",
        ),
        ("kuhn_llama", {"environment.processes": "3"}, ""),
        (
            "grpo_llama",
            {"algorithm.gae_lambda": "0.9"},
            'algorithm.gae_lambda = 0.9: no effect, because algorithm.advantage is "group"',
        ),
        (
            "online_dpo_llama",
            {"algorithm.pair_loss": "ipo", "algorithm.label_smoothing": "0.1"},
            'algorithm.label_smoothing = 0.1: no effect, because algorithm.pair_loss is "ipo"',
        ),
        ("grpo_llama", {"algorithm.kl": "k1"}, 'algorithm.kl = "k1": no effect, because algorithm.kl_coef is 0.0'),
        ("grpo_llama", {"algorithm.max_refills": "3", "task.filter": "own:f"}, ""),
        ("grpo_llama", {"algorithm.credit": "turn", "algorithm.gamma": "0.9"}, ""),
    ],
)
def test_a_warning_names_the_keys_and_what_decides(name: str, flags: dict[str, str], expected: str) -> None:
    assert [*unread_keys(load(find(name), [*flags.items()]))] == ([expected] if expected else [])
