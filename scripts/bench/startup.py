"""Whole runs, timed from outside: command to first RL step, recovery of a killed rank, Ctrl-C to exit."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from bench.rows import CONFIG
from titan_rl.ext.control.client import Endpoint
from titan_rl.ext.fork_servers.fork_servers import OFF, VARIABLE, ask
from titan_rl.meshes.starter import KINDS

WAYS = {"forked": {}, "cold": {VARIABLE: OFF}}
WARM = "warm"  # forked from processes that titan_rl.tools.warm keeps
KEYS = {  # a run of seconds: two trainer ranks, one generator
    "model.dim": 64,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.n_kv_heads": 2,
    "model.hidden_dim": 128,
    "cold_start.steps": 1,
    "cold_start.stop_at": 0,
    "rollout.groups_per_step": 4,
    "rollout.group_size": 4,
    "training.steps": 1_000_000,
    "checkpoint.interval": 1_000_000,
    "eval.size": 0,
    "algorithm.max_dead_steps": 0,
    "fault.snapshot_interval": 2,
}
VICTIMS = ("trainer[dp=1 tp=0]", "generator0[tp=0]")
POLL_SECONDS, PATIENCE_SECONDS = 0.01, 300.0


class Timed:
    """A run, the seconds that its parts take, and the CPU seconds of all of its processes."""

    def __init__(self, root: Path, folder: Path, environment: dict[str, str]) -> None:
        flags = [part for key, value in KEYS.items() for part in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "titan_rl.run", "--config", CONFIG, "--job.dump_folder", str(folder), *flags]
        env = {name: value for name, value in os.environ.items() if name != VARIABLE}
        self.folder, self.began = folder, time.monotonic()
        with (folder.parent / "out").open("w") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=root,
                env={**env, "PYTHONPATH": str(root), **environment},
            )

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"expected a run that continues:\n{(self.folder.parent / 'out').read_text()}")
            time.sleep(POLL_SECONDS)

    def has_stepped(self) -> bool:
        return any(line["kind"] == "rl" for line in self._lines("metrics.jsonl"))

    def recover(self, victim: str) -> float:
        """Kill a rank. Return the seconds until the run reports that it is back."""
        status = Endpoint.find(self.folder).ask("status", {}, PATIENCE_SECONDS)
        (pid,) = [rank["pid"] for rank in status["ranks"] if rank["rank"] == victim]
        before, began = self._back(), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: self._back() > before)
        return time.monotonic() - began

    def interrupt(self) -> float:
        began = time.monotonic()
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE_SECONDS)
        return time.monotonic() - began

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def memory(self) -> float:
        """Return the memory of all processes in MB; what several share is counted once."""
        total = 0
        for process in self._family():
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total / 1e6

    def _family(self) -> list[psutil.Process]:
        return family(self._process.pid)

    def _back(self) -> int:
        return sum(line["outcome"] == "back" for line in self._lines("faults.jsonl"))

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all that descend from it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants so far, ended children included."""
    total = 0.0
    for process in family(pid):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


@contextmanager
def kept_warm(root: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of runs while `titan_rl.tools.warm` keeps their engines imported."""
    command = [sys.executable, "-m", "titan_rl.tools.warm"]
    env = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"PYTHONPATH": str(root)}
    with subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True) as warm:
        assert warm.stdout is not None
        folder = warm.stdout.readline().strip().partition("=")[2]
        for kind in KINDS:
            asyncio.run(ask(Path(folder) / kind))
        try:
            yield {VARIABLE: folder}
        finally:
            warm.send_signal(signal.SIGINT)


def timed_run(root: Path, environment: dict[str, str], *, recovers: bool = True) -> dict[str, float]:
    """Start a run in the checkout `root`, kill a trainer and a generator, and interrupt it."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        run = Timed(root, Path(folder) / "run", environment)
        try:
            run.until(run.has_stepped)
            found["command to first RL step, s"] = time.monotonic() - run.began
            found["command to first RL step, CPU s"] = run.cpu_seconds()
            found["memory of the run, MB"] = run.memory()
            for victim in VICTIMS if recovers else ():  # ranks of titan_rl.tools.warm are no children of the run
                time.sleep(1)  # a snapshot is complete
                cpu, name = run.cpu_seconds(), victim.partition("[")[0].rstrip("0")
                found[f"killed {name} to back, s"] = run.recover(victim)
                found[f"killed {name} to back, CPU s"] = run.cpu_seconds() - cpu
            time.sleep(1)
            found["Ctrl-C to exit, s"] = run.interrupt()
        finally:
            run.end()
    return found
