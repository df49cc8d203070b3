"""How each fault is injected, and when a run counts as recovered from it.

injected ── detected: an incident or a failed save is reported ── recovered: every rank is up and training continues
         └─ not detected: faults that must heal silently ──────── recovered: the next step is reached
"""

import asyncio
import os
import re
import resource
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.chaos.schedule import Fault, Kind, role_of
from titan_rl.chaos.subject import ChaosRun
from titan_rl.record.incidents import Incident
from titan_rl.wire.failpoints import FaultOrder, give

BURSTS, BURST, GAP_SECONDS = 3, 0.3, 0.3  # of fault.hang_seconds
FOREVER = 1e9
HOLD_SECONDS = 1.5  # readers wait this long before they read, while the staged weights are damaged
FULL_SECONDS = 1.0  # the disk stays full this long after the failure is detected
ROOM = 4096  # bytes that may be written to a file beyond the size of a snapshot, which takes no disk
DAMAGE = 64  # bytes
PAGE = 4096  # bytes of stamps before the two slots in a trainer's staging memory (actors/sync/transport.py)


@dataclass(slots=True)
class Outcome:
    fault: Fault
    step: int  # current when it was injected
    alone: bool = True  # faults do not overlap
    injected: float = field(default_factory=time.time)
    detected: float | None = None  # seconds after the injection; None if the fault needs no detection
    recovered: float | None = None  # seconds after the injection
    blamed: str = ""  # roles that were reported as lost
    steps: int = 0  # steps repeated
    samples: int = 0  # samples repeated
    wrong: list[str] = field(default_factory=list)
    note: str = ""


async def inflict(fault: Fault, run: ChaosRun, hang_seconds: float, outcome: Outcome) -> None:
    """Inject the fault, wait until the run has recovered, and fill in `outcome` meanwhile."""
    how: dict[Kind, Callable[[], Awaitable[None]]] = {
        "kill": lambda: _send_signal(signal.SIGKILL, run, outcome),
        "stop": lambda: _send_signal(signal.SIGSTOP, run, outcome),
        "slow": lambda: _slow_down(run, outcome, hang_seconds),
        "error": lambda: _order_fault(run, outcome, fault.point, FaultOrder("raise")),
        "drop": lambda: _order_fault(run, outcome, "read", FaultOrder("wait", FOREVER)),
        "corrupt": lambda: (_damage_written if fault.role == "generator" else _damage_staged)(run, outcome),
        "disk": lambda: _fill_disk(run, outcome),
    }
    await how[fault.kind]()


async def _send_signal(number: signal.Signals, run: ChaosRun, outcome: Outcome) -> None:
    pid = run.ranks[outcome.fault.victim]
    outcome.injected = time.time()
    os.kill(pid, number)
    await _replaced(run, outcome, pid)


async def _order_fault(run: ChaosRun, outcome: Outcome, point: str, order: FaultOrder) -> None:
    pid = run.ranks[outcome.fault.victim]
    outcome.injected = await _obeyed(run, outcome.fault.victim, point, order)
    await _replaced(run, outcome, pid)


