"""Runs whose weights go by broadcast over gloo to two workers that stand for hosts."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.outputs import same, shared_memory
from support.running import Run, Runs
from support.slow_cases import slow_except
from titan_rl.ext.broadcast.ranks.broadcast import MEET_SECONDS
from titan_rl.wire import failpoints

KEYS: dict[str, Any] = {
    "cold_start__steps": 2,
    "training__steps": 4,
    "eval__size": 0,
    "generator__replicas": 2,
    "hosts__kind": "processes",
    "hosts__count": 2,
    "placement__hosts": '{trainer = "0", generator = "0-1"}',
    "algorithm__max_dead_steps": 0,
}
VICTIM = "generator1[tp=0]"


def into_host(run: Run) -> list[float]:
    return [line["sync/bytes_into_host"] for line in run.lines("metrics.jsonl")]


def test_a_broadcast_gives_the_losses_and_rollouts_of_one_sided_reads(runs: Runs, tmp_path: Path) -> None:
    shared = shared_memory()
    ways = {"rdma": "RDMABuffer (TCP fallback)", "broadcast": "broadcast (gloo)"}
    finished = {}
    for way, name in ways.items():
        run = runs.start(tmp_path / way, **KEYS, weight_sync__transport=way, weight_sync__delta=True)
        out = run.finish()
        assert run.code == 0, out
        assert f"by {name}" in " ".join(out.split()), out
        finished[way] = run
    assert same(finished["broadcast"], finished["rdma"])
    assert into_host(finished["broadcast"]) == into_host(finished["rdma"])
    assert not any("sync/fell_back" in line for line in finished["broadcast"].lines("metrics.jsonl"))
    assert shared_memory() <= shared


@pytest.mark.parametrize("verify", slow_except(["transfer", "live"], 1))
def test_a_replica_killed_amid_a_broadcast_costs_the_others_no_version(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    """It is killed when its groups wait for it. The replica of the other host reads that version one-sided, and when
    another has taken its place, both receive broadcasts again."""
    monkeypatch.setenv(failpoints.FOLDER, str(tmp_path))
    keys = {**KEYS, "training__steps": 40, "weight_sync__transport": "broadcast", "weight_sync__verify": verify}
    run = runs.start(tmp_path / "run", **keys)
    run.wait_for_step(1)
    failpoints.give(tmp_path, VICTIM, "read", failpoints.FaultOrder("wait", 60.0))
    wait_until(run, lambda: (tmp_path / failpoints.HITS).exists())
    time.sleep(1)  # until the other replica waits in its groups
    killed = time.monotonic()
    os.kill(run.workers()[VICTIM], signal.SIGKILL)
    at = fell_back(run)
    wait_until(run, lambda: fell_back(run) != at)
    assert time.monotonic() - killed < MEET_SECONDS / 2
    out = run.finish()
    assert run.code == 0, out
    assert "read them one-sided, as their broadcast failed; generator rank 0: broadcast from trainer rank" in " ".join(
        out.split()
    )
    faults = [json.loads(line) for line in (run.folder / "faults.jsonl").read_text().splitlines()]
    assert {fault["who"] for fault in faults} == {"generator1"}
    assert faults[-1]["outcome"] == "back"
    last = run.lines("metrics.jsonl")[-1]
    assert "sync/fell_back" not in last
    assert last["sync/bytes"] == 2 * last["sync/bytes_into_host"]


def fell_back(run: Run) -> int:
    return sum("sync/fell_back" in line for line in run.lines("metrics.jsonl"))


def wait_until(run: Run, true: Any, seconds: float = 120) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert run.process.poll() is None, run.finish()
        assert time.monotonic() < ends
        time.sleep(0.05)
