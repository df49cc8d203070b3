"""Drives a fork server: sends it executions, reads their output, and ends each that exceeds a limit."""

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.config.system_sections import SandboxSection
from titan_rl.ext.sandbox.cgroup import OwnCgroup
from titan_rl.ext.sandbox.execution import Ending, Execution, ExecutionLimits
from titan_rl.ext.sandbox.inside import ROOT
from titan_rl.ext.sandbox.requirements import advised
from titan_rl.wire.errors import SandboxRefused

PROGRAM = "import sys; sys.path.append({root!r}); from titan_rl.ext.sandbox.fork_server import main; main()"
FLAGS = ("-s", "-S", "-P", "-B")  # no packages, no current folder
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}  # sets have one order in all servers
START_SECONDS = 60.0
LOOK_SECONDS = 0.05  # between two looks at the memory
GRACE_SECONDS = 10.0  # for the processes of an execution to die
MOST_ENDING = 1 << 16
SEALS = 0xF  # against every change


class Gone(Exception):
    """The fork server has ended."""


class Exceeded(NamedTuple):
    status: Ending
    detail: str


class ForkServer:
    def __init__(self, section: SandboxSection, layers: Sequence[str]) -> None:
        """Start it. Raise SandboxRefused if it cannot set up one of the layers."""
        self._folder = "" if "namespaces" in layers else tempfile.mkdtemp(prefix="titan_rl-sandbox-")
        self._cgroup = OwnCgroup(section.cgroup) if section.cgroup else None
        packages = os.path.realpath(sysconfig.get_paths()["purelib"]) if section.packages else ""
        settings = {"layers": list(layers), "packages": packages, "folder": self._folder}
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stderr = os.memfd_create("stderr")
        executable = getattr(sys, "_base_executable", sys.executable)
        with theirs:
            self._process = subprocess.Popen(
                [executable, *FLAGS, "-c", PROGRAM.format(root=ROOT), str(theirs.fileno()), json.dumps(settings)],
                pass_fds=[theirs.fileno()],
                env=ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
            )
        try:
            self.landlock = self._first_word()
            if self._cgroup is not None:
                self._cgroup.take(self._process.pid)
        except BaseException:
            self.end()
            raise
        self._own_memory = _memory(self._process.pid)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def execute(self, mode: str, code: str, stdin: str, limits: ExecutionLimits, tests: str = "") -> Execution:
        """Run one execution to its end, on the calling thread."""
        if self._cgroup is not None:
            self._cgroup.limit(limits)
        began = time.monotonic()
        running = _Running(self, limits, began + limits.wall_seconds)
        try:
            running.send(mode, [code, stdin, *([tests] if tests else [])])
            while not running.over:
                running.look(LOOK_SECONDS)
        except (Gone, OSError) as error:
            self.end()
            return Execution("sandbox_failed", seconds=time.monotonic() - began, detail=str(error))
        finally:
            running.close()
        return running.outcome(time.monotonic() - began, bool(self._cgroup and self._cgroup.overflowed()))

    def memory(self) -> int:
        """Return the memory of all processes of the execution, without the fork server's own."""
        pids = list(_descendants(self._process.pid))
        return sum(max(0, _memory(pid) - self._own_memory) for pid in pids)

    def kill(self) -> None:
        """Kill it and its execution. Any thread may."""
        self._process.kill()

    def end(self) -> None:
        """Kill it, and release its resources."""
        self.kill()
        self._process.wait()
        self.socket.close()
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._cgroup is not None:
            self._cgroup.remove()

    def why(self) -> str:
        """Return why it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        text = os.pread(self._stderr, 1 << 16, 0).decode(errors="replace").strip().rpartition("\n")[2]
        return f"the fork server ended with exit code {self._process.poll()}{f': {text}' if text else ''}"

    def clear_folder(self) -> None:
        """Empty the folder on disk of an execution, if it has one."""
        if not self._folder or not self.lives:
            return
        for entry in os.scandir(self._folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry)
        if os.listdir(self._folder):
            self.kill()  # the next one gets another folder

    def _first_word(self) -> int:
        ready = select.select([self.socket], [], [], START_SECONDS)[0]
        message = self.socket.recv(1 << 16) if ready else b""
        if not message:
            raise SandboxRefused(f"sandbox: {self.why() if ready else f'no answer within {START_SECONDS:g} s'}")
        news = json.loads(message)
        if news["missing"]:
            raise SandboxRefused("; ".join(map(advised, news["missing"])))
        return news["landlock"]


class _Running:
    """One execution: its descriptors here, its output so far, and why it was ended."""

    def __init__(self, server: ForkServer, limits: ExecutionLimits, deadline: float) -> None:
        self._server, self._limits, self._deadline = server, limits, deadline
        self._texts: dict[int, bytearray] = {}  # stdout, stderr, ending, by descriptor
        self._open: list[int] = []
        self._poll = select.poll()
        self._exceeded: Exceeded | None = None
        self._killed_at = 0.0
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._done: dict[str, Any] | None = None

    @property
    def over(self) -> bool:
        return self._done is not None

    def send(self, mode: str, texts: Sequence[str]) -> None:
        sealed = [_sealed(text) for text in texts]
        pipes = [os.pipe() for _ in range(3)]
        for reader, _ in pipes:
            os.set_blocking(reader, False)
            self._poll.register(reader, select.POLLIN)
            self._texts[reader] = bytearray()
            self._open.append(reader)
        self._poll.register(self._server.socket, select.POLLIN)
        message = json.dumps({"mode": mode, "limits": asdict(self._limits)}).encode()
        theirs = [*sealed[:2], *(writer for _, writer in pipes), *sealed[2:]]
        try:
            socket.send_fds(self._server.socket, [message], theirs)
        finally:
            for each in theirs:
                os.close(each)

    def look(self, seconds: float) -> None:
        """Wait for news of the execution, and end it if it has exceeded a limit."""
        now = time.monotonic()
        wait = max(0.0, min(seconds, self._deadline - now)) if self._exceeded is None else seconds
        for descriptor, _ in self._poll.poll(1000 * wait):
            if descriptor == self._server.socket.fileno():
                message = self._server.socket.recv(1 << 16)
                if not message:
                    raise Gone(self._server.why())
                self._done = json.loads(message)
            else:
                self._read(descriptor)
        now = time.monotonic()
        if self._done is not None:
            for descriptor in self._texts:
                self._read(descriptor)
        elif self._exceeded is not None:
            if now - self._killed_at > GRACE_SECONDS:
                raise Gone("its processes did not die")
        elif exceeded := self._beyond(now):
            self._exceeded, self._killed_at = exceeded, now
            self._server.socket.send(b'"kill"')

    def outcome(self, seconds: float, overflowed: bool) -> Execution:
        out, err, ending = self._texts.values()
        stdout, stderr = (bytes(text).decode(errors="replace") for text in (out, err))
        cpu = self._done["cpu_seconds"] if self._done else 0.0
        report: dict[str, Any] = {}
        with suppress(ValueError):
            report = json.loads(bytes(ending))
        status, detail = self._ending(report, stderr, cpu, overflowed)
        return Execution(status, stdout, stderr, report.get("exit_code"), seconds, cpu, detail, report.get("tests"))

    def close(self) -> None:
        for each in self._open:
            os.close(each)
        self._server.clear_folder()

    def _ending(self, report: dict[str, Any], stderr: str, cpu: float, overflowed: bool) -> tuple[Ending, str]:
        limits = self._limits
        if self._exceeded is not None:
            return self._exceeded
        if overflowed:
            return "memory", f"more than {limits.memory_mb} MiB"
        if failed := report.get("failed"):
            return "sandbox_failed", failed
        by = report.get("signal", signal.SIGKILL if not report else None)
        if by is not None and (by == signal.SIGXCPU or (by == signal.SIGKILL and cpu >= limits.cpu_seconds)):
            return "timeout", f"more than {limits.cpu_seconds} s of CPU time"
        if by is not None:
            return "killed", f"signal {by} ({signal.Signals(by).name})"
        if report.get("exit_code") == 0:
            return "ok", ""
        if stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            return "memory", f"a process needs more than {limits.memory_mb} MiB"
        return "error", f"exit code {report.get('exit_code')}"

    def _read(self, descriptor: int) -> None:
        """Read the available output. Beyond the limits it is dropped."""
        text = self._texts[descriptor]
        while True:
            try:
                read = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            if not read:
                with suppress(KeyError):
                    self._poll.unregister(descriptor)
                return
            text += read[: max(0, MOST_ENDING + (self._limits.output_kb << 10) - len(text))]
            if self._done is None:
                return  # others have their turn

    def _beyond(self, now: float) -> Exceeded | None:
        limits = self._limits
        out, err, _ = self._texts.values()
        if len(out) + len(err) > limits.output_kb << 10:
            return Exceeded("output", f"more than {limits.output_kb} KiB of output")
        if now >= self._deadline:
            return Exceeded("timeout", f"more than {limits.wall_seconds:g} s")
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            if (used := self._server.memory()) > limits.memory_mb << 20:
                return Exceeded("memory", f"{used >> 20} MiB in all processes, more than {limits.memory_mb}")
        return None


def _sealed(text: str) -> int:
    """Return a descriptor of memory that holds a text and cannot be changed."""
    at = os.memfd_create("text", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    left = memoryview(text.encode(errors="replace"))
    while left:
        left = left[os.write(at, left) :]
    os.lseek(at, 0, os.SEEK_SET)
    fcntl.fcntl(at, fcntl.F_ADD_SEALS, SEALS)
    return at


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError, ValueError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _memory(pid: int) -> int:
    """Return a process's memory in bytes, without files on a disk. Shared memory counts in each process that uses
    it."""
    with suppress(OSError, ValueError):
        text = Path(f"/proc/{pid}/status").read_text()
        return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(("RssAnon", "RssShmem")))
    return 0
