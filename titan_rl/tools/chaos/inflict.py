"""Injects each fault of a rank. controller_faults.py injects the faults of the controller."""

import asyncio
import os
import re
import resource
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil

from titan_rl.tools.chaos import controller_faults as controller
from titan_rl.tools.chaos.outcome import FaultOutcome, check_not_replaced, continued, replaced
from titan_rl.tools.chaos.schedule import Fault, Kind, role_of
from titan_rl.tools.chaos.subject import ChaosRun
from titan_rl.wire.failpoints import FaultOrder, give

BURSTS, BURST, GAP_SECONDS = 3, 0.3, 0.3  # BURST: times fault.hang_seconds
FOREVER = 1e9
HOLD_SECONDS = 1.5  # readers wait this long before they read, while the staged weights are damaged
FULL_SECONDS = 1.0  # the disk stays full this long after the failure is detected
ROOM = 4096  # bytes that may be written to a file beyond the size of a snapshot, which takes no disk
DAMAGE = 64  # bytes
PAGE = 4096  # bytes of stamps before the two slots in a trainer's staging memory (actors/sync/transport.py)


async def inflict(fault: Fault, run: ChaosRun, hang_seconds: float, outcome: FaultOutcome) -> None:
    """Inject the fault, wait until the run has recovered, and fill in `outcome` meanwhile."""
    how: dict[Kind, Callable[[], Awaitable[None]]] = {
        "kill": lambda: _send_signal(signal.SIGKILL, run, outcome),
        "stop": lambda: _send_signal(signal.SIGSTOP, run, outcome),
        "pair": lambda: _kill_pair(run, outcome),
        "server": lambda: _harm_fork_server(run, outcome),
        "slow": lambda: _slow_down(run, outcome, hang_seconds),
        "error": lambda: _order_fault(run, outcome, fault.point, FaultOrder("raise")),
        "drop": lambda: _order_fault(run, outcome, "read", FaultOrder("wait", FOREVER)),
        "corrupt": lambda: (_damage_written if fault.role == "generator" else _damage_staged)(run, outcome),
        "disk": lambda: _fill_disk(run, outcome),
        "poison": lambda: _poison(run, outcome),
        "crash": lambda: controller.crash(run, outcome),
        "freeze": lambda: controller.freeze(run, outcome, hang_seconds),
        "preempt": lambda: controller.preempt(run, outcome),
        "full": lambda: controller.fill_disk(run, outcome),
        "second": lambda: controller.start_second(run, outcome),
    }
    await how[fault.kind]()


async def _send_signal(number: signal.Signals, run: ChaosRun, outcome: FaultOutcome) -> None:
    pid = run.ranks[outcome.fault.victim]
    outcome.injected = time.time()
    os.kill(pid, number)
    await replaced(run, outcome, pid)


