"""Which rank died, told by the kernel within milliseconds.

This controller is the parent of every process that it spawns on its own host. Monarch notices a death too, but asks for
each process's state in turn, by messages: on a loaded machine that took longer than 20 s here, and a peer's broken
collective was blamed instead. A thread per rank waits on its process; looking at how it ended leaves it to Monarch to
be reaped.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC_NAME = "TITAN_RL_PROC"
"""In a rank's environment: what it is called, "generator0[tp=1]" say."""
GONE = "is gone"
BORN_SECONDS = 300.0  # a spawned process is looked for so long

_lock = threading.Lock()
_followed: dict[int, str] = {}  # processes that live, and their names
_lives: dict[str, int] = {}  # of each name ever followed: how many have borne it
_meant: set[str] = set()  # to die: no listener is told
_ends: dict[str, str] = {}  # how a dead rank's process ended
_waiting: dict[str, list["Call"]] = {}
_listeners: list[Callable[[str, str], None]] = []


@dataclass(slots=True, eq=False)
class Call:
    """A call to a rank that may die over it."""

    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    death: str | None = None  # of its rank, which cancelled it; another may bear the name by the time that is seen


def follow(names: Iterable[str]) -> None:
    """Processes of these names are about to be spawned; who bore a name before is forgotten."""
    for name in names:
        with _lock:
            life = _lives[name] = _lives.get(name, 0) + 1
            _ends.pop(name, None)
            _meant.discard(name)
        threading.Thread(target=_follow, args=(name, life), name=f"follows {name}", daemon=True).start()


def follows(name: str) -> bool:
    """Whether a rank is this host's, so that its death will be told here."""
    with _lock:
        return name in _lives


def alive() -> dict[str, int]:
    """The processes of this host's ranks, by name."""
    with _lock:
        return {name: pid for pid, name in _followed.items()}


async def kill(names: Collection[str], seconds: float = 10.0) -> list[str]:
    """End these processes, stopped ones too, and tell no listener; their names may be used again afterwards. Answers
    with those that still live."""
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
    """An answer of a rank, which will never come once the rank is dead."""
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
def told(listener: Callable[[str, str], None]) -> Iterator[None]:
    """`listener(name, how it ended)` is called on another thread for each death."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def _follow(name: str, life: int) -> None:
    deadline = time.monotonic() + BORN_SECONDS
    while (pid := _born(name)) is None:
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # Monarch was quicker
        ended = None
    with _lock:
        del _followed[pid]
        if _lives[name] != life:  # another bears the name by now
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


def _born(name: str) -> int | None:
    """The process of a name, among this process's children, that nobody follows yet."""
    for children in Path("/proc/self/task").glob("*/children"):
        try:
            pids = [int(pid) for pid in children.read_text().split()]
        except OSError:  # the thread is gone
            continue
        for pid in pids:
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            with _lock:
                if f"{PROC_NAME}={name}".encode() in environment and pid not in _followed:
                    _followed[pid] = name
                    return pid
    return None


def _how(ended: os.waitid_result | None) -> str:
    if ended is None:
        return GONE
    if ended.si_code == os.CLD_EXITED:
        return f"ended with exit code {ended.si_status}"
    return f"was killed by signal {ended.si_status}"
