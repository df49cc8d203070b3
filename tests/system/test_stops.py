"""A real run that is asked to stop in each of its phases, by each signal, and loses no step."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.outputs import losses, sampled, shared_memory
from support.running import WHOLE, Run, RunFiles, Runs
from titan_rl.ext.control.server import ANNOUNCEMENT
from titan_rl.tools.inspect.audit_rules import audit
from titan_rl.wire.failpoints import FOLDER, HITS, FaultOrder, give

TRAINER, GENERATOR = "trainer[dp=0 tp=0]", "generator0[tp=0]"
FOR_EVER = FaultOrder("wait", 120)


class Stops:
    """Starts the same run again and again, holds it in a phase, and sends it a signal there."""

    def __init__(self, runs: Runs, folder: Path, orders: Path) -> None:
        self.runs, self.folder, self.orders = runs, folder, orders

    def start(self, **keys: Any) -> Run:
        return self.runs.start(self.folder, **{**WHOLE, "checkpoint__interval": 1000, **keys})

    def hold(self, rank: str, point: str, order: FaultOrder) -> None:
        give(self.orders, rank, point, order)

    def until(self, run: Run, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not happened():
            assert time.monotonic() < deadline
            assert run.process.poll() is None, run.finish(5)
            time.sleep(0.02)

    def held(self, run: Run, rank: str, point: str) -> None:
        """Wait until the run is held there, and forget it."""

        def is_held() -> bool:
            hits = self.orders / HITS
            return hits.exists() and any(
                line["rank"] == rank and line["point"] == point for line in map(json.loads, hits.open())
            )

        self.until(run, is_held)
        (self.orders / HITS).unlink()

    def stop(self, run: Run, number: int, *, everyone: bool, within: float = 40) -> str:
        """Send a signal to the controller, or to every process of the run. Return the output."""
        assert not run.maps("libtorch"), "the controller has imported torch"
        pids = [pid for pid, _, _ in run.processes()] if everyone else []
        began, signalled = time.monotonic(), time.time()
        for pid in (*pids, run.process.pid):
            os.kill(pid, number)
        out = run.finish(timeout=100)
        assert run.code == 130, out
        assert "Traceback" not in out
        assert time.monotonic() - began < within
        assert not run.processes()
        lines = [line for kind in ("cold_start", "rl") for line in run.lines("metrics.jsonl", kind)]
        late = [line for line in lines if "loss" in line and line["time"] > signalled]
        assert len(late) <= 2, "the step that ran when the signal came, and one if it came between two"
        return out

    def trained(self, run: Run, kind: str = "rl") -> int:
        return max((line["step"] for line in run.lines("metrics.jsonl", kind)), default=0)

    def saved(self, inner: str = "") -> int:
        found = (self.folder / "checkpoint" / inner).glob("step-*/.metadata")
        return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)


def test_no_signal_in_no_phase_loses_a_step(
    runs: Runs, whole: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, shared = tmp_path / "orders", shared_memory()
    orders.mkdir()
    monkeypatch.setenv(FOLDER, str(orders))
    stops = Stops(runs, tmp_path / "run", orders)

    run = stops.start()  # start-up
    stops.until(run, (run.folder / ANNOUNCEMENT).exists)
    assert "the same command starts over" in stops.stop(run, signal.SIGHUP, everyone=True)

    stops.hold(TRAINER, "step", FaultOrder("wait", 2))  # cold start: the step is finished
    run = stops.start()
    stops.held(run, TRAINER, "step")
    out = stops.stop(run, signal.SIGTERM, everyone=True)
    assert "the same command resumes from cold start step 1" in out
    assert stops.saved("cold_start") == stops.trained(run, "cold_start") == 1

    stops.hold(TRAINER, "save", FaultOrder("wait", 2))  # the save at its end
    run = stops.start()
    stops.held(run, TRAINER, "save")
    stops.stop(run, signal.SIGINT, everyone=False)
    assert stops.saved("cold_start") == stops.trained(run, "cold_start") == WHOLE["cold_start__steps"]

    stops.hold(TRAINER, "step", FaultOrder("wait", 0.5, keep=True))  # generation: it is given up
    run = stops.start(eval__interval=1000, fault__stop_grace_seconds=4)
    run.wait_for_step(2)
    stops.hold(GENERATOR, "step", FOR_EVER)
    stops.held(run, GENERATOR, "step")
    (orders / f"{TRAINER} step").unlink()
    out = stops.stop(run, signal.SIGTERM, everyone=True)
    assert (reached := stops.trained(run)) >= 2
    assert stops.saved() == reached
    assert f"the same command resumes from RL step {reached}" in out

    stops.hold(TRAINER, "step", FaultOrder("wait", 2))  # training
    run = stops.start()
    stops.held(run, TRAINER, "step")
    stops.stop(run, signal.SIGINT, everyone=True)
    assert stops.saved() == stops.trained(run) == reached + 1

    stops.hold(TRAINER, "step", FaultOrder("wait", 2))  # evaluation: it is cut short, and made up for
    run = stops.start(eval__interval=1, fault__stop_grace_seconds=4)
    stops.held(run, TRAINER, "step")
    stops.hold(GENERATOR, "step", FOR_EVER)
    stops.held(run, GENERATOR, "step")
    stops.stop(run, signal.SIGHUP, everyone=False)
    assert stops.saved() == stops.trained(run) == reached + 2
    assert "eval/score" not in run.lines("metrics.jsonl")[-1]

    run = stops.start()
    out = run.finish()
    assert run.code == 0, out
    assert [line["step"] for line in run.lines("metrics.jsonl", "eval")] == [0, reached + 2]
    for kind in ("cold_start", "rl"):
        assert losses(run, kind) == losses(whole, kind)
    assert sampled(run) == sampled(whole)
    assert audit(run.folder)[0] == []
    assert shared_memory() <= shared
