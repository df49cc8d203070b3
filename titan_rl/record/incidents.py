"""Records the failures of a run and their outcomes: faults.jsonl, a line on the terminal, and a restart budget.

lost (role, reason) ── respawned ── back (after N seconds, with N steps or samples to repeat)
                    └── given up: the run continues with fewer replicas, or ends
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from titan_rl.config.sections import FaultSection
from titan_rl.record.lines import LineFile, Unwritable, encode
from titan_rl.record.run_names import FAULTS
from titan_rl.wire.errors import DeadlinePassed, RunError

KEYS = (
    "who",
    "why",
    "time",
    "outcome",
    "seconds",
    "redone",
    "anew",
)  # in faults.jsonl, in the order of Incident's fields
ROLLBACK = "rollback"  # the role of an incident that lost steps and no process


@dataclass(slots=True)
class Incident:
    role: str  # "generator1", or a mesh: "trainer"
    reason: str
    time: float  # when it was detected
    outcome: str = ""  # "back" or "given up"; "" while it is open
    seconds: float = 0.0  # from `time` to the outcome
    redone: int = 0  # steps to repeat
    resampled: int = 0  # samples to repeat

    @property
    def open(self) -> bool:
        return not self.outcome

    @property
    def end(self) -> float:
        return self.time + self.seconds

    def record(self) -> dict[str, Any]:
        """Return the incident as faults.jsonl and `ctl RUN status` show it."""
        return dict(zip(KEYS, astuple(self), strict=True))


RESTART_WINDOW_SECONDS = 600.0
"""Length of the window in which fault.max_restarts counts."""


class Incidents:
    def __init__(
        self, folder: Path, fault: FaultSection, say: Callable[[str], None], needed: Path | None = None
    ) -> None:
        """`needed`: the folder that each new process reads."""
        self._needed = needed
        self.all: list[Incident] = []
        self.observers: list[Callable[[str], None]] = []  # each is called with the reason of every loss
        self._path = folder / FAULTS
        self._fault = fault
        self._say = self.note = say  # `note` shows a message about something that is no incident
        self._unwritten: list[bytes] = []  # lines that the disk refused, tried again with the next
        self._noticed: dict[int, float] = {}  # by id: when, on the monotonic clock
        self._recent: dict[str, deque[float]] = {}  # respawns within the window, by role

    def lost(self, role: str, error: RunError) -> Incident:
        """Record the loss of a process, a mesh or steps. `may_respawn` decides what to do about it."""
        incident = Incident(role, str(error), time.time())
        self.all.append(incident)
        self._noticed[id(incident)] = time.monotonic()
        self._write(incident, error.details)
        self._say(f"{incident.reason}\n{error.details}" if isinstance(error, DeadlinePassed) else incident.reason)
        for observer in self.observers:
            observer(incident.reason)
        return incident

    def never_respawns(self, replicas: int) -> bool:
        """Return True if losing one of `replicas` must end the run: respawning is disabled and only min_replicas are
        left."""
        return self._fault.max_restarts == 0 and replicas <= self._fault.min_replicas

    def may_respawn(self, role: str, *, counts: bool = True) -> bool:
        """Return True, and count one more respawn, if the role's budget allows it. One that does not count is allowed
        unless respawning is disabled."""
        if not counts:
            return self._fault.max_restarts > 0
        if self.left(role) <= 0 or self._gone:
            return False
        self._recent[role].append(time.monotonic())
        return True

    @property
    def _gone(self) -> bool:
        return self._needed is not None and not self._needed.is_dir()

    def left(self, role: str) -> int:
        """Return how many respawns the role's budget still allows."""
        recent, now = self._recent.setdefault(role, deque()), time.monotonic()
        while recent and now - recent[0] > RESTART_WINDOW_SECONDS:
            recent.popleft()
        return self._fault.max_restarts - len(recent)

    def over_budget(self, role: str, error: RunError) -> RunError:
        """Return the error that ends the run once a role's budget is used up."""
        fault = self._fault
        if fault.max_restarts == 0:
            return error
        if self._gone:
            return RunError(
                f"{error}; {self._needed}, from which it would start again, was removed",
                "Restore the folder: the same command then resumes.",
            )
        what = "the run went back" if role == ROLLBACK else f"{role} was respawned"
        times = f"{fault.max_restarts} time{'s' * (fault.max_restarts != 1)}"
        return RunError(
            f"{error}; {what} {times} within {RESTART_WINDOW_SECONDS:g} s already",
            error.details or "fault.max_restarts sets how often this is allowed.",
        )

    def back(self, incident: Incident, what: str, redone: int = 0, resampled: int = 0) -> None:
        incident.redone, incident.resampled = redone, resampled
        self._end(incident, "back")
        again = f"; {redone} step{'s' * (redone != 1)} to repeat" if redone else ""
        self._say(f"{incident.role} is back after {incident.seconds:.1f} s: {what}{again}")

    def given_up(self, incident: Incident, what: str) -> None:
        self._end(incident, "given up")
        self._say(f"{incident.role} is not replaced: {what}")

    def _end(self, incident: Incident, outcome: str) -> None:
        incident.outcome = outcome
        incident.seconds = time.monotonic() - self._noticed[id(incident)]
        self._write(incident)

    def _write(self, incident: Incident, details: str = "") -> None:
        """Append a line; an incident has one when it is detected and one when it ends. The run continues without a
        file that cannot be written."""
        warned = bool(self._unwritten)
        self._unwritten.append(encode(incident.record() | ({"details": details} if details else {})))
        try:
            with LineFile(self._path, warn=self._say) as file:
                file.append(self._unwritten)
            self._unwritten = []
        except Unwritable as error:
            if not warned:
                self._say(f"{error}; its lines are kept until they can be")