async def _slow_down(run: ChaosRun, outcome: Outcome, hang_seconds: float) -> None:
    pid = run.ranks[outcome.fault.victim]
    outcome.injected = time.time()
    with suppress(ProcessLookupError):  # it was replaced, which _continued reports
        for _ in range(BURSTS):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(BURST * hang_seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(GAP_SECONDS)
    await _continued(run, outcome)


async def _damage_written(run: ChaosRun, outcome: Outcome) -> None:
    """Damage weights once as they are written into live parameters: the checksum finds it, and they are read again."""
    outcome.injected = await _obeyed(run, outcome.fault.victim, "put", FaultOrder("damage"))
    await _continued(run, outcome)
    outcome.note = outcome.note or "healed by a second fetch"


async def _damage_staged(run: ChaosRun, outcome: Outcome) -> None:
    """Damage what a trainer rank has packed and checksummed, before any generator reads it."""
    readers = [rank for rank in run.ranks if role_of(rank) == "generator"]
    held = FaultOrder("wait", HOLD_SECONDS)
    await asyncio.gather(*(_obeyed(run, rank, "read", held) for rank in readers))
    outcome.injected = time.time()
    _damage_staging(run.ranks[outcome.fault.victim])
    await _continued(run, outcome)
    outcome.note = outcome.note or "healed by packing again"


async def _fill_disk(run: ChaosRun, outcome: Outcome) -> None:
    """Limit the size of files that a trainer rank may write; the kernel applies the limit to memory files too."""
    pid, room = run.ranks[outcome.fault.victim], ROOM + _snapshot_size(run.process.pid, outcome.fault.mesh)
    outcome.injected = time.time()
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, hard))
    failed = re.compile(r"the checkpoint of step (\d+) failed")

    def reported() -> re.Match[str] | None:
        found = (failed.search(line.text) for line in run.output if line.time > outcome.injected)
        return next((match for match in found if match), None)

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
    if (match := reported()) is not None:
        step, lifted = int(match[1]), run.step
        until_saved = run.until("a checkpoint", lambda: run.saved > max(step, lifted - 1))
        outcome.recovered = await until_saved - outcome.injected
        outcome.blamed = outcome.fault.mesh
        outcome.note = f"step {step} was not saved, step {run.saved} was"
    _check_not_replaced(run, outcome)


async def _obeyed(run: ChaosRun, rank: str, point: str, order: FaultOrder) -> float:
    """Give an order, block until the failpoint carries it out, and return that time."""
    given = time.time()
    give(run.orders, rank, point, order)

    def hits() -> list[float]:
        return [hit.time for hit in run.hits if (hit.rank, hit.point) == (rank, point) and hit.time >= given]

    await run.until(f"{rank} to reach {point}", hits)
    return hits()[0]


async def _replaced(run: ChaosRun, outcome: Outcome, pid: int) -> None:
    """Block until the loss is reported, and then until every rank is up and the run continues, the victim in another
    process than `pid`."""
    victim, since = outcome.fault.victim, outcome.injected
    await run.until(f"the loss of {victim} to be reported", lambda: _incidents(run, outcome))
    outcome.detected = max(0.0, _incidents(run, outcome)[0].time - since)

    def back() -> bool:
        up = run.healthy if outcome.alone else not any(i.open for i in _incidents(run, outcome)) and victim in run.ranks
        return up and run.ranks.get(victim, pid) != pid

    await run.until(f"{victim} to be back", back)
    found = _incidents(run, outcome)
    outcome.recovered = max(incident.end for incident in found) - since
    outcome.blamed = ", ".join(dict.fromkeys(incident.role for incident in found))
    outcome.steps = sum(incident.redone for incident in found)
    outcome.samples = sum(incident.resampled for incident in found)
    outcome.wrong += [f"{incident.role} was given up" for incident in found if incident.outcome == "given up"]
    if outcome.fault.mesh not in [incident.role for incident in found]:
        outcome.wrong.append(f"{outcome.blamed} was blamed: {found[0].reason}")


async def _continued(run: ChaosRun, outcome: Outcome) -> None:
    """Block until the next step starts, and check that no process was replaced."""
    step = run.step
    outcome.recovered = await run.until("the next step", lambda: run.step > step) - outcome.injected
    _check_not_replaced(run, outcome)


def _check_not_replaced(run: ChaosRun, outcome: Outcome) -> None:
    """Report incidents as wrong, or only as a note if faults overlap: another fault may have caused them."""
    found = [f"expected that no process is replaced, found: {incident.reason}" for incident in _incidents(run, outcome)]
    if outcome.alone:
        outcome.wrong += found
    elif found:
        outcome.note = found[0]


def _incidents(run: ChaosRun, outcome: Outcome) -> list[Incident]:
    """Return the incidents that the fault caused: all since its injection. If faults overlap, those of its mesh."""
    since = outcome.injected
    if outcome.alone:
        return [incident for incident in run.incidents if incident.time >= since]
    return [i for i in run.incidents if i.role == outcome.fault.mesh and (i.open or i.end >= since)]


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
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(fd).startswith(f"/memfd:{name} "):
                found.append(fd)
    return found
