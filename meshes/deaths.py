"""Detect within milliseconds which rank died, and how.

Monarch starts a launcher for each rank (rank_launcher.py), which reports here the rank's process and how it ended. A
launcher that ends without a report took its rank along. Monarch detects deaths too, but by messages to each process in
turn: on a loaded machine that took longer than 20 s, and a peer's broken collective was blamed instead.
"""

import asyncio
import atexit
import os
import selectors
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from titan_rl.meshes.starter import starter

GONE = "is gone"
KILL_SECONDS = {"cpu": 10.0, "cuda": 60.0}
"""Limit for a killed process to end, by device: the kernel first unmaps a GPU's memory and unpins the host's."""
kill_seconds = KILL_SECONDS["cpu"]  # set for the run's device

_lock = threading.Lock()
_local: dict[int, str] = {}  # name of each live rank on this machine, by pid
_begun: dict[str, float] = {}  # when each newest rank was started, by time.monotonic and name
_remote: dict[str, "Launcher"] = {}  # live ranks on other hosts, by name
_awaited: dict[str, str] = {}  # host of each rank whose launcher has not reported yet, by name
_generations: dict[str, int] = {}  # processes spawned so far, by rank name
_killed: set[str] = set()  # ranks killed on purpose: listeners are not called
_ends: dict[str, str] = {}  # how each dead rank's process ended
_waiting: dict[str, list["Call"]] = {}
_listeners: list[Callable[[str, str], None]] = []


@dataclass(slots=True, eq=False)
class Call:
    """A call to a rank, which its death cancels."""

    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    death: str | None = None  # how the rank died; stored here because its name may soon be in use again


def follow(names: Collection[str], report: str = "", host: str = "") -> dict[str, dict[str, str]]:
    """Expect processes under these names, and forget earlier ones. Return the variables for each launcher's
    environment. `report`: the socket on another host that forwards their reports; `host`: its name."""
    with _lock:
        for name in names:
            _generations[name] = _generations.get(name, 0) + 1
            _awaited[name] = host
            _ends.pop(name, None)
            _killed.discard(name)
        return {n: {"TITAN_RL_RANK": f"{_generations[n]} {n}", "TITAN_RL_REPORT": report or _socket()} for n in names}


def follows(name: str) -> bool:
    """Return True if a rank has a launcher, so that its death is detected here."""
    with _lock:
        return name in _generations


def ended(name: str) -> str | None:
    """Return how the newest process under this name ended; None if it has not, as far as is known."""
    with _lock:
        return _ends.get(name)


def alive() -> dict[str, int]:
    """Return the pids of this host's live ranks, by name."""
    with _lock:
        return {name: pid for pid, name in _local.items()}


def begun() -> dict[str, float]:
    """Return when each rank's newest process was started, by time.monotonic, by name."""
    with _lock:
        return dict(_begun)


def away() -> dict[str, tuple[str, int]]:
    """Return (host, pid) of each live rank on another host, by name."""
    with _lock:
        return {name: (launcher.host, launcher.pid) for name, launcher in _remote.items()}


def living() -> list[str]:
    """Return the names of all live ranks, on other hosts too."""
    with _lock:
        return [*_local.values(), *_remote]


def host_lost(host: str, how: str) -> None:
    """End the ranks that are expected on a lost host: their launchers will never report."""
    with _lock:
        awaited = [(name, _generations[name]) for name, where in _awaited.items() if where == host]
    for name, life in awaited:
        _end(name, life, how)


async def kill(names: Collection[str]) -> list[str]:
    """Kill these processes, stopped ones too, without calling listeners. Return the names of processes still alive
    after `kill_seconds`; the other names may be used again."""
    names = frozenset(names)
    with _lock:
        _killed.update(names)
    deadline = time.monotonic() + kill_seconds
    while (live := [name for name in living() if name in names]) and time.monotonic() < deadline:
        here = alive()
        for name in live:
            with suppress(ProcessLookupError, KeyError):
                if (launcher := _remote.get(name)) is not None:
                    launcher.kill(launcher.pid)
                else:
                    os.kill(here[name], signal.SIGKILL)
        await asyncio.sleep(0.01)
    return live


