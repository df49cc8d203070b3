"""The endless order of a task's training examples: of one source a pure function of the seed, of several what
actors/source_mixture.py draws."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, Protocol

from titan_rl.tasks.task import Task, TaskPart
from titan_rl.wire.errors import RunError
from titan_rl.wire.seeds import shuffled

PROGRAM = "import sys; sys.path[:] = {path!r}; from titan_rl.actors.source_mixture import serve; serve(*{given!r})"
ATTEMPTS = 3
PATIENCE = 600.0
"""Seconds until a new process must have imported torch and answered."""


class Order(Protocol):
    def index_at(self, place: int) -> int:
        """Return the index of the example at a place. Places are asked for in order."""
        ...

    def state_at(self, place: int) -> dict[str, Any]:
        """Return what `continue_at` needs besides the place."""
        ...

    def continue_at(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def order_of(task: Task, seed: int) -> Order:
    if task.endless:
        return EndlessOrder()
    return MixedOrder(task.parts, seed) if task.parts else EpochOrder(len(task.train), seed)


class EndlessOrder:
    """Each place is the index of its example: endless problems are drawn by the seed already."""

    def index_at(self, place: int) -> int:
        return place

    def state_at(self, place: int) -> dict[str, Any]:
        return {}

    def continue_at(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class EpochOrder(EndlessOrder):
    """Each epoch is all examples in a new order."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._order = lru_cache(maxsize=2)(partial(shuffled, size, seed))  # epoch -> permutation

    def index_at(self, place: int) -> int:
        epoch, place = divmod(place, self._size)
        return int(self._order(epoch)[place])


class MixedOrder:
    """Draws from sources by their weights; each source is in a new order in each of its epochs. The draws come in
    chunks from a process. Its state at the beginning of a chunk is part of the cursor, and restarts it if it dies."""

    def __init__(self, parts: Sequence[TaskPart], seed: int) -> None:
        self._given = [(part.name, part.count, part.weight) for part in parts], seed
        self._first = 0  # place of the chunk's first row
        self._rows: list[int] = []
        self._state: Any = None  # the nodes' state at the beginning of the chunk; None: at the beginning of the order
        self._closed = False
        self._spawn()  # imports torch while the run starts its meshes

    def index_at(self, place: int) -> int:
        while place >= self._first + len(self._rows):
            self._first += len(self._rows)
            chunk = self._ask({} if self._rows else {"state": self._state})
            self._state, self._rows = chunk["state"], chunk["rows"]
        return self._rows[place - self._first]

    def state_at(self, place: int) -> dict[str, Any]:
        if place >= self._first + len(self._rows):  # `index_at` has not asked for the place
            self.index_at(place)
        return {"mixture": {"first": self._first, "nodes": self._state}}

    def continue_at(self, state: dict[str, Any]) -> None:
        chunk = state["mixture"]
        self._first, self._state, self._rows = chunk["first"], chunk["nodes"], []

    def close(self) -> None:
        self._closed = True
        self._end()

    def _end(self) -> None:
        """Kill the process, which has no state that is needed. A thread that waits for its answer gets an OSError."""
        self._process.kill()
        self._process.wait()
        with suppress(OSError):  # it has not read the last request
            self._lines.close()
        self._socket.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the next chunk. A process that dies is replaced by one that continues after the current chunk."""
        last: Exception | None = None
        for attempt in range(ATTEMPTS):
            if self._closed:
                break
            try:
                if attempt:
                    self._end()
                    self._spawn()
                    if "state" not in request:
                        self._answer({"state": self._state})  # the current chunk again
                return self._answer(request)
            except (OSError, ValueError) as error:
                last = error
        raise RunError(f"the process that mixes task.sources failed {ATTEMPTS} times", f"The last error: {last}.")

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        return json.loads(self._lines.readline())  # ValueError: it has ended

    def _spawn(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(PATIENCE)
        self._lines = self._socket.makefile("rw", encoding="utf-8")
        program = PROGRAM.format(path=sys.path, given=(theirs.fileno(), *self._given))
        quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TITAN_RL_PROC": "mixture"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **quiet},
            )
