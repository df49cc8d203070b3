"""One reward process, as the controller sees it: started, asked, watched, killed with everything it started."""

import asyncio
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_rl.tasks.reward_thread import SideThread
from titan_rl.tasks.reward_worker import LENGTH, JudgeRequest
from titan_rl.tasks.rubric import Rubric
from titan_rl.wire.deadlines import deadline

IMPORT_SECONDS = 300.0
"""Until a rubric must be imported."""
GRACE_SECONDS = 5.0
"""Added to the deadline of functions that are called together and have deadlines of their own. Also until the keeper of
a process that has hung up must have ended."""
STACK_SECONDS = 1.0
"""Until a process that is about to be killed must have written its stack."""
PAGE = os.sysconf("SC_PAGE_SIZE")
KILL_SECONDS = 10.0
"""Until a keeper must have ended its worker and whatever that started; then it is killed itself."""
PROGRAM = """
import sys; sys.path[:] = {path!r}
from titan_rl.tasks.reward_keeper import fork_worker; fork_worker({controller}, {given})
from titan_rl.tasks.reward_worker import serve; serve(*{given})
"""
"""The worker finds modules where this process does."""


class RewardProcessLost(Exception):
    """The process ended, or was killed because it was late or too large. `at`: what it was doing."""

    def __init__(self, reason: str, *, at: str = "", hung: bool = False) -> None:
        super().__init__(reason)
        self.at, self.hung = at, hung


