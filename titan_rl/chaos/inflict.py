"""How each fault is brought about, and when a run counts as over it.

injected ── detected: an incident is told, or a failed save ── recovered: everybody is up, the work is under way
         └─ never, of what must heal silently ──────────────── recovered: the next step is made
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
from titan_rl.chaos.subject import ChaosRun, FaultLine
from titan_rl.wire.failpoints import FaultOrder, give

BURSTS, BURST, GAP_SECONDS = 3, 0.3, 0.3  # of fault.hang_seconds
FOREVER = 1e9
HOLD_SECONDS = 1.5  # readers wait so long at their door, while what they came for is damaged
FULL_SECONDS = 1.0  # a disk stays full after it was noticed
ROOM = 4096  # bytes that may then be written to a file beyond what a snapshot needs, which takes no disk
DAMAGE = 64  # bytes
PAGE = 4096  # of a trainer's staging memory, before its two slots: the stamps (actors/sync/transport.py)


@dataclass(slots=True)
class Outcome:
    """What became of a fault."""

    fault: Fault
    step: int  # in hand when it was injected
    alone: bool = True  # no other fault was under repair
    injected: float = field(default_factory=time.time)
    detected: float | None = None  # seconds after that; None: nobody had to
    recovered: float | None = None
    blamed: str = ""  # who was said to be lost
    steps: int = 0  # made again
    samples: int = 0  # begun anew
    wrong: list[str] = field(default_factory=list)
    note: str = ""


async def inflict(fault: Fault, run: ChaosRun, hang_seconds: float, outcome: Outcome) -> None:
    """Bring it about and see the run over it. Fills in `outcome` as it goes."""
    how: dict[Kind, Callable[[], Awaitable[None]]] = {
        "kill": lambda: _signalled(signal.SIGKILL, run, outcome),
        "stop": lambda: _signalled(signal.SIGSTOP, run, outcome),
        "slow": lambda: _slow(run, outcome, hang_seconds),
        "error": lambda: _ordered(run, outcome, fault.point, FaultOrder("raise")),
        "drop": lambda: _ordered(run, outcome, "read", FaultOrder("wait", FOREVER)),
        "corrupt": lambda: (_damaged if fault.role == "generator" else _staged)(run, outcome),
        "disk": lambda: _full(run, outcome),
    }
    await how[fault.kind]()


async def _signalled(number: signal.Signals, run: ChaosRun, outcome: Outcome) -> None:
    pid = run.ranks[outcome.fault.victim]
    outcome.injected = time.time()
    os.kill(pid, number)
    await _replaced(run, outcome, pid)


async def _ordered(run: ChaosRun, outcome: Outcome, point: str, order: FaultOrder) -> None:
    pid = run.ranks[outcome.fault.victim]
    outcome.injected = await _obeyed(run, outcome.fault.victim, point, order)
    await _replaced(run, outcome, pid)


async def _slow(run: ChaosRun, outcome: Outcome, hang_seconds: float) -> None:
    pid = run.ranks[outcome.fault.victim]
    outcome.injected = time.time()
    with suppress(ProcessLookupError):  # replaced, which is told below
        for _ in range(BURSTS):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(BURST * hang_seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(GAP_SECONDS)
    await _went_on(run, outcome)


async def _damaged(run: ChaosRun, outcome: Outcome) -> None:
    """What was written into live parameters, once: found by its checksum, and fetched again."""
    outcome.injected = await _obeyed(run, outcome.fault.victim, "put", FaultOrder("damage"))
    await _went_on(run, outcome)
    outcome.note = outcome.note or "healed by a second fetch"


async def _staged(run: ChaosRun, outcome: Outcome) -> None:
    """What a trainer rank has packed and summed up, before anybody reads it."""
    readers = [rank for rank in run.ranks if role_of(rank) == "generator"]
    held = FaultOrder("wait", HOLD_SECONDS)
    await asyncio.gather(*(_obeyed(run, rank, "read", held) for rank in readers))
    outcome.injected = time.time()
    _damage_staging(run.ranks[outcome.fault.victim])
    await _went_on(run, outcome)
    outcome.note = outcome.note or "healed by packing again"


async def _full(run: ChaosRun, outcome: Outcome) -> None:
    """A limit on the size of files, which the kernel puts on memory files too."""
    pid, room = run.ranks[outcome.fault.victim], ROOM + _snapshot_size(run.process.pid, outcome.fault.mesh)
    outcome.injected = time.time()
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, hard))
    failed = re.compile(r"the checkpoint of step (\d+) failed")

    def told() -> re.Match[str] | None:
        found = (failed.search(words.text) for words in run.words if words.time > outcome.injected)
        return next((match for match in found if match), None)

    try:
        detected = await run.until(
            "a checkpoint to fail", lambda: told() or run.ranks.get(outcome.fault.victim, pid) != pid
        )
        if told():
            outcome.detected = detected - outcome.injected
            await asyncio.sleep(FULL_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    if (match := told()) is not None:
        step, lifted = int(match[1]), run.step
        saved = await run.until("a checkpoint", lambda: run.saved > max(step, lifted - 1))
        outcome.recovered = saved - outcome.injected
        outcome.blamed = outcome.fault.mesh
        outcome.note = f"step {step} was not saved, step {run.saved} was"
    _nobody_replaced(run, outcome)


async def _obeyed(run: ChaosRun, rank: str, point: str, order: FaultOrder) -> float:
    given = time.time()
    give(run.orders, rank, point, order)

    def hits() -> list[float]:
        return [hit.time for hit in run.hits if (hit.rank, hit.point) == (rank, point) and hit.time >= given]

    await run.until(f"{rank} to come to {point}", hits)
    return hits()[0]


async def _replaced(run: ChaosRun, outcome: Outcome, pid: int | None) -> None:
    """Somebody is told to be lost, and in the end all are up and the run goes on; the victim in another process than
    `pid`."""
    victim, since = outcome.fault.victim, outcome.injected
    await run.until(f"{victim} to be missed", lambda: _incidents(run, outcome))
    outcome.detected = max(0.0, _incidents(run, outcome)[0].time - since)

    def back() -> bool:
        up = run.whole if outcome.alone else not any(i.open for i in _incidents(run, outcome)) and victim in run.ranks
        return up and (pid is None or run.ranks.get(victim, pid) != pid)

    await run.until(f"{victim} to be back", back)
    found = _incidents(run, outcome)
    outcome.recovered = max(incident.end for incident in found) - since
    outcome.blamed = ", ".join(dict.fromkeys(incident.who for incident in found))
    outcome.steps = sum(incident.redone for incident in found)
    outcome.samples = sum(_begun_anew(run, since, who) for who in {incident.who for incident in found})
    outcome.wrong += [f"{incident.who} was given up" for incident in found if incident.outcome == "given up"]
    if pid is not None and outcome.fault.mesh not in [incident.who for incident in found]:
        outcome.wrong.append(f"{outcome.blamed} was blamed: {found[0].why}")


async def _went_on(run: ChaosRun, outcome: Outcome) -> None:
    """The step after the one in hand is begun, and nobody was replaced."""
    step = run.step
    recovered = await run.until("the next step", lambda: run.step > step)
    outcome.recovered = recovered - outcome.injected
    _nobody_replaced(run, outcome)


def _nobody_replaced(run: ChaosRun, outcome: Outcome) -> None:
    """Where faults overlap, another one may be why."""
    found = [f"expected nobody to be replaced, found: {incident.why}" for incident in _incidents(run, outcome)]
    if outcome.alone:
        outcome.wrong += found
    elif found:
        outcome.note = found[0]


def _incidents(run: ChaosRun, outcome: Outcome) -> list[FaultLine]:
    """That it brought about: all since, or where faults overlap those of its mesh that were not over."""
    since = outcome.injected
    if outcome.alone:
        return [incident for incident in run.incidents if incident.time >= since]
    return [i for i in run.incidents if i.who == outcome.fault.mesh and (i.open or i.end >= since)]


def _begun_anew(run: ChaosRun, since: float, who: str) -> int:
    found = (re.search(rf"\b{who} is back.* (\d+) samples", words.text) for words in run.words if words.time >= since)
    return sum(int(match[1]) for match in found if match)


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
    """Of the largest part, where the controller keeps any."""
    return max((part.stat().st_size for part in _memory(controller, f"titan_rl snapshot of {mesh}")), default=0)


def _memory(pid: int, name: str) -> list[Path]:
    """A process's memory files of a name."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(fd).startswith(f"/memfd:{name} "):
                found.append(fd)
    return found
