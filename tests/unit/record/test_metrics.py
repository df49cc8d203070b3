"""A step's metrics against hand-made data."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.actors.titan.reduction import Reduction, finish
from titan_rl.ext.preference.ranks.preference_loss import Pairs, Preference, bradley_terry_loss, preference_loss
from titan_rl.kernels.kl import Estimator
from titan_rl.kernels.policy_loss import Tokens, policy_loss, supervised_loss
from titan_rl.kernels.statistics import Statistics
from titan_rl.kernels.surrogate import Surrogate
from titan_rl.kernels.value_loss import value_loss
from titan_rl.record.metric_docs import DOCS, EVAL_SCORE
from titan_rl.record.metrics import fit_metrics, step_metrics, step_times
from titan_rl.wire.reports import EngineStats, StepStats, SyncStats
from titan_rl.wire.types import Batch, Branch, Completion, Finish, Group, Prompt, Rollout, Turn

STATS = StepStats(0.01, 0.9, 1e-3, 5, 0.8, metrics={"entropy": 1.2, "kl/k3": 0.004})
SYNC = SyncStats(3, 4_096, 0.01, 0.02, 0.03, 0.07)
OCCASIONAL = tuple(DOCS)[tuple(DOCS).index(EVAL_SCORE) :]  # metrics that only some steps or some algorithms log
TIMES = step_times({"generate": 2.0, "judge": 0.25, "train": 0.75, "sync": 0.5, "wall": 4.0})
PROMPT = Prompt(7, "12+34=", [1, 4, 5], "640")


def rollout(reward: float, advantage: float, versions: list[int], finish: Finish = "stop") -> Rollout:
    n = len(versions)
    completion = Completion(tokens=[9] * n, logprobs=[-0.5] * n, versions=versions, finish=finish)
    return Rollout([Branch([Turn(PROMPT.tokens, completion)])], text="6" * n, reward=reward, advantage=advantage)


LAP = {"wall": 10.0, "judge": 1.0, "train": 3.0, "sync": 0.5, "eval": 2.0, "save": 1.0}
GROUPS = [
    Group(PROMPT, [rollout(1.0, 0.7, [2, 2, 2]), rollout(0.0, -0.7, [2, 1], finish="length")]),
    Group(PROMPT, [rollout(0.0, 0.0, [2]), rollout(0.0, 0.0, [2, 2], finish="abort")]),
]


def metrics_of_losses() -> dict[str, set[str]]:
    """Return the names of the metrics that each loss adds to a step, by algorithm."""
    x, sequence = torch.linspace(-1, 0, 4), torch.tensor([0, 0, 1, 1])
    pairs = Pairs(torch.ones(4), sequence, 2, 1)

    def policy(kl: Estimator) -> Statistics:
        tokens = Tokens(x, x, torch.ones(4), torch.ones(4) / 4, sequence, 2, reference=x)
        return policy_loss(x, x, tokens, Surrogate(kl=kl))[1]

    statistics = {
        **{f"rl, {kl}": policy(kl) for kl in get_args(Estimator)},
        "supervised": supervised_loss(x, x, torch.ones(4), torch.ones(4) / 4)[1],
        "preference": preference_loss(x, x, pairs, Preference(name="kto"), reference_T=x)[1],
        "reward": bradley_terry_loss(x, pairs)[1],
        "value": value_loss(x, old_T=x, return_T=x, mask_T=torch.ones(4), weight_T=torch.ones(4) / 4, clip=0.2)[1],
    }
    batch = Batch([], 4, 2)
    steps = {
        name: finish([Reduction.of([s], batch, None)], lr=0.1, seconds=1, busy=1) for name, s in statistics.items()
    }
    assert {name for step in steps.values() for name in step.histograms} == {"ratio/histogram"}
    return {name: set(step.metrics) for name, step in steps.items()}


def test_every_key_of_a_step_is_documented() -> None:
    names = metrics_of_losses()
    for keys in names.values():
        stats = replace(STATS, metrics=dict.fromkeys(keys, 0.5))
        logged = step_metrics(3, GROUPS, stats, SYNC, TIMES, scores={EVAL_SCORE: 0.5})
        assert logged.keys() <= DOCS.keys()
        assert fit_metrics(stats, LAP, scores={EVAL_SCORE: 0.5}).keys() <= DOCS.keys()
    assert {"value/loss", "value/grad_norm", "value/lr", "time/eval", "time/save", "dropped/truncated"} <= DOCS.keys()


def test_drafts_of_all_engines_are_counted() -> None:
    engines = {"0": EngineStats(drafted=5, accepted=2), "1": EngineStats(drafted=4, accepted=1)}
    logged = step_metrics(3, GROUPS, STATS, replace(SYNC, engines=engines), TIMES)
    assert (logged["engine/drafted_tokens"], logged["engine/accepted_tokens"]) == (9, 3)
    assert logged.keys() <= DOCS.keys()


def test_only_occasional_keys_are_missing_from_a_plain_step() -> None:
    """What RL always logs stands before eval/score, in the order of the docs."""
    names = metrics_of_losses()
    always = [key for key in DOCS if key not in OCCASIONAL]
    for estimator in get_args(Estimator):
        stats = replace(STATS, metrics=dict.fromkeys(names[f"rl, {estimator}"], 0.5))
        logged = step_metrics(3, GROUPS, stats, SYNC, TIMES)
        assert set(always) == logged.keys() - {f"kl/{estimator}"}
    assert OCCASIONAL[0] == EVAL_SCORE
    assert {f"kl/{estimator}" for estimator in get_args(Estimator)} <= set(OCCASIONAL)
    assert names["value"] | names["preference"] | names["reward"] <= set(OCCASIONAL) | {"entropy"}


def test_docs_are_sentences_of_one_line() -> None:
    assert all(doc.endswith(".") and "\n" not in doc for doc in DOCS.values())


def test_values_are_computed_from_the_rollouts() -> None:
    metrics = step_metrics(3, GROUPS, STATS, SYNC, TIMES, scores={EVAL_SCORE: 0.25})
    expected = {
        "time/judge": 0.25,
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
        "dropped/groups": 0,
        "dropped/tokens": 0,
        "tokens/sampled": 8,
        "tokens/trained": 5,
        "throughput/tokens_per_second": 2.0,
        "sync/bytes": 4_096,
        "entropy": 1.2,
        "kl/k3": 0.004,
        EVAL_SCORE: 0.25,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)
    assert all(type(value) is float for value in metrics.values())  # numpy scalars are not JSON


def test_dropped_groups_were_sampled_but_are_no_rollouts_of_the_step() -> None:
    metrics = step_metrics(3, GROUPS[:1], STATS, SYNC, TIMES, dropped=GROUPS[1:])
    expected = {
        "dropped/groups": 1,
        "dropped/tokens": 3,
        "tokens/sampled": 8,
        "throughput/tokens_per_second": 2.0,
        "frac_reward_zero_std": 0,
        "completions/mean_length": 2.5,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_failed_groups_are_counted_apart_from_flat_ones() -> None:
    failed = Group(PROMPT, [rollout(math.nan, 0, [2, 2]), rollout(math.nan, 0, [])])
    metrics = step_metrics(3, GROUPS[:1], STATS, SYNC, TIMES, dropped=[GROUPS[1], failed])
    expected = {"dropped/groups": 1, "dropped/failed": 1, "dropped/tokens": 5, "reward/mean": 0.5}
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_a_penalty_is_told_apart_from_the_reward() -> None:
    long = replace(rollout(1.0, 0.0, [2]), penalty=0.5)
    metrics = step_metrics(3, [Group(PROMPT, [long, rollout(1.0, 0.0, [2])])], STATS, SYNC, TIMES)
    assert (metrics["reward/mean"], metrics["reward/penalty"]) == (1.0, 0.25)
    assert metrics["frac_reward_zero_std"] == 0  # they do teach something about each other
    assert "reward/penalty" not in step_metrics(3, GROUPS, STATS, SYNC, TIMES)


def test_a_step_on_given_data_has_times_and_what_the_loss_told() -> None:
    metrics = fit_metrics(STATS, LAP, scores={EVAL_SCORE: 0.75})
    assert metrics == pytest.approx(
        {
            "time/step": 10 - 2 - 1,
            "time/judge": 1.0,
            "time/train": 3.0,
            "time/sync": 0.5,
            "time/wait": 2.5,
            "time/eval": 2.0,
            "time/save": 1.0,
            "loss": 0.01,
            "grad_norm": 0.9,
            "updates/skipped": 0,
            "lr": 1e-3,
            "tokens/trained": 5,
            "entropy": 1.2,
            "kl/k3": 0.004,
            EVAL_SCORE: 0.75,
        }
    )
    assert EVAL_SCORE not in fit_metrics(STATS, LAP)
    assert "time/save" not in fit_metrics(STATS, {"wall": 1.0})


def test_on_policy_tokens_have_age_zero() -> None:
    metrics = step_metrics(1, [Group(PROMPT, [rollout(1, 0, [0, 0])])], STATS, SYNC, TIMES)
    assert metrics["policy_age/mean"] == metrics["policy_age/max"] == 0


def test_a_step_of_aborted_rollouts_has_finite_metrics() -> None:
    metrics = step_metrics(3, [Group(PROMPT, [rollout(0, 0, [], finish="abort")])], STATS, SYNC, TIMES)
    assert all(math.isfinite(value) for value in metrics.values())


@given(parts=st.tuples(*[st.floats(0, 1e4)] * 4), wall=st.floats(0, 1e4))
def test_the_time_split_covers_the_wall_and_is_never_negative(
    parts: tuple[float, float, float, float], wall: float
) -> None:
    wait = step_times({"wall": wall, **dict(zip(("generate", "judge", "train", "sync"), parts, strict=True))})[
        "time/wait"
    ]
    assert wait >= 0
    assert sum(parts) + wait == pytest.approx(max(wall, sum(parts)))


def test_what_followed_a_step_is_not_in_its_time() -> None:
    expected = {"step": 7.0, "generate": 0.0, "judge": 1.0, "train": 3.0, "sync": 0.5, "wait": 2.5}
    assert step_times(LAP) == {f"time/{part}": seconds for part, seconds in expected.items()}
