"""The sandbox of this machine: a few fork servers, each with one execution at a time.

run, run_tests ── a thread waits ──> ForkServer ── code, stdin, limits ──> new processes, and their end
"""

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from queue import LifoQueue

from titan_rl.config.system_sections import SandboxSection
from titan_rl.ext.sandbox.execution import Execution, ExecutionLimits, Language, Verdict
from titan_rl.ext.sandbox.requirements import ALWAYS, too_weak
from titan_rl.ext.sandbox.running import ForkServer
from titan_rl.wire.errors import SandboxRefused

WORKERS = 2
"""Executions at the same time in one process that uses the sandbox. More of them wait."""


class LocalSandbox:
    """Starts fork servers when they are first needed. Any thread and any event loop may use it."""

    def __init__(
        self,
        section: SandboxSection | None = None,
        *,
        limits: ExecutionLimits | None = None,
        workers: int = WORKERS,
    ) -> None:
        self.section = section or SandboxSection()
        if wrong := "; ".join(too_weak(self.section)):
            raise SandboxRefused(wrong)
        self.limits = limits or ExecutionLimits.of(self.section)
        self._workers = workers
        self._idle: LifoQueue[ForkServer | None] = LifoQueue()  # None: one that is not started yet
        for _ in range(self._workers):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(self._workers, "sandbox")
        self._closed = False

    async def run(
        self, code: str, *, language: Language = "python", stdin: str = "", limits: ExecutionLimits | None = None
    ) -> Execution:
        """Run a program, and return how it ended. Raise SandboxRefused if a layer is missing."""
        call = _Call(language, code, stdin, limits or self.limits)
        return await self._on_thread(call)

    async def run_tests(
        self, code: str, tests: Sequence[str], *, setup: str = "", limits: ExecutionLimits | None = None
    ) -> Verdict:
        """Run test programs against a solution, in a process that the solution cannot reach."""
        return _verdict(await self._on_thread(_tests(code, tests, setup, limits or self.limits)), len(tests))

    def run_here(
        self, code: str, *, language: Language = "python", stdin: str = "", limits: ExecutionLimits | None = None
    ) -> Execution:
        """Run a program, and wait on the calling thread."""
        return self._execute(_Call(language, code, stdin, limits or self.limits))

    def run_tests_here(
        self, code: str, tests: Sequence[str], *, setup: str = "", limits: ExecutionLimits | None = None
    ) -> Verdict:
        return _verdict(self._execute(_tests(code, tests, setup, limits or self.limits)), len(tests))

    async def warm(self) -> None:
        """Start every fork server, and run nothing in each."""
        await asyncio.gather(*(self.run("") for _ in range(self._workers)))

    def close(self) -> None:
        """End the fork servers and their executions."""
        self._closed = True
        for _ in range(self._workers):
            server = self._idle.get()
            if server is not None:
                server.end()
        for _ in range(self._workers):
            self._idle.put(None)  # a call that waits for one finds the sandbox closed
        self._threads.shutdown(wait=False)

    async def _on_thread(self, call: "_Call") -> Execution:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._execute, call)
        except asyncio.CancelledError:
            call.cancel()
            raise

    def _execute(self, call: "_Call") -> Execution:
        server = self._idle.get()
        try:
            if self._closed:
                raise SandboxRefused("the sandbox is closed")
            if server is None or not server.lives:
                if server is not None:
                    server.end()
                server = None
                server = ForkServer(self.section, [*self.section.require, *ALWAYS])
            return call.execute(server)
        finally:
            self._idle.put(server)


class _Call:
    """One execution that waits for a fork server, or has it."""

    def __init__(self, mode: str, code: str, stdin: str, limits: ExecutionLimits, tests: str = "") -> None:
        self._given = (mode, code, stdin, limits, tests)
        self._server: ForkServer | None = None
        self._cancelled = False
        self._lock = threading.Lock()

    def execute(self, server: ForkServer) -> Execution:
        with self._lock:
            if self._cancelled:
                return Execution("killed", detail="cancelled")
            self._server = server
        try:
            return server.execute(*self._given)
        finally:
            with self._lock:
                self._server = None

    def cancel(self) -> None:
        """End the execution with its fork server: another one takes its place."""
        with self._lock:
            self._cancelled = True
            if self._server is not None:
                self._server.kill()


def _tests(code: str, tests: Sequence[str], setup: str, limits: ExecutionLimits) -> _Call:
    return _Call("tests", code, "", limits, json.dumps({"setup": setup, "tests": list(tests)}))


def _verdict(execution: Execution, total: int) -> Verdict:
    report = execution.tests if execution.status == "ok" else None
    if report is None:
        return Verdict(0, total, [f"{execution.status}: {execution.detail}"], execution)
    return Verdict(report["passed"], total, report["failures"], execution)


def missing(section: SandboxSection) -> list[str]:
    """Return why nothing would be run on this machine: the layers that it lacks."""
    try:
        sandbox = LocalSandbox(section, workers=1)
        try:
            found = sandbox.run_here("")
        finally:
            sandbox.close()
    except SandboxRefused as error:
        return [str(error)]
    return [] if found.status == "ok" else [f"{found.status}: {found.detail}"]


VARIABLE = "TITAN_RL_SANDBOX"
"""Environment variable with [sandbox], which child processes inherit."""
_shared: dict[int, LocalSandbox] = {}  # by process: a fork has none of its parent's fork servers
_lock = threading.Lock()


def configure(section: SandboxSection) -> None:
    """Set [sandbox] for the shared sandbox of this process and its children."""
    with _lock:
        os.environ[VARIABLE] = json.dumps(asdict(section))
        if (old := _shared.pop(os.getpid(), None)) is not None:
            old.close()


def shared() -> LocalSandbox:
    """Return the sandbox of this process, which its tools and rewards share."""
    with _lock:
        if os.getpid() not in _shared:
            _shared[os.getpid()] = LocalSandbox(SandboxSection(**json.loads(os.environ.get(VARIABLE, "{}"))))
        return _shared[os.getpid()]