async def _kill_pair(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Kill the victim and a generator rank: no replica may serve when the trainers are back."""
    pid = run.ranks[outcome.fault.victim]
    outcome.injected = time.time()
    for victim in (pid, next(pid for rank, pid in run.ranks.items() if role_of(rank) == "generator")):
        os.kill(victim, signal.SIGKILL)
    await replaced(run, outcome, pid)


async def _harm_fork_server(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Kill the process that forked the victim, or stop it and kill the victim."""
    pid = run.ranks[outcome.fault.victim]
    server = psutil.Process(pid).parent()
    outcome.injected = time.time()
    if server is not None and any(part.endswith("fork_server.py") for part in server.cmdline()):
        server.send_signal(signal.SIGSTOP if outcome.fault.point == "stop" else signal.SIGKILL)
    else:
        outcome.note = "the rank had started cold, and was killed itself"
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    await replaced(run, outcome, pid)


async def _order_fault(run: ChaosRun, outcome: FaultOutcome, point: str, order: FaultOrder) -> None:
    pid = run.ranks[outcome.fault.victim]
    outcome.injected = await _obeyed(run, outcome.fault.victim, point, order)
    await replaced(run, outcome, pid)


async def _slow_down(run: ChaosRun, outcome: FaultOutcome, hang_seconds: float) -> None:
    pid = run.ranks[outcome.fault.victim]
    outcome.injected = time.time()
    with suppress(ProcessLookupError):  # it was replaced, which continued reports
        for _ in range(BURSTS):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(BURST * hang_seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(GAP_SECONDS)
    await continued(run, outcome)


async def _damage_written(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Damage weights once as they are written into live parameters: the checksum finds it, and they are read again."""
    outcome.injected = await _obeyed(run, outcome.fault.victim, "put", FaultOrder("damage"))
    await continued(run, outcome)
    outcome.note = outcome.note or "healed by a second fetch"


async def _poison(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Have a generator refuse a request. Its group is dropped and replaced; the replica serves the others."""
    outcome.injected = await _obeyed(run, outcome.fault.victim, "admit", FaultOrder("damage"))
    await continued(run, outcome)


async def _damage_staged(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Damage what a trainer rank has packed and checksummed, before any generator reads it."""
    readers = [rank for rank in run.ranks if role_of(rank) == "generator"]
    delay = FaultOrder("wait", HOLD_SECONDS)
    await asyncio.gather(*(_obeyed(run, rank, "read", delay) for rank in readers))
    outcome.injected = time.time()
    _damage_staging(run.ranks[outcome.fault.victim])
    await continued(run, outcome)
    outcome.note = outcome.note or "healed by packing again"


async def _fill_disk(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Limit the size of files that a trainer rank may write; the kernel applies the limit to memory files too."""
    pid, room = run.ranks[outcome.fault.victim], ROOM + _snapshot_size(run.process.pid, outcome.fault.mesh)
    outcome.injected = time.time()
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, hard))
    failed = re.compile(r"the checkpoint of step (\d+) failed")

    def reported() -> re.Match[str] | None:
        matches = (failed.search(line.text) for line in run.output if line.time > outcome.injected)
        return next((match for match in matches if match), None)

    try:
        detected = await run.until(
            "a checkpoint to fail", lambda: reported() or run.ranks.get(outcome.fault.victim, pid) != pid
        )
        if reported():
            outcome.detected = detected - outcome.injected
            await asyncio.sleep(FULL_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    match = reported()
    if match is not None:
        step, lifted = int(match[1]), run.step
        until_saved = run.until("a checkpoint", lambda: run.saved > max(step, lifted - 1))
        outcome.recovered = await until_saved - outcome.injected
        outcome.blamed = outcome.fault.mesh
        outcome.note = f"step {step} was not saved, step {run.saved} was"
    check_not_replaced(run, outcome)


async def _obeyed(run: ChaosRun, rank: str, point: str, order: FaultOrder) -> float:
    """Give an order, block until the failpoint carries it out, and return that time."""
    ordered_at = time.time()
    give(run.orders, rank, point, order)

    def hits() -> list[float]:
        return [hit.time for hit in run.hits if (hit.rank, hit.point) == (rank, point) and hit.time >= ordered_at]

    await run.until(f"{rank} to reach {point}", hits)
    return hits()[0]


def _damage_staging(pid: int) -> None:
    """Flip bytes of the newest publication in a trainer rank's staging memory: [stamps | slot 0 | slot 1]."""
    for staging in _memory(pid, "titan_rl weights"):
        with staging.open("r+b", buffering=0) as memory:
            size = memory.seek(0, os.SEEK_END)
            stamps = memoryview(os.pread(memory.fileno(), 16, 0)).cast("q")
            start = PAGE + max((0, 1), key=lambda slot: stamps[slot]) * (size - PAGE) // 2
            old = os.pread(memory.fileno(), DAMAGE, start)
            os.pwrite(memory.fileno(), bytes(byte ^ 0xFF for byte in old), start)


def _snapshot_size(controller: int, mesh: str) -> int:
    """Return the bytes of the largest part of a mesh's snapshot in the controller, 0 without a snapshot."""
    return max((part.stat().st_size for part in _memory(controller, f"titan_rl snapshot of {mesh}")), default=0)


def _memory(pid: int, name: str) -> list[Path]:
    """Return the memory files with this name that a process has open."""
    files = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(fd).startswith(f"/memfd:{name} "):
                files.append(fd)
    return files