class RewardProcess:
    def __init__(self, process: "subprocess.Popen[bytes]", lines: int, stack: int) -> None:
        self._process, self._lines, self._stack = process, lines, stack
        self._worker = self._read = 0  # its pid, once it has told; bytes of its lines that were read
        self._at_once: dict[Rubric, bool] = {}  # of those that are imported
        self._doom = ""  # why it was killed, if it was
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self.resting = 0  # bytes of memory after the last import

    @classmethod
    async def start(cls, number: int, spawner: SideThread) -> "RewardProcess":
        """`spawner`: its thread must live as long as this process, because the kernel kills a child whose parent
        thread ends."""
        ours, theirs = socket.socketpair()
        lines, stack = os.memfd_create("lines"), os.memfd_create("stack")
        given = (theirs.fileno(), lines, stack)
        program = PROGRAM.format(path=sys.path, controller=os.getpid(), given=given)

        def spawn() -> "subprocess.Popen[bytes] | None":
            if abandoned.is_set():
                return None
            return subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                start_new_session=True,
                env={**os.environ, "TITAN_RL_PROC": f"reward{number}"},
            )

        abandoned, process = threading.Event(), None
        spawning = asyncio.ensure_future(spawner.run(spawn, None))
        try:
            process = await asyncio.shield(spawning)
            assert process is not None
            self = cls(process, lines, stack)
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException as error:
            abandoned.set()
            if isinstance(error, asyncio.CancelledError) and process is None:
                process = await spawning  # what has begun cannot be recalled
            if process is not None:
                process.kill()
                await asyncio.to_thread(process.wait)
            os.close(lines)
            os.close(stack)
            ours.close()
            raise
        finally:
            theirs.close()
        return self

    async def imported(self, rubric: Rubric) -> bool:
        """Import a rubric unless it is. Return True if it judges answers together. Raise ValueError if it cannot be."""
        if rubric not in self._at_once:
            self._ask([JudgeRequest(rubric)])
            (line,) = await self._more(time.monotonic() + IMPORT_SECONDS) or [None]
            if line is None:
                raise await self._late(IMPORT_SECONDS, "", "importing the reward")
            if "failed" in line:
                raise ValueError(line["failed"])
            self._worker = line["pid"]
            self._at_once[rubric], self.resting = line["ready"], self.memory
        return self._at_once[rubric]

    async def judge(self, requests: Sequence[JudgeRequest]) -> AsyncIterator[dict[str, Any]]:
        """Yield the worker's line about each answer, in order. Raise RewardProcessLost if it ends before the last one.
        The requests have the same rubric and deadline."""
        self._ask(requests)
        names, given = requests[0].rubric.names, requests[0].seconds
        left, at, seconds, since = sum(len(request.rows) for request in requests), "", given, time.monotonic()
        only = names[0] if len(names) == 1 else "the reward function"
        while left:
            try:
                lines = await self._more(None if seconds is None else since + seconds)
            except RewardProcessLost as lost:
                raise RewardProcessLost(str(lost), at=at) from None
            if not lines:
                raise await self._late(seconds or 0.0, at, only)
            for line in lines:
                since = line["t"]
                if "at" in line:
                    at = line["at"]
                    seconds = None if given is None else given + GRACE_SECONDS
                else:
                    left, at, seconds = left - 1, "", given
                    yield line

    @property
    def memory(self) -> int:
        """Return the bytes of memory that it has; 0 if it has ended."""
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self._worker or self._process.pid}/statm").read_text().split()[1]) * PAGE
        return 0

    def doom(self, why: str) -> None:
        """Kill it. The call that waits for its answer raises `why`."""
        self._doom = self._doom or why
        self._kill()

    async def end(self) -> None:
        self._kill()
        self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, KILL_SECONDS)
        except subprocess.TimeoutExpired:  # somebody stopped the keeper
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        for descriptor in (self._lines, self._stack):
            with suppress(OSError):
                os.close(descriptor)

    def _kill(self) -> None:
        self._process.terminate()  # the keeper kills the worker, and what that started itself

    def _ask(self, requests: Sequence[JudgeRequest]) -> None:
        os.ftruncate(self._lines, 0)
        self._read = 0
        data = pickle.dumps(requests)
        self._writer.write(LENGTH.pack(len(data)) + data)

    async def _more(self, until: float | None) -> list[dict[str, Any]]:
        """Return the worker's next lines, or none if there are none at the time `until`. Raise if it has ended."""
        gone = False
        while not (lines := self._new_lines()):
            if gone:
                raise RewardProcessLost(self._doom or await self._death())
            try:
                async with deadline(None if until is None else max(until - time.monotonic(), 0)):
                    gone = not await self._reader.read(2**12)
            except TimeoutError:
                return self._new_lines()
            except OSError as error:
                raise RewardProcessLost(f"the reward process cannot be reached: {error}") from None
        return lines

    def _new_lines(self) -> list[dict[str, Any]]:
        text = os.pread(self._lines, os.fstat(self._lines).st_size - self._read, self._read)
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            raise RewardProcessLost("the reward process sent what is no answer") from None

    async def _late(self, seconds: float, at: str, what: str) -> RewardProcessLost:
        late = f"{at or what} did not return within {seconds:g} s{await self._place()}"
        return RewardProcessLost(f"{late} (task.reward_seconds); its process is killed", at=at, hung=True)

    async def _death(self) -> str:
        """Return how it ended, or that it did not but hung up."""
        with suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(self._process.wait, GRACE_SECONDS)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"the reward function's process {how}"
        return "the reward function closed its process's connection"

    async def _place(self) -> str:
        """Return where the user's code is, if the process can still say it."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR2)
        loop = asyncio.get_running_loop()
        until, text = loop.time() + STACK_SECONDS, ""
        while not text.endswith("\n") and loop.time() < until:
            await asyncio.sleep(0.02)
            text = os.pread(self._stack, 2**16, 0).decode(errors="replace")
        return place_in(text)


def place_in(stack: str) -> str:
    """Return the innermost line of the user's code in a stack that faulthandler wrote."""
    ours = (str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"], "<")
    lines = re.findall(r'File "(.*)", line (\d+)', stack)
    for file, line in lines:
        if not file.startswith(ours):
            return f" at {file}:{line}"
    return ""
