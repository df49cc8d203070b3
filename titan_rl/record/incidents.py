"""What failed during a run and what was done about it: faults.jsonl, a line on the terminal, and a budget.

lost (who, why) ── respawned ── back (after so many seconds, with so much work to do again)
               └── given up: the run goes on with less, or ends
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_rl.config.sections import FaultSection
from titan_rl.wire.errors import DeadlinePassed, RunError

NAME = "faults.jsonl"
ROLLBACK = "rollback"  # a role of its own: what was lost are steps


@dataclass(slots=True)
class Incident:
    who: str  # "generator1", or a mesh: "trainer"
    why: str
    time: float  # when it was known
    outcome: str = ""  # "back", "given up"; none yet
    seconds: float = 0.0  # until then
    redone: int = 0  # steps
    anew: int = 0  # samples


class Incidents:
    def __init__(self, folder: Path, fault: FaultSection, say: Callable[[str], None]) -> None:
        self.all: list[Incident] = []
        self._path = folder / NAME
        self._fault = fault
        self._say = say
        self._lately: dict[str, deque[float]] = {}

    def lost(self, who: str, error: RunError) -> Incident:
        """Tell of it. `may_respawn` says what to do about it."""
        incident = Incident(who, str(error), time.time())
        self.all.append(incident)
        self._write(incident, error.details)
        self._say(f"{incident.why}\n{error.details}" if isinstance(error, DeadlinePassed) else incident.why)
        return incident

    def never_respawns(self, replicas: int) -> bool:
        """Whether the loss of one of so many replicas is the end, without more ado."""
        return self._fault.max_restarts == 0 and replicas <= self._fault.min_replicas

    def may_respawn(self, role: str) -> bool:
        """Whether the budget of a role allows for one more respawn, which it then counts."""
        lately, now = self._lately.setdefault(role, deque()), time.monotonic()
        while lately and now - lately[0] > self._fault.restart_window_seconds:
            lately.popleft()
        if len(lately) >= self._fault.max_restarts:
            return False
        lately.append(now)
        return True

    def over_budget(self, role: str, error: RunError) -> RunError:
        """Why the run ends after all."""
        f = self._fault
        if f.max_restarts == 0:
            return error
        what = "the run went back" if role == ROLLBACK else f"{role} was respawned"
        times = f"{f.max_restarts} time{'s' * (f.max_restarts != 1)}"
        return RunError(
            f"{error}; {what} {times} within {f.restart_window_seconds:g} s already",
            error.details or "fault.max_restarts and fault.restart_window_seconds set how often that may be.",
        )

    def back(self, incident: Incident, what: str, redone: int = 0, anew: int = 0) -> None:
        incident.redone, incident.anew = redone, anew
        self._end(incident, "back")
        again = f"; {redone} step{'s' * (redone != 1)} to do again" if redone else ""
        self._say(f"{incident.who} is back after {incident.seconds:.1f} s: {what}{again}")

    def given_up(self, incident: Incident, what: str) -> None:
        self._end(incident, "given up")
        self._say(f"{incident.who} is not replaced: {what}")

    def note(self, text: str) -> None:
        """Something worth a line that costs nobody anything."""
        self._say(text)

    @property
    def restarts(self) -> dict[str, int]:
        """By who."""
        return dict(Counter(incident.who for incident in self.all if incident.outcome == "back"))

    def _end(self, incident: Incident, outcome: str) -> None:
        incident.outcome = outcome
        incident.seconds = time.time() - incident.time
        self._write(incident)

    def _write(self, incident: Incident, details: str = "") -> None:
        line = asdict(incident) | ({"details": details} if details else {})
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
