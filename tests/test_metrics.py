"""A step's metrics against hand-made data."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.metrics import DOCS, EVAL_SCORE, OCCASIONAL, StepTimes, step_metrics
from titan_rl.types import Completion, Finish, Group, Prompt, Rollout, StepStats, SyncStats, Turn

STATS = StepStats(0.01, 0.9, 1e-3, 5, 0.8, 1e-7, 2e-7, 1.0, 1.0, 1.1, 0.02, 0.03, 0.004, 1.2)
SYNC = SyncStats(3, 4_096, 0.01, 0.02, 0.03, 0.07)
TIMES = StepTimes(generate=2.0, train=1.0, sync=0.5, wall=4.0)
PROMPT = Prompt(7, "12+34=", [1, 4, 5], "640")


def rollout(reward: float, advantage: float, versions: list[int], finish: Finish = "stop") -> Rollout:
    n = len(versions)
    completion = Completion(tokens=[9] * n, logprobs=[-0.5] * n, versions=versions, finish=finish)
    return Rollout([Turn(PROMPT.tokens, completion)], text="6" * n, reward=reward, advantage=advantage)


GROUPS = [
    Group(PROMPT, [rollout(1.0, 0.7, [2, 2, 2]), rollout(0.0, -0.7, [2, 1], finish="length")]),
    Group(PROMPT, [rollout(0.0, 0.0, [2]), rollout(0.0, 0.0, [2, 2], finish="abort")]),
]


def test_every_key_is_documented_and_every_documented_key_is_there() -> None:
    always = [key for key in DOCS if key not in OCCASIONAL]
    assert list(step_metrics(3, GROUPS, STATS, SYNC, TIMES)) == always
    assert list(step_metrics(3, GROUPS, STATS, SYNC, TIMES, score=0.5)) == [*always, EVAL_SCORE]
    assert set(OCCASIONAL) <= set(DOCS)
    assert all(doc.endswith(".") and "\n" not in doc for doc in DOCS.values())


def test_values_are_computed_from_the_rollouts() -> None:
    metrics = step_metrics(3, GROUPS, STATS, SYNC, TIMES, score=0.25)
    expected = {
        "time/wait": 0.5,
        "reward/mean": 0.25,
        "reward/std": math.sqrt(3) / 4,
        "frac_reward_zero_std": 0.5,
        "completions/mean_length": 2.0,
        "completions/max_length": 3,
        "completions/clipped_ratio": 0.5,
        "advantage/min": -0.7,
        "advantage/max": 0.7,
        "policy_age/mean": 1 / 8,
        "policy_age/max": 1,
        "tokens/sampled": 8,
        "tokens/trained": 5,
        "throughput/tokens_per_second": 2.0,
        "sync/bytes": 4_096,
        "kl/k3": 0.004,
        EVAL_SCORE: 0.25,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)
    assert all(type(value) is float for value in metrics.values())  # numpy scalars are not JSON


def test_on_policy_tokens_have_age_zero() -> None:
    metrics = step_metrics(1, [Group(PROMPT, [rollout(1, 0, [0, 0])])], STATS, SYNC, TIMES)
    assert metrics["policy_age/mean"] == metrics["policy_age/max"] == 0


def test_a_step_of_aborted_rollouts_has_finite_metrics() -> None:
    metrics = step_metrics(3, [Group(PROMPT, [rollout(0, 0, [], finish="abort")])], STATS, SYNC, TIMES)
    assert all(math.isfinite(value) for value in metrics.values())


@given(parts=st.tuples(*[st.floats(0, 1e4)] * 3), wall=st.floats(0, 1e4))
def test_the_time_split_covers_the_wall_and_is_never_negative(parts: tuple[float, float, float], wall: float) -> None:
    times = StepTimes(*parts, wall=wall)
    assert times.wait >= 0
    assert sum(parts) + times.wait == pytest.approx(max(wall, sum(parts)))