@contextmanager
def cancelled_by_death(name: str, answer: asyncio.Future[Any]) -> Iterator[Call]:
    """Cancel `answer` if its rank dies, because a dead rank never answers."""
    call = Call(asyncio.get_running_loop(), answer)
    with _lock:
        call.death = _ends.get(name)
        _waiting.setdefault(name, []).append(call)
    if call.death is not None:
        answer.cancel()
    try:
        yield call
    finally:
        with _lock:
            _waiting[name].remove(call)


@contextmanager
def listening(listener: Callable[[str, str], None]) -> Iterator[None]:
    """Call `listener(name, how it ended)` on another thread for each death."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


@dataclass(slots=True)
class Launcher:
    """A launcher's reports, which arrive over a connection or through another host's agent, which `kill` then calls."""

    connection: socket.socket | None = None
    kill: Callable[[int], None] = lambda pid: os.kill(pid, signal.SIGKILL)
    unread: bytes = b""
    name: str = ""
    life: int = 0
    pid: int = 0  # the rank's
    ended: bool = False
    host: str = ""  # set if another host's agent reports

    def read(self) -> bool:
        """Read the reports of the launcher. Return False if it is gone."""
        assert self.connection is not None
        try:
            more = self.connection.recv(4096)
        except OSError:
            more = b""
        return self.receive(more)

    def receive(self, more: bytes) -> bool:
        *lines, self.unread = (self.unread + more).split(b"\n")
        for line in lines:
            self._handle(*line.decode(errors="replace").split(" ", 1))
        if not more:
            if not self.ended and self.pid:
                with suppress(ProcessLookupError):
                    self.kill(self.pid)
            self.end(GONE)
        return bool(more)

    def _handle(self, word: str, rest: str) -> None:
        if word == "name":
            life, self.name = rest.split(" ", 1)
            self.life = int(life)
            with _lock:
                if _generations.get(self.name) == self.life:
                    _awaited.pop(self.name, None)
        elif word == "cold":
            starter().warn_cold(*rest.split(" ", 1))
        elif word == "pid":
            self.pid = int(rest)
            with _lock:
                wanted = _generations.get(self.name) == self.life and self.name not in _killed
                if wanted:
                    _begun[self.name] = time.monotonic()
                if self.connection is not None:
                    _local[self.pid] = self.name
                elif wanted:  # do not replace its successor
                    _remote[self.name] = self
            if not wanted:  # killed before it was started
                self.kill(self.pid)
        elif word == "end":
            status = int(rest)
            if os.WIFSIGNALED(status):
                self.end(f"was killed by signal {os.WTERMSIG(status)}")
            else:
                self.end(f"ended with exit code {os.WEXITSTATUS(status)}")

    def end(self, how: str) -> None:
        if self.ended:
            return
        self.ended = True
        with _lock:
            if self.connection is not None:
                _local.pop(self.pid, None)
            elif _remote.get(self.name) is self:
                del _remote[self.name]
        _end(self.name, self.life, how)


def _end(name: str, life: int, how: str) -> None:
    """Record how a rank ended, cancel calls to it and call listeners."""
    with _lock:
        if _generations.get(name) != life:  # the name is in use again
            return
        _awaited.pop(name, None)
        _ends[name] = how
        waiting, listeners = list(_waiting.get(name, ())), [] if name in _killed else list(_listeners)
        for call in waiting:
            call.death = how
    for call in waiting:
        if not call.loop.is_closed():
            call.loop.call_soon_threadsafe(call.answer.cancel)
    for listener in listeners:
        listener(name, how)


_path = ""  # socket that launchers report to


def _socket() -> str:
    """Return the socket that launchers report to; listen there from the first call on."""
    global _path
    if not _path:
        folder = tempfile.mkdtemp(prefix="launchers-", dir=os.environ.get("TMPDIR"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        # A socket's path must be short, but TMPDIR may be long.
        _path = f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}/report"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(_path)
        listener.listen(256)
        threading.Thread(target=_listen, args=(listener,), name="follows ranks", daemon=True).start()
    return _path


def _listen(listener: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if (launcher := key.data) is None:
                    connection, _ = listener.accept()
                    selector.register(connection, selectors.EVENT_READ, Launcher(connection))
                elif not launcher.read():
                    selector.unregister(launcher.connection)
                    launcher.connection.close()
