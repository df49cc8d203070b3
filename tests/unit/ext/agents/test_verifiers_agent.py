"""Tasksets of verifiers as an agent, with a stand-in for the package, tests/support/verifiers_like. The package itself
is in tests/system/test_adapters.py."""

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from titan_rl.ext.agents.external_python import ExternalPython

LIKE = Path(__file__).parents[3] / "support" / "verifiers_like"
GIVEN: dict[str, Any] = {"prompt": "p", "answer": "a", "seed": 0, "base_url": "http://u/r/0/v1", "api_key": "sk-secret"}


def played(row: dict[str, Any], taskset: str = "counting", seats: Sequence[str] = (), **args: Any) -> dict[str, Any]:
    async def play() -> dict[str, Any]:
        external = await ExternalPython.start(
            sys.executable, f"verifiers:{taskset}", key="task.agent", args=args, agent=True, seats=seats
        )
        try:
            asyncio.current_task().set_name("0")  # type: ignore[union-attr]
            return await external.run(row=row, model="policy", tokenizer="/folder", **GIVEN)
        finally:
            await external.close()

    return asyncio.run(play())


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LIKE)


def test_a_row_is_played_by_the_environment_server_over_the_rollouts_url(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="t") as folder:  # pytest's own are too long for a socket's name
        monkeypatch.setenv("TMPDIR", folder)
        found = played({"prompt": "say 2", "idx": 3, "question": "no column of it"}, **{"taskset.split": "train"})
        assert not list(Path(folder).iterdir()), "the server outlives the process that started it, or its folder does"
    assert found == {"reward": 0.75, "turns": 2.0}
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    said = json.loads(line)
    assert said["task"] == {"prompt": "say 2", "idx": 3}
    assert said["model"] == "policy"
    assert said["client"]["base_url"] == "http://u/r/0/v1"
    assert said["client"]["headers"] == {"Authorization": "Bearer sk-secret"}
    assert said["client"]["renderer_model_name"] == "/folder"
    assert "sk-secret" not in json.dumps(said["config"])
    assert said["config"]["taskset"] == {"id": "counting", "split": "train"}
    assert said["config"]["agent"] == {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}


def test_an_episode_that_failed_is_an_error_and_no_reward() -> None:
    with pytest.raises(Exception, match="HarnessError: as asked") as failed:
        played({"fails": True})
    assert type(failed.value).__name__ == "EpisodeFailed"


def test_a_taskset_that_there_is_not_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"task\.agent = 'verifiers:none': ModuleNotFoundError: taskset 'none' not found"
    ):
        played({}, taskset="none")


def test_seats_that_cannot_be_told_apart_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"that the policy plays, found agent, user: list them in environment.seats, or give"
    ):
        played({}, taskset="user_sim")


def test_a_seat_with_an_endpoint_adds_nothing_to_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        found = played({"prompt": "p"}, taskset="user_sim", **{"user.client.base_url": "http://another"})
    assert found == {"reward": 0.75, "turns": 2.0}


def test_a_frozen_seat_is_not_trained() -> None:
    with pytest.raises(Exception, match=r"traces of seat agent that may be trained on, found agent \(not trainable\)"):
        played({"frozen": True})


def test_each_seat_earns_its_own_reward_and_one_that_may_not_be_trained_on_earns_none(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        found = played({"prompt": "p"}, taskset="user_sim", seats=["agent", "user"])
    assert found == {"seats": {"agent": 0.75, "user": None}, "agent/turns": 2.0, "user/turns": 2.0}
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    config = json.loads(line)["config"]
    assert {seat: config[seat]["model"] for seat in ("agent", "user")} == {"agent": "agent", "user": "user"}


def test_seats_that_are_not_the_tasksets_agents_are_named() -> None:
    with pytest.raises(ValueError, match=r"environment\.seats: expected \['agent', 'user'\], the agents of taskset"):
        played({}, taskset="user_sim", seats=["agent", "judge"])
