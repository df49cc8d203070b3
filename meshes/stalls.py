"""Report why a call is not answered: this process's open calls, and the stacks of the silent processes.

    controller waits on trainer[dp=1 tp=0] for step since 61 s (deadline 60 s)
    trainer[dp=0 tp=0], process 9886: sleeping, 41.2 s of CPU, 0.0 cores busy
      Thread 9896 (idle): "monarch-actor-event-loop"
        all_reduce (torch/distributed/distributed_c10d.py:3012)
        _all_reduce (actors/titan/reduction.py:108)
        ...
      3 threads wait for work
    trainer[dp=1 tp=0], process 9887: stopped by a signal, 40.9 s of CPU, 0.0 cores busy
      ...

Covers processes of this host only. Nothing here stops a process or waits for one: py-spy reads its memory as it runs.
"""

import asyncio
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

DUMP_SECONDS = 10.0
TRIES = 3  # a running process may change while py-spy reads it
MAX_LINES = 40  # per process
MAX_WAITS = 12
BUSY_SECONDS = 0.25  # shortest time over which the CPU use of a process is measured

STATES = {
    psutil.STATUS_DISK_SLEEP: "in an uninterruptible wait (a disk or a device)",
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_ZOMBIE: "dead, not yet reaped",
}
"""Words for psutil's statuses that do not explain themselves."""

MACHINERY = (
    *("(<frozen ", "(threading.py:", "(asyncio/", "(selectors.py:", "(monarch/_src/"),
    *("(torch/nn/modules/module.py:", "(torch/utils/_contextlib.py:", "(torch/_dynamo/eval_frame.py:"),
)
"""Frames of event loops, threads and wrappers, which call the interesting ones."""
WORKERS = ("(queue.py:", "(concurrent/futures/thread.py:")
"""A thread whose top frame is in one of these files waits for work."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A call to an actor that has not been answered."""

    actor: str  # "trainer[dp=1 tp=0]"
    verb: str
    since: float  # time.monotonic()
    seconds: float | None = None  # the deadline

    def __str__(self) -> str:
        deadline = "no deadline" if self.seconds is None else f"deadline {self.seconds:g} s"
        waited = f"{time.monotonic() - self.since:.0f} s ({deadline})"
        return f"controller waits on {self.actor} for {self.verb} since {waited}"


class Process(NamedTuple):
    """State and CPU time of a process at one moment."""

    state: str
    cpu: float  # seconds, over all its threads

    @classmethod
    def of(cls, pid: int) -> "Process":
        try:
            process = psutil.Process(pid)
            state, cpu = process.status(), process.cpu_times()
        except psutil.NoSuchProcess:
            return cls("gone", 0.0)
        return cls(STATES.get(state, state), cpu.user + cpu.system)


async def report(wait: Wait, waits: Iterable[Wait], ranks: Mapping[str, int]) -> str:
    """Describe the overdue `wait`, the other `waits` of this process, and the processes of the same mesh.

    `ranks` has this host's processes by name. Takes at most DUMP_SECONDS, also if processes hang or are stopped."""
    others = sorted((other for other in waits if other != wait), key=lambda other: other.since)
    lines = [str(wait), *(f"also: {other}" for other in others[:MAX_WAITS])]
    if len(others) > MAX_WAITS:
        lines.append(f"also: {len(others) - MAX_WAITS} more waits")
    peers = {name: pid for name, pid in ranks.items() if name.partition("[")[0] == wait.actor.partition("[")[0]}
    if wait.actor not in peers:
        lines.append(f"{wait.actor} has no process on this host to look into")
    before, began = {name: Process.of(pid) for name, pid in peers.items()}, time.monotonic()
    dumps, _ = await asyncio.gather(stacks(peers), asyncio.sleep(BUSY_SECONDS))
    for name, pid in peers.items():
        now = Process.of(pid)
        busy = max(0.0, now.cpu - before[name].cpu) / (time.monotonic() - began)
        lines.append(f"{name}, process {pid}: {now.state}, {now.cpu:.1f} s of CPU, {busy:.1f} cores busy")
        lines += [f"  {line}" for line in dumps[name].splitlines()]
    return "\n".join(lines)


async def stacks(ranks: Mapping[str, int], py_spy: str | None = None) -> dict[str, str]:
    """Return py-spy's dump of each process; if py-spy fails, the reason and where threads wait in the kernel."""
    installed = Path(sys.executable).with_name("py-spy")
    tool = py_spy or (str(installed) if installed.exists() else shutil.which("py-spy"))
    dumps = await asyncio.gather(*(asyncio.to_thread(_stack, pid, tool) for pid in ranks.values()))
    return dict(zip(ranks, dumps, strict=True))


def _stack(pid: int, tool: str | None) -> str:
    if tool is None:
        return f"py-spy is not installed (pip install py-spy); {kernel_waits(pid)}"
    command, deadline, reason = [tool, "dump", "--pid", str(pid), "--nonblocking"], time.monotonic() + DUMP_SECONDS, ""
    try:
        for _ in range(TRIES):
            limit = max(0.0, deadline - time.monotonic())
            dump = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit
            )
            if dump.returncode == 0:
                return excerpt(dump.stdout)
            reason = dump.stderr
    except subprocess.TimeoutExpired:
        reason = f"no answer within {DUMP_SECONDS:g} s"
    except OSError as error:
        reason = str(error)
    return f"py-spy shows no stack ({' '.join(reason.split()) or 'no message'}); {kernel_waits(pid)}"


def excerpt(dump: str) -> str:
    """Return the busy threads of a py-spy dump, without the frames of MACHINERY."""
    threads = [block.splitlines() for block in dump.split("\nThread ")[1:]]
    shown: list[str] = []
    idle = 0
    for head, *frames in threads:
        own = [frame for frame in frames if not any(part in frame for part in MACHINERY)]
        if own and not any(part in own[0] for part in WORKERS):
            shown += [f"Thread {head}", *(f"  {frame.strip()}" for frame in own)]
        else:
            idle += 1
    if len(shown) > MAX_LINES:
        shown = [*shown[: MAX_LINES - 1], f"  ... {len(shown) - MAX_LINES + 1} lines more"]
    return "\n".join([*shown, f"{idle} threads wait for work"] if idle else shown)


def kernel_waits(pid: int) -> str:
    """Describe in which kernel functions the threads of a process wait."""
    waits: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/task").glob("*/wchan"):
        with suppress(OSError):  # the thread is gone, or reading it is not permitted
            where = path.read_text().strip()
            waits["no known function" if where in ("", "0") else where] += 1
    counts = ", ".join(f"{count} in {where}" for where, count in waits.most_common())
    return f"its threads are in the kernel: {counts}" if counts else "the kernel does not show where its threads are"
