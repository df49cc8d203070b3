"""When a run that makes no progress ends, and the error that it ends with."""

import math
from dataclasses import replace
from typing import Any

import pytest

from titan_rl.config.sections import AlgorithmSection, Config, FaultSection, JobSection
from titan_rl.train.health import Health, Rewind, Ruined
from titan_rl.wire.reports import COMPILED, MEMORY, StepStats
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Sample, Turn

STEP = StepStats(loss=0.0, grad_norm=1.0, lr=1e-3, tokens=8, seconds=1.0)


@pytest.mark.parametrize("reaction", ["stop", "rollback"])
def test_three_steps_in_a_row_without_a_finite_gradient_end_a_run_or_rewind_it(reaction: str) -> None:
    health = Health(Config(fault=FaultSection(on_bad_steps=reaction)), print)  # pyright: ignore[reportArgumentType]
    bad = replace(STEP, skipped=1)
    assert [health.after(step, stats) for step, stats in enumerate((bad, bad, STEP, bad, bad), start=1)] == [None] * 5
    error = health.after(6, bad)
    assert str(error) == "3 steps in a row had a gradient that is not finite"
    if isinstance(error, Rewind):
        assert error.before == 4
    else:
        assert "fault.max_bad_steps" in getattr(error, "details", "")
    assert isinstance(error, Rewind) == (reaction == "rollback")


def sampled(*logprobs: float, replica: str = "") -> Group:
    prompt = Prompt(7, "1+1=", [1], "2")
    good = Completion([5], [-0.5], [0], "stop")
    bad = Completion([5] * len(logprobs), list(logprobs), [0] * len(logprobs), "stop", replica)
    return Group(prompt, [Rollout([Branch([Turn([1], each)])], "2", 1.0) for each in (good, bad)])


def health(warned: list[str] | None = None, **fault: Any) -> Health:
    return Health(Config(fault=FaultSection(**fault)), (warned if warned is not None else []).append)


def test_weights_are_called_ruined_where_the_loss_is_not_finite_and_are_not_saved() -> None:
    """A skipped update keeps the weights, but they may have been ruined before."""
    watched = health(max_bad_steps=2)
    broken = replace(STEP, loss=math.nan, grad_norm=math.nan, skipped=1)
    assert watched.after(4, broken, phase="cold_start") is None
    error = watched.after(5, broken, phase="cold_start")
    assert isinstance(error, Ruined)
    assert "loss that is not finite" in str(error)
    assert "step 4 of the cold start began with are ruined" in error.details
    assert "good" not in error.details

    watched = health(max_bad_steps=2)
    overflow = replace(STEP, grad_norm=math.inf, skipped=1)
    assert watched.after(4, overflow) is None
    error = watched.after(5, overflow)
    assert not isinstance(error, Ruined)
    assert error is not None
    assert "the weights are those after step 3" in error.details


@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"grad_norm": math.inf}, {"skipped": 1}])
def test_a_run_whose_last_step_is_not_finite_has_not_succeeded(bad: dict[str, Any]) -> None:
    watched = health()
    assert watched.after(1, replace(STEP, **bad)) is None
    with pytest.raises(Ruined, match="the last step was not sound"):
        watched.raise_if_last_step_unsound()
    assert watched.after(2, STEP) is None
    watched.raise_if_last_step_unsound()


def test_sampling_logprobs_that_are_not_finite_are_named_by_replica_and_rollout() -> None:
    warned: list[str] = []
    watched = health(warned, max_bad_steps=2)
    group = sampled(-1.0, math.nan, -math.inf, replica="generator1")
    assert watched.after(1, STEP, [group]) is None
    what = "2 of 4 sampled tokens have a log-prob that is not finite, first in sample 1 of prompt 7, by generator1"
    assert warned == [f"step 1: {what}; nothing is learnt from these tokens"]
    watched.raise_if_last_step_unsound()  # the other tokens were sound
    assert watched.after(2, STEP, [sampled(-1.0)]) is None
    assert watched.after(3, STEP, [group]) is None
    error = watched.after(4, STEP, [group])
    assert isinstance(error, Ruined)
    assert what in str(error)


def test_a_run_that_ends_without_one_finite_logprob_has_not_succeeded() -> None:
    watched = health()
    nothing = replace(sampled(), rollouts=sampled(math.nan, replica="generator0").rollouts[1:])
    assert watched.after(1, replace(STEP, loss=0.0, grad_norm=0.0), [nothing]) is None
    with pytest.raises(Ruined, match="1 of 1 sampled tokens"):
        watched.raise_if_last_step_unsound()


def test_a_run_without_signal_ends_with_the_cause_and_where_to_look() -> None:
    config = Config(algorithm=AlgorithmSection(max_dead_steps=2), job=JobSection(dump_folder="outputs/dead"))
    watched = Health(config, [].append, lambda: "the reward is 0.500 for all of 64 answers")
    flat = Sample([1, 2], [0, 1], {"advantage": [0.0, 0.0]})
    assert watched.after(1, STEP, [sampled(-1.0)], [flat]) is None
    error = watched.after(2, STEP, [sampled(-1.0)], [flat])
    assert error is not None
    assert error.again
    assert error.details.startswith("The reward is 0.500 for all of 64 answers. ")
    assert "python -m titan_rl why outputs/dead" in error.details
    assert "docs/it_does_not_learn.md" in error.details


def test_a_step_that_compiled_makes_no_rank_a_straggler() -> None:
    slow = replace(STEP, ranks={"trainer 0": 1.0, "trainer 1": 9.0})
    for compiled, warnings in ((0, 1), (3, 0)):
        warned: list[str] = []
        watched = health(warned)
        for step in range(1, 7):
            watched.after(step, replace(slow, hardware={COMPILED: compiled}))
        assert len(warned) == warnings


def test_the_memory_of_a_trainer_is_reported_once() -> None:
    reported: list[float] = []
    watched = Health(Config(), print, memory=lambda metrics: reported.append(metrics[MEMORY]))
    for step in range(1, 6):
        watched.after(step, replace(STEP, hardware={MEMORY: float(step)}))
    assert reported == [3.0]
    on_cpu = Health(Config(), print, memory=lambda metrics: reported.append(0.0))
    for step in range(1, 6):
        on_cpu.after(step, STEP)
    assert reported == [3.0]
