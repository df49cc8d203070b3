"""A Slurm cluster on this machine, for the test that asks for it."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("fake_slurm_program.py")
NAMES = ("sbatch", "squeue", "scontrol", "scancel", "srun")


class FakeSlurm:
    """Puts the programs on PATH. Jobs start at once, unless `busy()` was called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "cluster"
        programs = folder / "slurm"
        self.folder.mkdir()
        programs.mkdir()
        for name in NAMES:
            (programs / name).write_text(f'#!/bin/bash\nAS={name} exec {sys.executable} -S {PROGRAM} "$@"\n')
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("FAKE_SLURM", str(self.folder))
        self.free()

    def free(self) -> None:
        (self.folder / "free").touch()

    def busy(self) -> None:
        (self.folder / "free").unlink()

    def restarted(self, times: int) -> None:
        """Submit later jobs as if they had been requeued so often before."""
        (self.folder / "restarts").write_text(str(times))

    def jobs(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob("*/state.json"))

    def job(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name / "state.json").read_text())

    def steps(self, name: str) -> list[str]:
        """Return the arguments of each srun of a job, one per line."""
        steps = (self.folder / name / "steps").glob("*/arguments")
        return [path.read_text() for path in sorted(steps, key=lambda path: int(path.parent.name))]

    def warn_before_the_limit(self, name: str) -> None:
        """Send what --signal=B:USR1@... asks for: a signal to the script only."""
        os.kill(self.job(name)["batch"], signal.SIGUSR1)

    def end(self) -> None:
        for name in self.jobs():
            facts = self.job(name)
            groups = [int(p.name) for p in (self.folder / name / "steps").glob("*/*") if p.name.isdecimal()]
            for group in (facts.get("daemon"), facts.get("batch"), *groups):
                with suppress(ProcessLookupError):
                    if group:
                        os.killpg(group, signal.SIGKILL)


def wait_until(happened: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)
