"""The schedule of faults is a function of the seed, and what cannot be scheduled is refused."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.tools.chaos import __main__ as chaos
from titan_rl.tools.chaos.schedule import CONTROLLER, TARGETS, cases, problems, role_of, schedule

RANKS = ("trainer[dp=0 tp=0]", "trainer[dp=1 tp=0]", "generator0[tp=0]", "generator1[tp=0]", "reference[dp=0 tp=0]")
ONLY_CONTROLLERS = ("crash", "freeze", "preempt", "full", "second")
FAULTS = ("kill:generator", "kill:trainer", "error:generator", "corrupt:generator", "disk:trainer")


@given(st.integers(0, 2**32), st.integers(0, 40), st.permutations(RANKS))
def test_the_schedule_is_a_function_of_the_seed(seed: int, count: int, ranks: list[str]) -> None:
    faults = schedule(seed, count, ranks, steps=100)
    assert faults == schedule(seed, count, RANKS, steps=100)
    steps = [fault.step for fault in faults]
    assert steps == sorted(set(steps))
    assert len(steps) == count
    assert all(2 <= step <= 85 for step in steps)
    of_controller = [fault for fault in faults if fault.victim == CONTROLLER]
    assert {fault.kind for fault in of_controller} <= set(ONLY_CONTROLLERS)
    assert all(
        fault.victim in ranks and fault.kind not in ONLY_CONTROLLERS for fault in faults if fault not in of_controller
    )
    assert all(fault.point in TARGETS for fault in faults if fault.kind == "preempt")


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_every_case_comes_before_any_comes_twice(seed: int, count: int) -> None:
    drawn = Counter((fault.kind, fault.role) for fault in schedule(seed, count, RANKS, steps=200))
    assert drawn.keys() <= set(cases(RANKS))
    times = [drawn[case] for case in cases(RANKS)]
    assert max(times) - min(times) <= 1


def test_every_role_is_killed_stopped_slowed_and_raises() -> None:
    roles = {role_of(rank) for rank in RANKS}
    for kind in ("kill", "stop", "slow", "error"):
        assert {role for found, role in cases(RANKS) if found == kind} == roles


def test_a_rank_of_a_sharded_generator_is_not_made_to_refuse_a_request_that_its_peers_take() -> None:
    assert ("poison", "generator") in cases(RANKS)
    assert ("poison", "generator") not in cases([*RANKS, "generator0[tp=1]"])


def test_a_choice_is_kept_to() -> None:
    assert cases(RANKS, FAULTS) == [tuple(fault.split(":")) for fault in FAULTS]
    assert cases(RANKS, ["drop"]) == [("drop", "generator")]


def test_what_cannot_be_scheduled_is_refused() -> None:
    (steps,) = problems(20, RANKS, steps=10)
    assert steps.startswith("20 faults: expected at least 20 steps from 2 to 8, of 10")
    (only,) = problems(1, RANKS, steps=100, only=["kill", "kill:critic"])
    assert only.startswith("--only kill:critic: expected a fault that this run can have: kill, stop,")
    assert problems(79, RANKS, steps=100, only=FAULTS) == []
    assert problems(-1, RANKS, steps=100) == ["--kills: expected at least 0, found -1"]
    assert len(schedule(0, 79, RANKS, 100, FAULTS)) == 79


def test_bad_usage_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, expected in [
        (["--training.step", "3"], "--training.step: [training] has no key 'step'; did you mean 'steps'?"),
        (["--training.steps", "10"], "20 faults: expected at least 20 steps from 2 to 8, of 10"),
        (["--only", "kill,stop:critic"], "--only stop:critic: expected a fault that this run can have: kill, stop,"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            chaos.main(["--config", "grpo_llama", *flags])
        assert expected in capsys.readouterr().err


def test_environments_are_killed_stopped_slowed_and_raise() -> None:
    played = schedule(3, 40, [*RANKS, "environment0[env=0]", "environment1[env=0]"], steps=400)
    faults = [fault for fault in played if fault.role == "environment"]
    assert {fault.kind for fault in faults} == {"kill", "stop", "slow", "error"}
    assert {fault.point for fault in faults if fault.kind == "error"} <= {"begin", "take"}
