"""A run under chaos, observed from outside: steps and ranks (its socket), incidents (faults.jsonl) and output (stdout).

Every wait is bounded: `until` gives up if the run has made no new step for `patience` seconds. Repeated steps do not
count as progress, and neither does one repair after another.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from titan_rl.ext.control.client import Endpoint, RequestFailed
from titan_rl.record.incidents import Incident
from titan_rl.record.lines import whole_lines
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.wire import failpoints

POLL_SECONDS = 0.03
ASK_SECONDS = 5.0
END_SECONDS = 10.0  # for the run's processes to end after its controller
UP = ("up", "serving")
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class RunEnded(Exception):
    """The run ended during a wait."""


class RunStuck(Exception):
    """The run made no progress for too long. The text names the awaited condition."""


class Hit(NamedTuple):
    """A line of the hits file: a failpoint that carried out its order."""

    rank: str
    point: str
    do: str
    time: float


class OutputLine(NamedTuple):
    time: float
    text: str


class ChaosRun:
    """A process with `python -m titan_rl.run`, whose failpoints are armed by the folder `orders`."""

    def __init__(self, argv: Sequence[str], folder: Path, orders: Path, patience: float) -> None:
        self.folder, self.orders, self.patience = folder, orders, patience
        self.log = orders / "run.log"
        self.command = [sys.executable, "-m", "titan_rl.run", *argv]
        self.pids: list[int] = []  # every controller so far
        self.process = self._start(self.command)
        self.began = time.time()  # start of the last controller
        self.killed = False  # by this process, because the run did not end
        self.status: dict[str, Any] = {}
        self.incidents: list[Incident] = []
        self.hits: list[Hit] = []
        self.output: list[OutputLine] = []
        self.ranks: dict[str, int] = {}  # process of each rank that is up
        self.highest = 0  # highest step of the algorithm that was ever started
        self._known: set[str] = set()  # ranks that were ever up
        self._moved = time.monotonic()
        self._read: dict[Path, int] = {}
        self._endpoint: Endpoint | None = None

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("a"),
            stderr=subprocess.STDOUT,
            env={**os.environ, failpoints.FOLDER: str(self.orders), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C goes to this process only
        )
        self.pids.append(process.pid)
        return process

    def start_again(self) -> None:
        """Start the same command after its process has ended; it resumes."""
        self.status, self.ranks, self._endpoint, self.began = {}, {}, None, time.time()
        self._known.clear()
        self.process = self._start([*self.command, "--job.fresh=false"])

    def socket_folders(self) -> list[Path]:
        base = Path(tempfile.gettempdir())
        return [folder for pid in self.pids for folder in base.glob(f"titan_rl-{pid}-*")]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def step(self) -> int:
        """Current step of the algorithm; 0 before its first one and while lost processes are being replaced."""
        run = self.status.get("run", {})
        return run["step"] if run.get("state") == "training" and run.get("phase") == "rl" else 0

    @property
    def saved(self) -> int:
        return self.status.get("run", {}).get("saved") or 0

    @property
    def healthy(self) -> bool:
        """Whether no incident is open and every known rank is up."""
        return self.step > 0 and not self.open_incidents and self._known <= self.ranks.keys()

    @property
    def open_incidents(self) -> list[Incident]:
        """Return those without an outcome. What happened to a controller that has ended has none."""
        return [incident for incident in self.incidents if incident.open and incident.time >= self.began]

    @property
    def _progress(self) -> tuple[int, int]:
        """What must change within `patience` seconds: the highest step, or before the first step the output."""
        return self.highest, 0 if self.highest else len(self.output)

    async def until(self, what: str, condition: Callable[[], Any]) -> float:
        """Block until `condition` holds, and return the time. Raise RunEnded or RunStuck if it never does."""
        self._moved = time.monotonic()
        while not condition():
            if self.ended:
                raise RunEnded
            if time.monotonic() - self._moved > self.patience:
                raise RunStuck(f"waited for {what}: the run made no progress for {self.patience:g} s")
            await asyncio.sleep(POLL_SECONDS)
        return time.time()

    async def follow(self) -> None:
        while True:
            before = self._progress
            if not self.ended:
                await self._ask_status()
            self.read_files()
            if before != self._progress:
                self._moved = time.monotonic()
            await asyncio.sleep(POLL_SECONDS)

    def read_files(self) -> None:
        """Read what the run has written since the last call."""
        self.hits += [Hit(**json.loads(line)) for line in self._lines(self.orders / failpoints.HITS)]
        self.output += [OutputLine(time.time(), line.rstrip()) for line in self._lines(self.log)]
        known = {(incident.role, incident.time): incident for incident in self.incidents}
        for incident in RunFiles(self.folder).faults() if self.status else ():
            known[incident.role, incident.time] = incident
        self.incidents = list(known.values())

    async def _ask_status(self) -> None:
        try:
            endpoint = self._endpoint or Endpoint.find(self.folder)
            if endpoint.pid != self.process.pid:  # an older run's socket
                return
            self._endpoint = endpoint
            self.status = await asyncio.to_thread(endpoint.ask, "status", {}, ASK_SECONDS)
        except (RequestFailed, OSError):  # the run is starting, or its event loop is busy, or it just ended
            return
        self.ranks = {rank["rank"]: rank["pid"] for rank in self.status["ranks"] if rank["state"] in UP}
        self._known |= self.ranks.keys()
        self.highest = max(self.highest, self.step)

    def _lines(self, path: Path) -> Iterator[str]:
        """Yield the whole lines of a file that were not read yet."""
        with suppress(FileNotFoundError):
            for line in whole_lines(path, start=self._read.get(path, 0)):
                self._read[path] = self._read.get(path, 0) + len(line)
                yield line.decode(errors="replace")

    def processes(self) -> dict[int, str]:
        """Return the run's live processes, each with the name of the rank that it is or belongs to."""
        live, forked = (
            dict[int, str](),
            {pid: rank for rank, pid in self.ranks.items()},
        )  # forks look like their parent
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it just ended, or belongs to another user
                environment, rank = process.environ(), forked.get(process.pid, "")
                if (rank or environment.get(failpoints.FOLDER) == str(self.orders)) and process.status() not in ENDED:
                    live[process.pid] = rank or environment.get("TITAN_RL_PROC", "the controller")
        return live

    def end(self) -> dict[int, str]:
        """Kill the rest of the run, and return the processes that outlived its controller by END_SECONDS."""
        deadline = time.monotonic() + END_SECONDS
        if not self.ended:
            self.killed = True
            self.process.kill()
        self.process.wait()
        if self.killed:
            for folder in self.socket_folders():
                shutil.rmtree(folder, ignore_errors=True)
        while (outlived := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in outlived:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return outlived
