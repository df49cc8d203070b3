"""The run's side of its trackers: a bounded queue and two threads for each process.

Nothing here waits for a tracker while the run trains. What a tracker does not take is counted and named, and
metrics.jsonl has it.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from titan_rl.config.plain_files import text_of
from titan_rl.config.sections import Config
from titan_rl.ext.trackers.messages import SERVICES, Begin, Service, grouped, public_config
from titan_rl.isolation import outside
from titan_rl.record.curves import edges_of
from titan_rl.record.lines import write_whole
from titan_rl.record.sinks import Axis, Event, State, Warn

IDS = "trackers.json"
"""File in the dump folder with the ids of its runs in the trackers."""
LOGS = "trackers"
"""Folder with what the trackers' processes print."""

MOST_WAITING = 1000  # messages; later ones are dropped
LATE_SECONDS = 60.0  # without an answer, until the run warns
EXIT_SECONDS = 2.0  # for a process that has sent everything
FLUSH_SECONDS = {"finished": 30.0, "stopped": 8.0, "failed": 8.0}  # at the end, for what waits

Begun = Callable[[Service, str], None]


class TrackerProcess:
    """Sends messages to the process of one tracker, which starts now."""

    def __init__(self, service: Service, begin: Begin, warn: Warn, begun: Begun) -> None:
        self.service: Service = service
        self.where, self.dropped = "", 0
        self._folder, self._warn, self._begun = Path(begin.folder), warn, begun
        self._queue = SimpleQueue[bytes | None]()
        self._sent = self._answered = 0
        self._last_answer = time.monotonic()
        self._ended, self._finishing, self._warned = threading.Event(), False, set[str]()
        self._process: subprocess.Popen[bytes] | None = None
        self._put("begin", asdict(begin))
        threading.Thread(target=self._run, name=f"tracker {service}", daemon=True).start()

    def send(self, name: str, *arguments: Any) -> None:
        """Send a message soon, or drop it."""
        if self._ended.is_set() or self._finishing:
            self.dropped += self._ended.is_set()
            return
        if (waiting := self._sent - self._answered) >= MOST_WAITING:
            self.dropped += 1
            self._warn_once("full", f"does not keep up: {waiting} messages wait, and later ones are dropped")
            return
        if waiting and (silent := time.monotonic() - self._last_answer) > LATE_SECONDS:
            self._warn_once("late", f"has not answered for {silent:.0f} s; the run continues, and its points wait")
        self._put(name, *arguments)

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        """Send the end of the run; only the first call counts."""
        if not self._finishing:
            self._finishing = True
            self._put("finish", state, summary)
            self._queue.put(None)

    @property
    def ended(self) -> bool:
        """Return whether nothing is left to wait for."""
        idle = self._answered == self._sent and time.monotonic() - self._last_answer > EXIT_SECONDS
        return self._ended.is_set() or (self._finishing and idle)

    def kill(self) -> None:
        """Kill the process if it has not ended, and warn of messages that were not sent."""
        if unsent := 0 if self._ended.is_set() else self._sent - self._answered:
            self._warn_once("killed", f"did not finish in time: {unsent} messages were not sent")
        if not self._ended.is_set() and self._process is not None:
            self._warned.add("killed")  # its end is no news
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self.dropped:
            self._warn_once("dropped", f"has {self.dropped} points less than metrics.jsonl")

    def _put(self, name: str, *arguments: Any) -> None:
        if self._sent == self._answered:
            self._last_answer = time.monotonic()
        self._sent += 1
        self._queue.put(json.dumps([name, arguments], default=float).encode() + b"\n")

    def _run(self) -> None:
        try:
            replies, own_end = os.pipe()
            with open(replies, "rb") as answers:
                try:
                    self._process = process = outside(lambda: self._start(own_end))
                finally:
                    os.close(own_end)
                threading.Thread(target=self._write, args=(process,), daemon=True).start()
                for line in answers:
                    self._take(json.loads(line))
            process.wait()
            if not self._finishing or self._answered < self._sent:
                self._warn_once("ended", f"has ended with status {process.returncode}")
        except OSError as error:
            self._warn_once("ended", f"cannot be started: {error}")
        self._ended.set()

    def _start(self, replies: int) -> subprocess.Popen[bytes]:
        (self._folder / LOGS).mkdir(exist_ok=True)
        with open(self._folder / LOGS / f"{self.service}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "titan_rl.ext.trackers", self.service, str(replies)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[replies],
                process_group=0,  # Ctrl-C in the terminal reaches the run only; in one session "nice" counts
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with suppress(OSError), process.stdin:  # the reader of its answers names its end
            while (message := self._queue.get()) is not None:
                process.stdin.write(message)
                process.stdin.flush()

    def _take(self, answer: Mapping[str, Any]) -> None:
        self._last_answer = time.monotonic()
        if begun := answer.get("begun"):
            self.where = begun["where"]
            self._begun(self.service, begun["id"])
            return
        self._answered += 1
        if error := answer.get("error"):
            self._warn_once("error" if answer["done"] != "begin" else "ended", error)

    def _warn_once(self, about: str, text: str) -> None:
        if not self._warned & {about, "ended", "killed"}:
            self._warned.add(about)
            log = self._folder / LOGS / f"{self.service}.log"
            self._warn(f"{self.service}: {text}. metrics.jsonl has every point; its output is in {log}")


class Trackers:
    """All trackers of a run. They continue the runs of the dump folder's earlier processes, unless it starts over."""

    def __init__(self, folder: Path, config_name: str, config: Config, *, resumed: bool, warn: Warn) -> None:
        self._folder, self._warn = folder, warn
        self._file = threading.Lock()
        self._state: State | None = None
        known = read_ids(folder) if resumed else {}
        self._attempt = known.get("attempt", 0) + 1
        services: list[Service] = [name for name in SERVICES if name in config.metrics.trackers]
        self._ids = {**known, "attempt": self._attempt}
        metrics = config.metrics
        begin = Begin(
            project=metrics.project,
            name=metrics.run_name or folder.absolute().name,
            group=config_name,
            tags=metrics.tags,
            config=public_config(config) if services else {},
            folder=str(folder.absolute()),
            attempt=self._attempt,
        )
        if services:
            folder.mkdir(parents=True, exist_ok=True)
        self._processes = [
            TrackerProcess(each, replace(begin, id=known.get(each, "")), warn, self._save) for each in services
        ]

    def log(
        self,
        axis: Axis,
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        if self._processes:
            drawn = {tag: (counts, edges_of(tag, counts)) for tag, counts in histograms.items()}
            self._send("log", axis, step, grouped(scalars), drawn)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        self._send("samples", step, rows)

    def event(self, event: Event, text: str) -> None:
        """Ignore it: these services have no place for events."""

    def rewind(self) -> None:
        """Count another attempt: steps are repeated from now on."""
        self._attempt += 1
        self._send("attempt", self._attempt)
        if self._processes:
            self._save(None, "")

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        """Send the state in which the run ends; only the first call counts."""
        self._state = self._state or state
        for each in self._processes:
            each.finish(state, summary)

    @property
    def hints(self) -> list[str]:
        """Where to look at the run."""
        return [each.where for each in self._processes if each.where]

    async def close(self, state: State) -> None:
        """Wait until all points are sent, but not for long. Processes that have not ended by then are killed."""
        self.finish(state, {})
        deadline = time.monotonic() + FLUSH_SECONDS[self._state or state]
        try:
            while time.monotonic() < deadline and not all(each.ended for each in self._processes):
                await asyncio.sleep(0.02)
        finally:
            for each in self._processes:
                each.kill()

    def _send(self, name: str, *arguments: Any) -> None:
        for each in self._processes:
            each.send(name, *arguments)

    def _save(self, service: Service | None, id: str) -> None:
        with self._file:
            self._ids |= {"attempt": self._attempt, **({service: id} if service else {})}
            try:
                write_whole(self._folder / IDS, json.dumps(self._ids, indent=2) + "\n")
            except OSError as error:
                self._warn(
                    f"{self._folder / IDS} cannot be written: {error}; a resumed run begins anew in its trackers"
                )


def read_ids(folder: Path) -> dict[str, Any]:
    """Return the ids of a folder's runs by tracker, and how often it has begun."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(text_of(folder / IDS))
        if isinstance(found, dict) and isinstance(found.get("attempt", 0), int):
            return found
    return {}


@asynccontextmanager
async def tracking(
    folder: Path, config_name: str, config: Config, *, resumed: bool, warn: Warn
) -> AsyncIterator[Trackers]:
    """Start the trackers of a run, and end them with the state in which it ends."""
    trackers = Trackers(folder, config_name, config, resumed=resumed, warn=warn)
    state: State = "failed"
    try:
        yield trackers
        state = "finished"
    except asyncio.CancelledError:
        state = "stopped"
        raise
    finally:
        await trackers.close(state)
