"""Which tokens exact mode compares, and how it names one that differs."""

from dataclasses import replace
from typing import Any

import numpy as np

from titan_rl.batch.exactness import described, proximal_difference, with_current
from titan_rl.batch.experience import samples_of
from titan_rl.config.sections import AlgorithmSection, Config
from titan_rl.train.health import Health
from titan_rl.wire.reports import Difference, StepStats
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Sample, Turn

STEP = StepStats(loss=0.0, grad_norm=1.0, lr=1e-3, tokens=8, seconds=1.0)


def rollout(reward: float, *turns: tuple[list[int], list[int]]) -> Rollout:
    """Return a rollout of one branch: each turn's context, and the versions that sampled its tokens."""
    made = [
        Turn(context, Completion([9 + v for v in versions], [-0.1 * (v + 1) for v in versions], versions, "stop"))
        for context, versions in turns
    ]
    return Rollout([Branch(made)], "", reward)


def judged() -> tuple[list[Group], list[Sample]]:
    first = Group(Prompt(4, "", [1, 2], ""), [rollout(1.0, ([1, 2], [3, 3])), rollout(float("nan"), ([1, 2], [4]))])
    second = Group(Prompt(5, "", [1], ""), [rollout(0.0, ([1], [3, 4]), ([7, 8], [4])), rollout(1.0, ([1], [4, 4, 4]))])
    groups = [first, second]
    return groups, samples_of(groups, AlgorithmSection())


def current(samples: list[Sample]) -> list[list[int]]:
    return [np.asarray(s.columns["current"]).astype(int).tolist() for s in samples]


def test_only_tokens_of_the_trained_version_are_compared() -> None:
    groups, samples = judged()
    marked = with_current(groups, samples, 4, 10)
    assert current(marked) == [[-1, -1, -1, -1], [-1, -1, 11, -1, -1, 11], [-1, 12, 12, 12]]
    assert all("current" not in s.columns for s in samples)


def scored(groups: list[Group], samples: list[Sample], **changes: Any) -> list[Sample]:
    marked = with_current(groups, samples, 4, 0)
    found = []
    for number, sample in enumerate(marked):
        proximal = np.asarray(sample.columns["behaviour"], np.float32).copy()
        for place, value in changes.get(f"s{number}", {}).items():
            proximal[place] = value
        found.append(sample.with_columns(proximal=proximal, advantage=np.ones(len(proximal))))
    return found


def test_the_log_probs_scored_before_the_first_update_are_compared_too() -> None:
    groups, samples = judged()
    assert proximal_difference(samples) is None
    assert proximal_difference(scored(groups, samples)) is None
    broken = proximal_difference(scored(groups, samples, s1={2: np.nan}))
    assert broken is not None
    assert (broken.gap, broken.sample, broken.place) == (float("inf"), 1, 2)
    # Tokens of older versions, and what the policy only read, may be anything.
    assert proximal_difference(scored(groups, samples, s0={2: 5.0}, s1={0: 3.0, 1: 1.0, 3: 2.0})) is None
    nearest = np.nextafter(np.float32(-0.5), np.float32(0))
    found = proximal_difference(scored(groups, samples, s2={3: nearest}))
    assert found is not None
    assert (found.sample, found.place, found.trainer, found.generator) == (2, 3, float(nearest), -0.5)


def test_a_difference_ends_the_run_by_rollout_token_and_both_log_probs() -> None:
    groups, samples = judged()
    health = Health(Config(), print)
    assert health.after(5, STEP, groups, scored(groups, samples)) is None
    difference = Difference(2e-7, 1, 5, -0.25, -0.2500002)
    error = health.after(5, replace(STEP, difference=difference), groups, samples)
    assert error is not None
    assert str(error) == (
        "step 5 is not exact: rollout 0 of prompt 5, token 5 (id 13): log-prob -0.25 in the trainer, -0.2500002 in the "
        "generator"
    )
    assert "debug.exact" in error.details
    assert error.rank == ""  # no mesh is replaced for it
    assert described(difference, groups, samples) in str(error)
    later = health.after(5, STEP, groups, scored(groups, samples, s2={1: -0.6}))
    assert later is not None
    assert "rollout 1 of prompt 5, token 1 (id 13)" in str(later)
