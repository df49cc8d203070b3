"""Learn from the kernel within milliseconds which rank died.

This controller is the parent of every process that it spawns on its own host. Monarch notices a death too, but asks for
each process's state in turn, by messages: on a loaded machine that took longer than 20 s here, and a peer's broken
collective was blamed instead. A thread per rank blocks in waitid, because Monarch reaps a dead process soon: the
kernel tells the thread how it ended right away, and WNOWAIT leaves the reaping to Monarch.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

PROC_NAME = "TITAN_RL_PROC"
"""Environment variable with a rank's name, such as "generator0[tp=1]"."""
GONE = "is gone"
BORN_SECONDS = 300.0  # give up looking for a spawned process after this time

_lock = threading.Lock()
_followed: dict[int, str] = {}  # name of each live process
_lives: dict[str, int] = {}  # generation of each rank name: incremented when a process is spawned under it
_meant: set[str] = set()  # names of processes killed on purpose: listeners are not called
_ends: dict[str, str] = {}  # how each dead rank's process ended
_waiting: dict[str, list["Call"]] = {}
_listeners: list[Callable[[str, str], None]] = []


@dataclass(slots=True, eq=False)
class Call:
    """A call to a rank, which its death cancels."""

    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    death: str | None = None  # how the rank died. Kept here because its name may be in use again when this is read


def follow(names: Iterable[str]) -> None:
    """Watch for the processes about to be spawned under these names. Earlier processes of a name are forgotten."""
    unborn = dict[str, int]()
    with _lock:
        for name in names:
            unborn[name] = _lives[name] = _lives.get(name, 0) + 1
            _ends.pop(name, None)
            _meant.discard(name)
    threading.Thread(target=_find, args=(unborn,), name="finds processes", daemon=True).start()


def follows(name: str) -> bool:
    """Return True if a rank was spawned on this host, so that its death is noticed here."""
    with _lock:
        return name in _lives


def alive() -> dict[str, int]:
    """Return the pids of this host's live ranks, by name."""
    with _lock:
        return {name: pid for pid, name in _followed.items()}


async def kill(names: Collection[str], seconds: float = 10.0) -> list[str]:
    """Kill these processes, stopped ones too, without calling listeners. Return the names of those still alive; the
    other names may be used again."""
    with _lock:
        _meant.update(names)
    deadline = time.monotonic() + seconds
    while (left := [name for name in alive() if name in names]) and time.monotonic() < deadline:
        for name in left:
            with suppress(ProcessLookupError, KeyError):
                os.kill(alive()[name], signal.SIGKILL)
        await asyncio.sleep(0.01)
    return left


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


def _find(unborn: dict[str, int]) -> None:
    """Find the processes of these names among this process's children, and follow each."""
    deadline = time.monotonic() + BORN_SECONDS
    while unborn and time.monotonic() < deadline:
        for child in psutil.Process().children():
            try:
                name = child.environ().get(PROC_NAME, "")
            except psutil.Error:  # it ended
                continue
            with _lock:
                if name not in unborn or child.pid in _followed:
                    continue
                _followed[child.pid] = name
            follower = threading.Thread(target=_follow, args=(child.pid, name, unborn.pop(name)), daemon=True)
            follower.name = f"follows {name}"
            follower.start()
        time.sleep(0.1)


def _follow(pid: int, name: str, life: int) -> None:
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # Monarch was quicker
        ended = None
    with _lock:
        del _followed[pid]
        if _lives[name] != life:  # the name is in use again
            return
        how = _ends[name] = _how(ended)
        waiting, listeners = list(_waiting.get(name, ())), [] if name in _meant else list(_listeners)
        for call in waiting:
            call.death = how
    for call in waiting:
        if not call.loop.is_closed():
            call.loop.call_soon_threadsafe(call.answer.cancel)
    for listener in listeners:
        listener(name, how)


def _how(ended: os.waitid_result | None) -> str:
    if ended is None:
        return GONE
    if ended.si_code == os.CLD_EXITED:
        return f"ended with exit code {ended.si_status}"
    return f"was killed by signal {ended.si_status}"
