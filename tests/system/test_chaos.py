"""Chaos: what it does is drawn from a seed, what it needs in the product is inert, and a real run comes through."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.running import SMALL
from titan_rl.chaos import __main__ as chaos
from titan_rl.chaos.schedule import cases, problems, role_of, schedule
from titan_rl.chaos.verdict import versions
from titan_rl.config.sections import Config, RolloutSection
from titan_rl.record.ledger import Ledger
from titan_rl.wire.failpoints import FOLDER, HITS, FaultOrder, give
from titan_rl.wire.types import Completion

RANKS = ("trainer[dp=0 tp=0]", "trainer[dp=1 tp=0]", "generator0[tp=0]", "generator1[tp=0]", "reference[dp=0 tp=0]")
RANK = "generator0[tp=0]"
FAULTS = ("kill:generator", "kill:trainer", "error:generator", "corrupt:generator", "disk:trainer")


# -- what happens to whom and when -------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(0, 40), st.permutations(RANKS))
def test_the_schedule_is_a_function_of_the_seed(seed: int, count: int, ranks: list[str]) -> None:
    faults = schedule(seed, count, ranks, steps=100)
    assert faults == schedule(seed, count, RANKS, steps=100)
    steps = [fault.step for fault in faults]
    assert steps == sorted(set(steps))
    assert len(steps) == count
    assert all(2 <= step <= 85 for step in steps)
    assert all(fault.victim in ranks for fault in faults)


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


def test_a_choice_is_kept_to() -> None:
    assert cases(RANKS, FAULTS) == [tuple(fault.split(":")) for fault in FAULTS]
    assert cases(RANKS, ["drop"]) == [("drop", "generator")]


def test_what_cannot_be_scheduled_is_refused() -> None:
    (steps,) = problems(20, RANKS, steps=10)
    assert steps.startswith("20 faults: expected at least 20 steps from 2 to 8, of 10")
    (only,) = problems(1, RANKS, steps=100, only=["kill", "kill:critic"])
    assert only.startswith("--only kill:critic: expected a fault that this run can have: kill, stop,")
    assert problems(79, RANKS, steps=100, only=FAULTS) == []
    assert len(schedule(0, 79, RANKS, 100, FAULTS)) == 79


# -- failpoints --------------------------------------------------------------------------------------------------


def at_failpoints(folder: Path, *, armed: bool) -> str:
    """What a process of RANK says that comes to its failpoints twice, whether or not it was told of the folder."""
    program = """
import asyncio
from titan_rl.wire import failpoints
def passed(action):
    try:
        return action()
    except failpoints.InjectedFault as fault:
        return str(fault)
for _ in range(2):
    print(passed(lambda: failpoints.hit("put")), passed(lambda: asyncio.run(failpoints.reached("step"))), sep="; ")
