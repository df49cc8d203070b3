"""The environment mesh on real processes, with a scripted policy."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.environment_meshes import environments, scripted
from support.odd_environments import TURNS
from support.played import LIMITS
from titan_rl.meshes import deaths
from titan_rl.wire.errors import RunError

ODD, PLAIN = "support.odd_environments:Odd", "support.odd_environments:Plain"
SECONDS = 100.0


def drive(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), SECONDS))


async def lag_of_loop(worst: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.01)
        worst[0] = max(worst[0], time.perf_counter() - before - 0.01)


def test_forty_rollouts_of_which_one_raises_one_blocks_and_one_kills_its_process(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(40)]
    rows[3], rows[11], rows[20] = {"do": "raise"}, {"do": "block", "seconds": 3.0}, {"do": "exit", "turn": 2}

    async def body() -> None:
        async with environments(ODD, tmp_path) as (mesh, said):
            sessions, worst = scripted(rows), [0.0]
            lag = asyncio.create_task(lag_of_loop(worst))
            outcomes = await asyncio.gather(*map(mesh.drive, sessions))
            lag.cancel()
            assert [i for i, each in enumerate(outcomes) if each.status != "completed"] == [3, 20]
            assert all(each.reward == 1.0 for i, each in enumerate(outcomes) if i not in (3, 20))
            assert (outcomes[3].status, outcomes[3].reward) == ("error", None)
            assert re.search(r"ValueError: bad action \(.*odd_environments.py:\d+ in _misbehave", outcomes[3].error)
            assert (outcomes[20].status, outcomes[20].reward) == ("lost", None)
            assert "ended with exit code 7" in outcomes[20].error
            # What was sampled before a process died is replayed, not sampled again.
            assert all(len(session.asked) == TURNS for i, session in enumerate(sessions) if i not in (3, 20))
            assert len(sessions[20].asked) == 2
            assert sum("ended with exit code 7" in line for line in said) <= 4
            assert worst[0] < 2.5, "the controller's loop waited for user code"

    drive(body)


def test_a_process_that_is_killed_in_mid_step_loses_no_rollout(tmp_path: Path) -> None:
    async def body() -> None:
        async with environments(ODD, tmp_path) as (mesh, said):
            sessions = scripted([{"tool_seconds": 0.5}] * 12)
            driven = asyncio.gather(*map(mesh.drive, sessions))
            while sum(len(session.asked) for session in sessions) < 18:
                await asyncio.sleep(0.01)
            victim = mesh.processes[0].rank
            os.kill(deaths.alive()[victim], signal.SIGKILL)
            outcomes = await driven
            assert [each.status for each in outcomes] == ["completed"] * 12
            assert [len(session.asked) for session in sessions] == [TURNS] * 12
            assert any(victim in line and "signal 9" in line for line in said)
            while not any("is back after" in line for line in said):
                await asyncio.sleep(0.02)
            assert [p.state for p in mesh.processes] == ["serving"] * 2

    drive(body)


def test_a_rollout_that_blocks_its_loop_is_named_and_only_it_is_late(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(8)]
    rows[2] = {"do": "block", "seconds": 600}

    async def body() -> None:
        async with environments(ODD, tmp_path, limits=replace(LIMITS, turn_seconds=4.0)) as (mesh, said):
            outcomes = await asyncio.gather(*map(mesh.drive, scripted(rows)))
            assert [each.status for i, each in enumerate(outcomes) if i != 2] == ["completed"] * 7
            assert (outcomes[2].status, outcomes[2].reward) == ("timeout", None)
            assert re.search(r"odd_environments.py:\d+ in _misbehave: time.sleep", outcomes[2].error)
            assert any("its loop has been blocked for" in line for line in said)

    drive(body)


def test_code_that_holds_the_interpreters_lock_is_found(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(6)]
    rows[4] = {"do": "regex"}

    async def body() -> None:
        async with environments(ODD, tmp_path, processes=1, concurrency=1, hang_seconds=5) as (mesh, said):
            outcomes = await asyncio.gather(*map(mesh.drive, scripted(rows)))
            assert [each.status for i, each in enumerate(outcomes) if i != 4] == ["completed"] * 5
            assert (outcomes[4].status, outcomes[4].reward) == ("lost", None)
            # whichever of its endpoints waited first, each with its own deadline
            assert re.fullmatch(r"environment0\[env=0\]\.\w+ did not answer within \d+ s", outcomes[4].error)
            assert any("odd_environments.py" in line for line in said), "no stack names the line"

    drive(body)


def test_a_process_with_a_stuck_thread_is_replaced_after_its_other_rollouts(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"do": "block", "seconds": 600}, *[{} for _ in range(5)]]

    async def body() -> None:
        limits = replace(LIMITS, turn_seconds=3.0)
        async with environments(PLAIN, tmp_path, processes=1, limits=limits) as (mesh, said):
            first = mesh.processes[0].rank
            outcomes = await asyncio.gather(*map(mesh.drive, scripted(rows, seconds=0.3)))
            assert [each.status for each in outcomes] == ["timeout", *["completed"] * 5]
            while first in deaths.alive() or not mesh.processes:
                await asyncio.sleep(0.05)
            assert any(f"{first} is replaced: 1 of its rollouts did not return in time" in line for line in said)
            (again,) = await asyncio.gather(*map(mesh.drive, scripted([{}])))
            assert again.status == "completed"

    drive(body)


def test_a_cancelled_rollout_leaves_nothing_running_and_its_place_is_free(tmp_path: Path) -> None:
    async def body() -> None:
        async with environments(ODD, tmp_path, processes=1, concurrency=3) as (mesh, _):
            driven = [asyncio.create_task(mesh.drive(each)) for each in scripted([{"tool_seconds": 60}] * 5)]
            while await mesh.running() < 3:
                await asyncio.sleep(0.02)
            assert await mesh.running() == 3, "a process drives environment.concurrency rollouts"
            for task in driven:
                task.cancel()
            await asyncio.wait(driven)
            while await mesh.running():
                await asyncio.sleep(0.02)
            outcomes = await asyncio.gather(*map(mesh.drive, scripted([{}] * 5)))
            assert [each.status for each in outcomes] == ["completed"] * 5

    drive(body)


def test_in_lockstep_a_turn_is_sampled_once_every_rollout_has_asked(tmp_path: Path) -> None:
    """However long each tool takes: requests have the order of the rollouts."""
    rows = [{"tool_seconds": 0.05 * (5 - i)} for i in range(6)]

    async def body() -> None:
        async with environments(ODD, tmp_path, lockstep=True) as (mesh, _):
            sessions = scripted(rows)
            await asyncio.gather(*map(mesh.drive, sessions))
            assert sessions[0].order == [(id, turn) for turn in range(TURNS) for id in range(6)]
            for process in mesh.processes:
                maps = Path(f"/proc/{deaths.alive()[process.rank]}/maps").read_text()
                assert "libtorch" not in maps, "an environment process has imported torch"

    drive(body)


def test_an_environment_that_always_kills_its_process_ends_the_run(tmp_path: Path) -> None:
    async def body() -> None:
        async with environments(ODD, tmp_path, processes=1, restarts=1) as (mesh, said):
            found = await asyncio.gather(*map(mesh.drive, scripted([{"do": "exit"}] * 4)), return_exceptions=True)
            assert all(isinstance(each, RunError) for each in found)
            assert "environment0 was respawned 1 time within" in str(found[0])
            assert any("environment0 is not replaced: 0 environment processes left" in line for line in said)

    drive(body)


def test_an_environment_that_cannot_start_ends_the_run_by_name(tmp_path: Path) -> None:
    async def body() -> None:
        with pytest.raises(RunError) as error:
            async with environments("no_such_module:Thing", tmp_path):
                pass
        assert "No module named 'no_such_module'" in error.value.details

    drive(body)
