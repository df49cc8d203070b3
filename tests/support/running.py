"""Start real runs in real processes, as a user does."""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.ctrl_c import hears_ctrl_c
from support.rank_launchers import launched
from titan_rl.record.lines import whole_lines

SMALL = {  # a run of seconds: two trainer ranks, one generator, an easy start
    "model.dim": 64,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.n_kv_heads": 2,
    "model.hidden_dim": 128,
    "cold_start.steps": 8,
    "cold_start.stop_at": 0,
    "rollout.groups_per_step": 4,
    "rollout.group_size": 4,
    "algorithm.kl_coef": 0.01,  # a frozen reference, which resuming must bring back
    "training.steps": 4,
    "hosts.threads": 1,  # other tests run at the same time
    "checkpoint.interval": 2,
    "eval.size": 16,
    "eval.interval": 2,
}
WHOLE: dict[str, Any] = {  # the run that the fixture `whole` starts once for all tests, so that they resume it
    "cold_start__steps": 40,  # time enough to interrupt it
    "training__steps": 8,
    "record__batches": 4,
}


@dataclass
class RunFiles:
    """The files of a run, in its dump folder."""

    folder: Path

    def lines(self, name: str, kind: str = "rl") -> list[dict[str, Any]]:
        return [line for line in self.written(name) if line["kind"] == kind]

    def written(self, name: str) -> list[dict[str, Any]]:
        """Return a file's lines, but for one that the run is writing."""
        path = self.folder / name
        return [json.loads(line) for line in whole_lines(path)] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())


@dataclass
class Run(RunFiles):
    """A process that runs `python -m titan_rl.run`."""

    process: subprocess.Popen[str]

    def finish(self, timeout: float = 500) -> str:
        out, _ = self.process.communicate(timeout=timeout)
        return out

    @property
    def code(self) -> int | None:
        return self.process.returncode

    def wait_for_step(self, step: int, kind: str = "rl", timeout: float = 240) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            if any(line["step"] >= step for line in self.lines("metrics.jsonl", kind)):
                return
            time.sleep(0.05)
        raise AssertionError(
            f"no {kind} step {step} within {timeout:g} s:\n{self.finish(5) if self.process.poll() else ''}"
        )

    def maps(self, library: str) -> bool:
        """Return True if the controller, which is still alive, has mapped a library of this name."""
        return library in Path(f"/proc/{self.process.pid}/maps").read_text()

    def workers(self) -> dict[str, int]:
        """Return the ranks' processes, by name."""
        return {name: pid for _, name, pid in launched(self._started()) if command_of(pid) is not None}

    def processes(self) -> list[tuple[int, str, str]]:
        """Return this run's live processes besides the controller and launchers: pid, rank name, command line."""
        started = self._started()
        named = {process.pid: process.info["environ"].get("TITAN_RL_PROC", "") for process in started}
        named |= {pid: name for _, name, pid in launched(started)}
        commands = ((pid, name, command_of(pid)) for pid, name in named.items() if name)
        return [(pid, name, command) for pid, name, command in commands if command is not None]

    def _started(self) -> list[Any]:
        """Return the processes that were started with this run's environment: all but forked ranks."""
        found = [each for each in psutil.process_iter(["environ"]) if each.info["environ"]]  # None: not readable
        return [each for each in found if each.info["environ"].get("TITAN_RL_TEST_RUN") == str(self.folder)]


def command_of(pid: int) -> str | None:
    """Return the command line of a process that lives; None: it has ended."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return " ".join(process.cmdline())
    return None


class Runs:
    """Starts runs. The fixture kills the runs that are still alive after the tests of a file."""

    def __init__(self, within: Sequence[str] = ()) -> None:
        """`within`: a command that runs what follows it somewhere else."""
        self.started: list[Run] = []
        self._within = within

    def start(self, folder: Path, config: str = "grpo_llama", small: bool = True, **overrides: object) -> Run:
        """Start a run. Overrides have a double underscore for the dot: training__steps=3."""
        keys = dict(SMALL) if small else {}
        keys |= {key.replace("__", "."): value for key, value in overrides.items()}
        flags = [
            part
            for key, value in keys.items()
            for part in (f"--{key}", (str(value).lower() if isinstance(value, bool) else str(value)))
        ]
        command = [sys.executable, "-m", "titan_rl.run"]
        process = subprocess.Popen(
            [*self._within, *command, "--config", config, "--job.dump_folder", str(folder), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TITAN_RL_TEST_RUN": str(folder), "PYTHONPATH": str(Path(__file__).parent)},
            preexec_fn=hears_ctrl_c,
        )
        self.started.append(Run(folder, process))
        return self.started[-1]

    def finish(self, folder: Path, config: str = "grpo_llama", small: bool = True, **overrides: object) -> Run:
        run = self.start(folder, config, small, **overrides)
        out = run.finish()
        assert run.code == 0, out
        return run

    def end(self) -> None:
        """Kill the runs that a test which failed has left."""
        for run in self.started:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()


def finished_once(folders: Path, name: str, *arguments: Any, **overrides: Any) -> RunFiles:
    """Return the files of a run that one of pytest's processes finishes, and all of them read."""
    found, runs = RunFiles(folders / name), Runs()
    with open(folders / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (found.folder / "summary.json").exists():
            try:
                runs.finish(found.folder, *arguments, **overrides)
            finally:
                runs.end()
    return found


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder of this call of pytest, whose processes may be several."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
