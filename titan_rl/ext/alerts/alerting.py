"""Calls a command or a webhook with each event of a run, one after the other, by a thread.

    run ── event ──> queue ── thread ──> a process in the host's network: the command, or __main__.py, which posts

A call has a deadline, after which its process group is killed. One that fails is a warning, and the run continues.
"""

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from titan_rl.config.sections import Config
from titan_rl.environment import ALERT
from titan_rl.isolation import outside
from titan_rl.record.sinks import Axis, Event, State, Warn

EVENTS: tuple[str, ...] = ("fault", "warning", "finished", "stopped", "failed")
MOST_WAITING = 100  # calls; later events are dropped
ADDRESSES = ("http://", "https://")


def destination(config: Config) -> str:
    """Return the command or the address of a config."""
    given = config.metrics.alert
    return os.environ.get(ALERT, "").strip() if given == ALERT else given.strip()


def is_address(to: str) -> bool:
    return to.lower().startswith(ADDRESSES)


class RunAlerts:
    """Sends the events of a run that metrics.alert_on names."""

    hints = ()

    def __init__(self, folder: Path, config: Config, warn: Warn) -> None:
        self._metrics, self._warn, self._to = config.metrics, warn, destination(config)
        self._folder = folder.absolute()
        self._name = config.metrics.run_name or self._folder.name
        self._step, self._dropped, self._warned = 0, 0, False
        self._state: State | None = None
        self._queue = SimpleQueue[bytes | None]()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
        self._thread.start()

    def log(
        self, axis: Axis, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None:
        self._step = step

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Ignore them: texts of a run stay in its folder."""

    def event(self, event: Event, text: str) -> None:
        self._send(event, text)

    def rewind(self) -> None:
        """Ignore it: the fault that led to it is an event."""

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        self._state = self._state or state

    async def close(self, state: State, reason: str) -> None:
        """Send the end of the run, and wait for all calls, but not for longer than two take."""
        state = self._state or state
        self._send(state, reason or f"after step {self._step}")
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, 2 * self._metrics.alert_seconds)
        unsent = self._dropped
        if self._thread.is_alive():
            unsent += self._queue.qsize()  # the call in progress, and all that wait but the end
        if unsent:
            self._warn(f"metrics.alert: {unsent} events were not sent")

    def _send(self, event: Event | State, text: str) -> None:
        if event not in self._metrics.alert_on:
            return
        if self._queue.qsize() >= MOST_WAITING:
            self._dropped += 1
            return
        message = {
            "text": f"{self._name}: {event}: {text}",
            "event": event,
            "run": self._name,
            "step": self._step,
            "folder": str(self._folder),
            "host": socket.gethostname(),
            "time": time.time(),
        }
        self._queue.put(json.dumps(message).encode() + b"\n")

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            problem = self._call(message)
            if problem and not self._warned:
                self._warned = True
                self._warn(f"metrics.alert: {problem}; later failures are not shown")

    def _call(self, message: bytes) -> str:
        """Call the command or the webhook. Return why that failed, or ""."""
        posts = is_address(self._to)
        command = [sys.executable, "-m", "titan_rl.ext.alerts"] if posts else shlex.split(self._to)
        environment = {**os.environ, ALERT: self._to} if posts else None
        with tempfile.TemporaryFile() as errors:  # a pipe would stay open as long as any child of the command
            try:
                process = outside(lambda: self._started(command, environment, errors))
            except OSError as error:
                return f"{command[0]} cannot be started: {error.strerror}"
            try:
                process.communicate(message, self._metrics.alert_seconds)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"no end within {self._metrics.alert_seconds:g} s, so that it was killed"
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return "; ".join([f"exit code {process.returncode}", *last]) if process.returncode else ""

    def _started(
        self, command: Sequence[str], environment: Mapping[str, str] | None, errors: IO[bytes]
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            process_group=0,  # Ctrl-C in the terminal reaches the run only
            env=environment,
        )


@asynccontextmanager
async def alerting(
    folder: Path, config_name: str, config: Config, *, resumed: bool, warn: Warn
) -> AsyncIterator[RunAlerts]:
    """Send alerts while the body runs, and one about its end."""
    alerts = RunAlerts(folder, config, warn)
    state, reason = "failed", ""
    try:
        yield alerts
        state = "finished"
    except asyncio.CancelledError:
        state = "stopped"
        raise
    except BaseException as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise
    finally:
        await alerts.close(state, reason)