"""
    environment = {k: v for k, v in os.environ.items() if k != FOLDER} | {"TITAN_RL_PROC": RANK}
    environment |= {FOLDER: str(folder)} if armed else {}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_an_order_is_obeyed_once(tmp_path: Path) -> None:
    give(tmp_path, RANK, "put", FaultOrder("damage"))
    give(tmp_path, RANK, "step", FaultOrder("raise"))
    give(tmp_path, "generator1[tp=0]", "put", FaultOrder("raise"))
    assert at_failpoints(tmp_path, armed=True) == f"True; ordered at step of {RANK}\nFalse; None\n"
    hits = [json.loads(line) for line in (tmp_path / HITS).read_text().splitlines()]
    assert [(hit["rank"], hit["point"], hit["do"]) for hit in hits] == [
        (RANK, "put", "damage"),
        (RANK, "step", "raise"),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {HITS, "generator1[tp=0] put"}


def test_failpoints_are_inert_without_the_variable(tmp_path: Path) -> None:
    give(tmp_path, RANK, "put", FaultOrder("damage"))
    give(tmp_path, RANK, "step", FaultOrder("raise"))
    before = sorted(tmp_path.iterdir())
    assert at_failpoints(tmp_path, armed=False) == "False; None\n" * 2
    assert sorted(tmp_path.iterdir()) == before


# -- what is looked at afterwards --------------------------------------------------------------------------------


def sampled(ledger: Ledger, prompt: int, version: int) -> None:
    ledger.admitted(prompt, 0)
    ledger.sampled(prompt, [Completion([1], [0.0], [version], "stop")])


def test_a_version_of_an_undone_history_is_found(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.begun(0, 0, ())
    for step in (1, 2, 3):
        sampled(ledger, step, step - 1)
        ledger._append("trained", step=step, prompts=[step])
    ledger.begun(2, 3, ())
    sampled(ledger, 3, 3)
    ledger.close()
    assert list(versions(tmp_path, Config())) == ["history 2: prompt 3 was sampled from version 3 after step 2"]


def test_older_weights_after_newer_ones_are_found(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.begun(0, 0, ())
    for step in (1, 2):
        ledger._append("trained", step=step, prompts=[])
    sampled(ledger, 1, 2)
    sampled(ledger, 2, 1)
    ledger.close()
    assert list(versions(tmp_path, Config())) == ["history 1: prompt 2 was sampled from version 1 after version 2"]
    assert list(versions(tmp_path, Config(rollout=RolloutSection(lag=1)))) == []


# -- real runs ---------------------------------------------------------------------------------------------------


def under_chaos(folder: Path, *faults: str, **overrides: object) -> tuple[subprocess.CompletedProcess[str], Any]:
    """These faults, once each."""
    keys = {**SMALL, "generator.replicas": 2, "eval.interval": 0}
    keys |= {key.replace("__", "."): value for key, value in overrides.items()}
    run = subprocess.run(
        [
            *(sys.executable, "-m", "titan_rl.chaos", "--config", "grpo_llama", "--run", str(folder)),
            *("--kills", str(len(faults)), "--seed", "5", "--only", ",".join(faults), "--pace", "0.1"),
            *("--patience", "90", "--csv", str(folder.with_suffix(".csv"))),
            *(part for key, value in keys.items() for part in (f"--{key}", str(value))),
        ],
        capture_output=True,
        text=True,
        timeout=400,
    )
    return run, json.loads((folder / "chaos.json").read_text()) if run.returncode in (0, 1) else None


def test_a_run_comes_through_five_faults(tmp_path: Path) -> None:
    run, found = under_chaos(tmp_path / "run", *FAULTS, training__steps=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert found["problems"] == []
    assert all(problems == [] for problems in found["audits"].values())
    assert len(found["audits"]) == 8
    assert sorted(f"{row['fault']}:{row['role']}" for row in found["classes"]) == sorted(FAULTS)
    for outcome in found["faults"]:
        kind, mesh = outcome["fault"]["kind"], outcome["fault"]["victim"].partition("[")[0]
        assert outcome["blamed"] == ("" if kind == "corrupt" else mesh)
        assert (outcome["detected"] is None) == (kind == "corrupt")
        assert 0 < outcome["recovered"] < 60
        if kind == "kill":
            assert outcome["detected"] < 5
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 6


def test_a_run_that_does_not_come_through_is_named(tmp_path: Path) -> None:
    run, found = under_chaos(tmp_path / "run", "kill:trainer", training__steps=60, fault__max_restarts=0)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "expected exit code 0, found 1" in found["problems"]
    assert "died: its process was killed by signal 9" in run.stdout


def test_bad_usage_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, expected in [
        (["--training.step", "3"], "--training.step: [training] has no key 'step'; did you mean 'steps'?"),
        (["--training.steps", "10"], "20 faults: expected at least 20 steps from 2 to 8, of 10"),
        (["--only", "kill,stop:critic"], "--only stop:critic: expected a fault that this run can have: kill, stop,"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            chaos.main(["--config", "grpo_llama", *flags])
        assert expected in capsys.readouterr().err
