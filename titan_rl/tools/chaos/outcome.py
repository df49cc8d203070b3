"""The outcome of a fault: when the run noticed it, when it had recovered, and its mistakes.

injected ── detected: an incident or a failed save is reported ── recovered: every rank is up and training continues
         └─ not detected: faults that must heal silently ──────── recovered: the next step is reached
"""

import time
from dataclasses import dataclass, field

from titan_rl.record.incidents import Incident
from titan_rl.tools.chaos.schedule import Fault
from titan_rl.tools.chaos.subject import ChaosRun


@dataclass(slots=True)
class FaultOutcome:
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


async def replaced(run: ChaosRun, outcome: FaultOutcome, pid: int) -> None:
    """Block until the loss is reported, and then until every rank is up and the run continues, the victim in another
    process than `pid`."""
    victim, since = outcome.fault.victim, outcome.injected
    await run.until(f"the loss of {victim} to be reported", lambda: caused_by(run, outcome))
    outcome.detected = max(0.0, caused_by(run, outcome)[0].time - since)

    def back() -> bool:
        up = run.healthy if outcome.alone else not any(i.open for i in caused_by(run, outcome)) and victim in run.ranks
        return up and run.ranks.get(victim, pid) != pid

    await run.until(f"{victim} to be back", back)
    incidents = caused_by(run, outcome)
    outcome.recovered = max(incident.end for incident in incidents) - since
    outcome.blamed = ", ".join(dict.fromkeys(incident.role for incident in incidents))
    outcome.steps = sum(incident.redone for incident in incidents)
    outcome.samples = sum(incident.resampled for incident in incidents)
    outcome.wrong += [f"{incident.role} was given up" for incident in incidents if incident.outcome == "given up"]
    if outcome.fault.mesh not in [incident.role for incident in incidents]:
        outcome.wrong.append(f"{outcome.blamed} was blamed: {incidents[0].reason}")


async def continued(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Block until the next step starts, and check that no process was replaced."""
    step = run.step
    outcome.recovered = await run.until("the next step", lambda: run.step > step) - outcome.injected
    check_not_replaced(run, outcome)


def check_not_replaced(run: ChaosRun, outcome: FaultOutcome) -> None:
    """Report incidents as wrong, or only as a note if faults overlap: another fault may have caused them."""
    reasons = [
        f"expected that no process is replaced, found: {incident.reason}" for incident in caused_by(run, outcome)
    ]
    if outcome.alone:
        outcome.wrong += reasons
    elif reasons:
        outcome.note = reasons[0]


def caused_by(run: ChaosRun, outcome: FaultOutcome) -> list[Incident]:
    """Return the incidents that the fault caused: all since its injection. If faults overlap: only its mesh's."""
    since = outcome.injected
    if outcome.alone:
        return [incident for incident in run.incidents if incident.time >= since]
    return [i for i in run.incidents if i.role == outcome.fault.mesh and (i.open or i.end >= since)]
