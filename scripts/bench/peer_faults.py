"""Kills one process of a run with SIGKILL, and gives the same command again if the run does not finish."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.peer_runs import OURS, Launch, Step, launch, peer_trace, steps_of, temporary, with_env, write_assets
from bench.peer_shapes import SHAPES
from titan_rl.ext.control.client import Endpoint
from titan_rl.wire.counted import counted

VICTIMS = ("trainer", "generator", "controller")
STEPS, SAVE_EVERY, KILL_AFTER = 10, 4, 6
START_SECONDS, HANG_SECONDS, LEFT_SECONDS, ASK_SECONDS = 600.0, 120.0, 10.0, 60.0
POLL_SECONDS = 0.02
MARK, DRAWS = "PEER_MARK", "PEER_DRAWS"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run after a kill."""

    finished: bool
    commands: int  # 1: the run continued by itself
    hung: bool  # it neither ended nor took a step for HANG_SECONDS
    seconds: float  # from the kill to the end of the next step; a hang is not counted
    again: int  # steps that had ended before the kill, and were taken again
    repeated: int  # prompts that steps of the final history share
    lost: int  # prompts that no step of the final history has, although it has later ones
    left: int  # processes that live LEFT_SECONDS after the command has ended by itself

    def text(self) -> str:
        left = f", processes left: {self.left}" * bool(self.left)
        if not self.finished:
            return "the run does not finish" + left
        how = "by itself" if self.commands == 1 else "hangs, same command again" if self.hung else "same command again"
        again, repeated = counted(self.again, "step"), counted(self.repeated, "prompt")
        return f"{how}: {again} again, {repeated} repeated, {self.lost} lost{left}"


def survive(way: str, victim: str, name: str, checkout: Path) -> Outcome:
    """Kill `victim` after KILL_AFTER steps of STEPS."""
    with temporary() as folder:
        trial = Trial(way, name, Path(folder), checkout)
        try:
            return trial.run(victim)
        finally:
            trial.kill_all()


class Trial:
    def __init__(self, way: str, name: str, folder: Path, checkout: Path) -> None:
        self._way, self._folder, self._groups = way, folder, SHAPES[name].groups
        self._dump, self._draws, self._mark = folder / "run", folder / "draws", folder.name
        write_assets(folder / "assets", name)
        start = launch(way, name, folder / "assets", self._dump, checkout, STEPS, SAVE_EVERY)
        self._launch: Launch = with_env(start, {MARK: self._mark, DRAWS: str(self._draws)})

    def run(self, victim: str) -> Outcome:
        process = self._begin()
        self._wait(process, lambda: self._last() >= KILL_AFTER, START_SECONDS)
        pid = process.pid if victim == "controller" else self._pid_of(victim)
        os.kill(pid, signal.SIGKILL)
        killed, before, first_draws = time.time(), self._last(), len(self._drawn())
        hung, commands, left, idle = not self._ends(process, HANG_SECONDS), 1, 0, 0.0
        if self._last() < STEPS:
            time.sleep(LEFT_SECONDS)
            left, commands = 0 if hung else len(self._alive()), 2
            self.kill_all()
            first_draws = len(self._drawn())
            idle = time.time() - killed
            process = self._begin()
            self._ends(process, START_SECONDS)
        after = [step for step in self._steps() if step.ended > killed]
        resumed = min((step.step for step in after), default=STEPS + 1)
        history = self._history(first_draws, resumed if commands == 2 else STEPS + 1)
        return Outcome(
            finished=self._last() >= STEPS,
            commands=commands,
            hung=hung,
            seconds=min((step.ended for step in after), default=time.time()) - killed - idle,
            again=max(0, before - resumed + 1),
            repeated=len(history) - len(set(history)),
            lost=max(history, default=-1) + 1 - len(set(history)),
            left=left,
        )

    def kill_all(self) -> None:
        for process in self._alive():
            with suppress(psutil.Error):
                process.kill()

    def _begin(self) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(self._launch.command, env=self._launch.env, stdout=log, stderr=subprocess.STDOUT)

    def _last(self) -> int:
        return max((step.step for step in self._steps()), default=0)

    def _steps(self) -> list[Step]:
        return steps_of(self._way, self._dump)

    def _wait(self, process: subprocess.Popen[bytes], condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"expected a run that continues:\n{(self._folder / 'log').read_text()[-4000:]}")
            time.sleep(POLL_SECONDS)

    def _ends(self, process: subprocess.Popen[bytes], patience: float) -> bool:
        """Wait until a command ends. Return False if it takes no step for `patience` seconds: HANG_SECONDS after its
        first step, or after the kill."""
        steps, began = self._steps(), time.monotonic()
        while process.poll() is None:
            if self._steps() != steps:
                steps, began, patience = self._steps(), time.monotonic(), HANG_SECONDS
            if time.monotonic() - began > patience:
                return False
            time.sleep(50 * POLL_SECONDS)  # each look reads all records
        return True

    def _pid_of(self, victim: str) -> int:
        if self._way != OURS:
            return peer_trace(self._dump, f"rl_{victim}", ["structured_logger"])[-1]["pid"]
        status = Endpoint.find(self._dump).ask("status", {}, ASK_SECONDS)
        return next(rank["pid"] for rank in status["ranks"] if rank["rank"].startswith(victim))

    def _alive(self) -> list[psutil.Process]:
        """Return the processes that have inherited the mark, zombies left out."""
        found = list[psutil.Process]()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _drawn(self) -> list[int]:
        return [int(line) for line in self._draws.read_text().split()] if self._draws.exists() else []

    def _history(self, first_draws: int, resumed: int) -> list[int]:
        """Return the numbers of the prompts of steps 1 to STEPS, of each step as it was taken last."""
        if self._way == OURS:
            lines = (line.partition(" ")[2] for line in (self._dump / "ledger.jsonl").read_text().splitlines())
            trained = {
                event["step"]: event["prompts"] for event in map(json.loads, lines) if event["event"] == "trained"
            }
            return [prompt for prompts in trained.values() for prompt in prompts]
        draws = self._drawn()
        first, second = draws[:first_draws], draws[first_draws:]
        return first[: (resumed - 1) * self._groups] + second[: (STEPS - resumed + 1) * self._groups]
