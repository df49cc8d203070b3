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
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_rl.tasks.reward_thread import SideThread
from titan_rl.tasks.reward_worker import LENGTH, Request
from titan_rl.tasks.rubric import Rubric
from titan_rl.wire.deadlines import deadline

IMPORT_SECONDS = 300.0
"""Until a rubric must be imported."""
GRACE_SECONDS = 5.0
"""Added to the deadline of functions that are called together and have deadlines of their own."""
STACK_SECONDS = 1.0
"""Until a process that is about to be killed must have written its stack."""
LONGEST_LINE = 2**24  # bytes
PAGE = os.sysconf("SC_PAGE_SIZE")
PROGRAM = "import sys; sys.path[:] = {path!r}; from titan_rl.tasks.reward_worker import serve; serve(*{given})"
"""The worker finds modules where this process does."""


class RewardProcessLost(Exception):
    """The process ended, or was killed because it was late or too large. `at`: what it was doing."""

    def __init__(self, reason: str, *, at: str = "", hung: bool = False) -> None:
        super().__init__(reason)
        self.at, self.hung = at, hung


class RewardProcess:
    def __init__(self, process: "subprocess.Popen[bytes]", stack: int) -> None:
        self._process, self._stack = process, stack
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
        stack = os.memfd_create("stack")
        program = PROGRAM.format(path=sys.path, given=(theirs.fileno(), stack, os.getpid()))

        def spawn() -> "subprocess.Popen[bytes]":
            return subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), stack),
                start_new_session=True,
                env={**os.environ, "TITAN_RL_PROC": f"reward{number}"},
            )

        try:
            self = cls(await spawner.run(spawn, None), stack)
        except BaseException:
            os.close(stack)
            ours.close()
            raise
        finally:
            theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LONGEST_LINE)
        return self

    async def imported(self, rubric: Rubric) -> bool:
        """Import a rubric unless it is. Return True if it judges answers together. Raise ValueError if it cannot be."""
        if rubric not in self._at_once:
            self._ask(Request(rubric))
            line = await self._line(IMPORT_SECONDS, "importing the reward")
            if "failed" in line:
                raise ValueError(line["failed"])
            self._at_once[rubric], self.resting = line["ready"], self.memory
        return self._at_once[rubric]

    async def judge(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """Yield the worker's line about each answer. Raise RewardProcessLost if it ends before the last one."""
        self._ask(request)
        left, at, seconds = len(request.rows), "", request.seconds
        only = request.rubric.names[0] if len(request.rubric.names) == 1 else "the reward function"
        while left:
            line = await self._line(seconds, at, only)
            if "at" in line:
                at = line["at"]
                seconds = None if request.seconds is None else request.seconds + GRACE_SECONDS
            else:
                left, at, seconds = left - 1, "", request.seconds
                yield line

    @property
    def memory(self) -> int:
        """Return the bytes of memory that it has; 0 if it has ended."""
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE
        return 0

    def doom(self, why: str) -> None:
        """Kill it. The call that waits for its answer raises `why`."""
        self._doom = self._doom or why
        self._kill()

    async def end(self) -> None:
        self._kill()
        self._writer.close()
        await asyncio.to_thread(self._process.wait)
        with suppress(OSError):
            os.close(self._stack)

    def _kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with what it started itself

    def _ask(self, request: Request) -> None:
        data = pickle.dumps(request)
        self._writer.write(LENGTH.pack(len(data)) + data)

    async def _line(self, seconds: float | None, at: str, what: str = "") -> dict[str, Any]:
        try:
            async with deadline(seconds):
                text = await self._reader.readline()
        except TimeoutError:
            place = await self._place()
            late = f"{at or what} did not return within {seconds:g} s{place}"
            raise RewardProcessLost(f"{late} (task.reward_seconds); its process is killed", at=at, hung=True) from None
        except ValueError:  # longer than any line of ours
            raise RewardProcessLost("the reward process sent what is no answer", at=at) from None
        except OSError as error:
            raise RewardProcessLost(f"the reward process cannot be reached: {error}", at=at) from None
        with suppress(ValueError):
            return json.loads(text)
        raise RewardProcessLost(self._doom or await self._death(), at=at)

    async def _death(self) -> str:
        """Return how it ended, or that it did not but hung up."""
        with suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(self._process.wait, 1.0)
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
