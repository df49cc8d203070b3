"""One reward process, as the controller uses it: started, asked, ended at a deadline.

    RewardProcess ── pickled JudgeRequests ──> reward_worker.py
                 <── one JSON object per line ── (reward_worker.py lists them)

The worker runs the user's code, which the controller does not trust: it reads only JSON from it, checks each message,
and never unpickles what a worker wrote. The worker may unpickle the requests: they come from the controller.
"""

import asyncio
import json
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_rl.isolation import outside
from titan_rl.tasks.rubric import JudgeRequest, Rubric
from titan_rl.wire.deadlines import deadline
from titan_rl.wire.supervisor import how_ended
from titan_rl.wire.types import Judgement

IMPORT_SECONDS = 300.0
"""Deadline for importing a rubric."""
GRACE_SECONDS = 5.0
"""Added to the deadline of an async call, which the worker ends itself. Also the time that a supervisor has to end
after its socket is closed."""
STACK_SECONDS = 1.0
"""Time that a late worker has to write its stack before it is killed."""
KILL_SECONDS = 10.0
"""Time that a supervisor has to end its worker and the worker's descendants before it is killed itself."""
POLL_SECONDS = 0.01
"""Between two looks at a process that is about to end, or at the stack that it writes."""
LARGEST_MESSAGE = 1 << 24  # bytes
FASTEST_SECONDS = 1e-7  # least time per row that the pool reckons with
PAGE, MIB = os.sysconf("SC_PAGE_SIZE"), 2**20
WORKER = "titan_rl.ext.reward_processes.reward_worker"
PROGRAM = "import sys; sys.path[:] = {path!r}; from {worker} import main; main{arguments}"
"""The worker finds modules where this process does."""


class RewardProcessLost(Exception):
    """The process ended, or was killed because it was late or too large. `at`: the call that it had announced."""

    def __init__(self, reason: str, *, at: str = "", hung: bool = False) -> None:
        super().__init__(reason)
        self.at, self.hung = at, hung


