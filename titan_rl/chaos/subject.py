"""A run under chaos, seen from outside: its steps and ranks (its socket), incidents (faults.jsonl) and words (stdout).

Every wait is bounded: `until` gives up once the run has not come a step further for `patience` seconds. Steps that it
makes again do not count, nor does a repair that follows a repair.
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

from titan_rl.control.client import Endpoint, Failed
from titan_rl.record import incidents
from titan_rl.wire import failpoints

POLL_SECONDS = 0.03
ASK_SECONDS = 5.0
END_SECONDS = 10.0  # for what is left of a run to end
UP = ("up", "serving")


class Over(Exception):
    """The run ended while something was waited for."""


class Stuck(Exception):
    """The run came no further for too long; str() says what was waited for."""


class FaultLine(NamedTuple):
    who: str
    why: str
    time: float
    outcome: str
    seconds: float
    redone: int

    @property
    def open(self) -> bool:
        return not self.outcome

    @property
    def end(self) -> float:
        return self.time + self.seconds


class Hit(NamedTuple):
    """A failpoint that obeyed its order."""

    rank: str
    point: str
    do: str
    time: float


class Words(NamedTuple):
    time: float
    text: str


class ChaosRun:
    """`python -m titan_rl.run` in a process of its own, whose failpoints are armed by `orders`, a folder."""

    def __init__(self, argv: Sequence[str], folder: Path, orders: Path, patience: float) -> None:
        self.folder, self.orders, self.patience = folder, orders, patience
        self.log = orders / "run.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "titan_rl.run", *argv],
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            env={**os.environ, failpoints.FOLDER: str(orders), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # a Ctrl-C is ours to deal with
        )
        self.sockets = Path(tempfile.gettempdir(), f"titan_rl-{self.process.pid}")
        self.killed = False  # by us: it would not end
        self.status: dict[str, Any] = {}
        self.incidents: list[FaultLine] = []
        self.hits: list[Hit] = []
        self.words: list[Words] = []
        self.ranks: dict[str, int] = {}  # up, and their processes
        self.top = 0  # the highest step of the algorithm that was ever begun
        self._every: set[str] = set()  # ranks that ever were up
        self._moved = time.monotonic()
        self._read: dict[Path, int] = {}
        self._endpoint: Endpoint | None = None

    # -- what there is to see ---------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    @property
    def step(self) -> int:
        """Of the algorithm: 0 before it, and while what was lost is being replaced."""
        run = self.status.get("run", {})
        return run["step"] if run.get("state") == "training" and run.get("phase") == "rl" else 0

    @property
    def saved(self) -> int:
        return self.status.get("run", {}).get("saved") or 0

    @property
    def whole(self) -> bool:
        """Nothing is under repair, and everybody is up."""
        return self.step > 0 and not any(i.open for i in self.incidents) and self._every <= self.ranks.keys()

    @property
    def _progress(self) -> tuple[int, int]:
        """Until the first step it is what it says."""
        return self.top, 0 if self.top else len(self.words)

    # -- waiting ----------------------------------------------------------------------------------------------

    async def until(self, what: str, condition: Callable[[], Any]) -> float:
        """The time at which `condition` held first."""
        self._moved = time.monotonic()
        while not condition():
            if self.over:
                raise Over
            if time.monotonic() - self._moved > self.patience:
                raise Stuck(f"waited for {what}: the run came no further for {self.patience:g} s")
            await asyncio.sleep(POLL_SECONDS)
        return time.time()

    async def follow(self) -> None:
        """Keep looking, until the run is over."""
        while not self.over:
            before = self._progress
            await self._ask()
            self.look()
            if before != self._progress:
                self._moved = time.monotonic()
            await asyncio.sleep(POLL_SECONDS)
        self.look()

    def look(self) -> None:
        """What it has written since."""
        for line in self._lines(self.orders / failpoints.HITS):
            self.hits.append(Hit(**json.loads(line)))
        self.words += [Words(time.time(), line.rstrip()) for line in self._lines(self.log)]
        for line in self._lines(self.folder / incidents.NAME) if self.status else ():
            fields = json.loads(line)
            found = FaultLine(*(fields[name] for name in FaultLine._fields))
            begun = [i for i, old in enumerate(self.incidents) if (old.who, old.time) == (found.who, found.time)]
            if begun:
                self.incidents[begun[0]] = found
            else:
                self.incidents.append(found)

    async def _ask(self) -> None:
        try:
            if self._endpoint is None:
                self._endpoint = Endpoint.find(self.folder)
                if self._endpoint.pid != self.process.pid:  # an older run's
                    self._endpoint = None
                    return
            self.status = await asyncio.to_thread(self._endpoint.ask, "status", {}, ASK_SECONDS)
        except (Failed, OSError):  # it is starting, or its event loop is busy, or it just ended
            return
        self.ranks = {rank["rank"]: rank["pid"] for rank in self.status["ranks"] if rank["state"] in UP}
        self._every |= self.ranks.keys()
        self.top = max(self.top, self.step)

    def _lines(self, path: Path) -> Iterator[str]:
        """Whole ones that were not read yet."""
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            for line in file:
                if line.endswith(b"\n"):
                    self._read[path] = self._read.get(path, 0) + len(line)
                    yield line.decode(errors="replace")

    # -- its end ----------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """All that live of it, with the ranks that they are or belong to."""
        marker, found = f"{failpoints.FOLDER}={self.orders}", dict[int, str]()
        for entry in Path("/proc").iterdir():
            try:
                environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:  # no process, or gone, or another user's
                continue
            if marker in environment and state not in "ZX":
                names = [pair.partition("=")[2] for pair in environment if pair.startswith("TITAN_RL_PROC=")]
                found[int(entry.name)] = (names or ["the controller"])[0]
        return found

    def end(self) -> dict[int, str]:
        """Kill what is left of it; answers with what outlived its controller for longer than it may."""
        deadline = time.monotonic() + END_SECONDS
        if not self.over:
            self.killed = True
            self.process.kill()
        self.process.wait()
        if self.killed:
            shutil.rmtree(self.sockets, ignore_errors=True)
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left