class RewardProcess:
    """A worker and its supervisor. They start with the first rubric to import, and use the host's network."""

    def __init__(self, number: int) -> None:
        self._name = f"reward{number}"
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._stack = -1  # descriptor of the file that a late worker writes its stack to
        self._worker_pid = 0
        self._resting = 0  # bytes of the worker's memory after the last import
        self._at_once: dict[Rubric, bool] = {}  # by imported rubric
        self._killed_because = ""
        self._judging = False

    async def imported(self, rubric: Rubric) -> bool:
        """Import a rubric unless it is imported. Return True if it judges answers together. Raise ValueError if it
        cannot be imported, OSError if no process can be started."""
        if rubric not in self._at_once:
            if self._process is None:
                await self._start()
            self._send([JudgeRequest(rubric)])
            match await self._next("", "importing the reward", IMPORT_SECONDS):
                case {"imported": bool(at_once), "pid": int(pid)}:
                    self._at_once[rubric], self._worker_pid = at_once, pid
                    self._resting = self.memory
                case {"failed": str(error)}:
                    raise ValueError(error)
                case _:
                    raise self._invalid()
        return self._at_once[rubric]

    async def verdicts(self, requests: Sequence[JudgeRequest]) -> AsyncIterator[tuple[Judgement, float]]:
        """Yield a verdict about each answer, in order, and the seconds that it took. Raise RewardProcessLost if the
        process ends before the last one. The requests have the same rubric and deadline."""
        self._send(requests)
        names, seconds = requests[0].rubric.names, requests[0].seconds or math.inf
        function = names[0] if len(names) == 1 else "the reward function"
        for _ in range(sum(len(request.rows) for request in requests)):
            message = await self._next("", function, seconds)
            for _ in range(len(names) + 1):  # a worker that announces calls without end is killed
                if "at" in message:
                    grace = GRACE_SECONDS if message.get("has_deadline") is True else 0.0
                    message = await self._next(str(message["at"]), function, seconds + grace)
            yield self._verdict(message)

    async def end(self) -> None:
        """Kill the worker with its descendants, and return when they have ended, even if the caller is cancelled."""
        ending = asyncio.ensure_future(self._end())
        try:
            await asyncio.shield(ending)
        finally:
            await ending

    async def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()  # the supervisor kills the worker and its descendants
            if await self._exit_code(KILL_SECONDS) is None:  # the supervisor was stopped
                self._process.kill()
                await self._exit_code(math.inf)
        if self._writer is not None:
            self._writer.transport.abort()
        elif self._socket is not None:
            self._socket.close()
        if self._stack >= 0:
            os.close(self._stack)

    @property
    def memory(self) -> int:
        """Return the bytes of memory that the worker has; 0 if it has ended."""
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self._worker_pid or -1}/statm").read_text().split()[1]) * PAGE
        return 0

    def swollen(self, memory_mb: int) -> bool:
        """Return True if it leaks: it is replaced between two calls, before one of them is to blame."""
        return bool(memory_mb) and self.memory > max(memory_mb * MIB // 2, 2 * self._resting)

    def kill_if_larger(self, memory_mb: int) -> None:
        """Kill the worker if it judges now and has more memory. Between two calls, `swollen` is looked at instead."""
        if self._process is not None and self._judging and 0 < memory_mb < (used := self.memory // MIB):
            self._killed_because = (
                f"the reward function's process had {used:,} MiB of memory, more than task.reward_memory_mb = "
                f"{memory_mb:,}, and is killed"
            )
            self._process.terminate()

    async def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._stack = os.memfd_create("stack")
        arguments = (os.getpid(), theirs.fileno(), self._stack)
        command = [sys.executable, "-P", "-c", PROGRAM.format(path=sys.path, worker=WORKER, arguments=arguments)]
        with theirs:
            self._process = outside(
                lambda: subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=arguments[1:],
                    start_new_session=True,
                    env={**os.environ, "TITAN_RL_PROC": self._name},
                )
            )
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=LARGEST_MESSAGE)

    def _send(self, requests: Sequence[JudgeRequest]) -> None:
        """Write the requests. Not drained: a worker that reads no more would hold this process without a deadline."""
        assert self._writer is not None
        self._writer.write(pickle.dumps(requests))

    async def _next(self, at: str, function: str, seconds: float) -> dict[str, Any]:
        """Return the worker's next message. A late worker writes its stack and is killed. Raise RewardProcessLost if
        the worker has ended."""
        place, self._judging = "", True
        try:
            try:
                async with deadline(None if math.isinf(seconds) else seconds):
                    line = await self._reader.readline()
            except TimeoutError:
                place = await self._place()
                async with asyncio.timeout(0):  # it arrived in the meantime
                    line = await self._reader.readline()
        except TimeoutError:
            assert self._process is not None
            self._process.terminate()
            late = f"{at or function} did not return within {seconds:g} s{place}"
            raise RewardProcessLost(f"{late} (task.reward_seconds); its process is killed", at=at, hung=True) from None
        except ConnectionError:
            line = b""
        except ValueError:  # a line that is too long
            raise self._invalid() from None
        finally:
            self._judging = False
        if not line:
            raise RewardProcessLost(self._killed_because or await self._death(), at=at)
        with suppress(ValueError, RecursionError):
            if isinstance(message := json.loads(line), dict):
                return message
        raise self._invalid()

    def _verdict(self, message: dict[str, Any]) -> tuple[Judgement, float]:
        match message:
            case {
                "reward": float(reward),
                "parts": dict(parts),
                "error": str(error),
                "hung": bool(hung),
                "feedback": str(feedback),
                "seconds": float(seconds),
            } if (
                not math.isinf(reward)
                and 0 <= seconds < math.inf
                and all(type(value) is float for value in parts.values())
            ):
                return Judgement(reward, parts, error, hung, feedback), max(seconds, FASTEST_SECONDS)
        raise self._invalid()

    def _invalid(self) -> RewardProcessLost:
        return RewardProcessLost("the reward process sent an invalid message")

    async def _place(self) -> str:
        """Have the worker write its stack. Return the innermost line of the user's code, or ""."""
        assert self._process is not None
        begin, stack, before = os.fstat(self._stack).st_size, b"", b"-"
        self._process.send_signal(signal.SIGUSR2)
        until = time.monotonic() + STACK_SECONDS
        while time.monotonic() < until and not stack == before != b"":  # it is whole when it no longer grows
            await asyncio.sleep(POLL_SECONDS)
            before, stack = stack, os.pread(self._stack, 2**16, begin)
        ours = (str(Path(__file__).parents[2]), sysconfig.get_paths()["stdlib"], "<")
        lines = re.findall(r'File "(.*)", line (\d+)', stack.decode(errors="replace"))
        return next((f" at {file}:{line}" for file, line in lines if not file.startswith(ours)), "")

    async def _death(self) -> str:
        """Return how the process ended."""
        code = await self._exit_code(GRACE_SECONDS)
        if code is None:
            return "the reward function closed its process's connection"
        return f"the reward function's process {how_ended(code)}"

    async def _exit_code(self, seconds: float) -> int | None:
        """Return the exit code; None if the process does not end within `seconds`."""
        assert self._process is not None
        until = time.monotonic() + seconds
        while (code := self._process.poll()) is None and time.monotonic() < until:
            await asyncio.sleep(POLL_SECONDS)
        return code
