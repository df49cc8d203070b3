"""Replays a run's ledger: the life of every prompt, the steps and the starts, and what contradicts itself in them."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.record.ledger import BOUNDS, NAME, decode
from titan_rl.record.lines import whole_lines


@dataclass(slots=True)
class Start:
    """A start of the run: by a new process, or by a rewind within one."""

    step: int = 0  # the last one done before
    bounds: Mapping[str, int] | None = None  # in force from here on; None: a ledger of an earlier version
    time: float = math.inf
    digests: bool = False  # of samples


@dataclass(slots=True)
class Life:
    """What the ledger says about one prompt, without what the run undid."""

    turn: int
    attempts: int
    start: Start = field(default_factory=Start)  # under whose bounds it lives
    admitted: int = 0  # the last step when it was admitted
    sampled: bool = False
    sampled_after: int = 0  # the last step then
    versions: Sequence[int] = ()  # the oldest and the newest that sampled one of its tokens
    tokens: Sequence[int] = ()  # of each sample
    digests: Sequence[int] | None = None  # of each sample
    failures: int = 0  # failed attempts of its judge
    scored: bool = False
    rewards: Sequence[float] = ()
    trained: int | None = None  # step
    dropped: str = ""  # reason
    during: int = 0  # the step that trained or dropped it

    @property
    def undone(self) -> bool:
        """The run rewound to before the prompt's admission, and has not admitted it again."""
        return self.turn < 0

    @property
    def final(self) -> bool:
        return self.trained is not None or bool(self.dropped)

    @property
    def outcome(self) -> str:
        return f"trained at step {self.trained}" if self.trained is not None else f"dropped ({self.dropped})"


@dataclass(slots=True)
class TrainedStep:
    """What the ledger says about one step."""

    prompts: list[int]
    start: Start
    dropped: list[int]  # prompts that were replaced during the step
    logged: tuple[int, int] | None = None  # checksums of its lines in metrics.jsonl and rollouts.jsonl
    saved: bool = False


@dataclass(slots=True)
class History:
    """The lives of all prompts, and the contradictions found while replaying the ledger."""

    lives: dict[int, Life] = field(default_factory=dict)
    steps: dict[int, TrainedStep] = field(default_factory=dict)  # in order, without those that the run undid
    starts: list[Start] = field(default_factory=list)
    last: int = 0  # step
    reached: int = 0  # the highest step of all, with those that the run undid
    saved: set[int] = field(default_factory=set)  # every step that a checkpoint was begun for
    problems: list[str] = field(default_factory=list)
    _at: str = ""  # the line
    _next: int = 0  # the prompts that the source gives next: the open ones, then `_next` and on
    _open: deque[int] = field(default_factory=deque)
    _replaced: list[int] = field(default_factory=list)  # prompts dropped since the last step

    @classmethod
    def of(cls, folder: Path) -> "History":
        """Replay a ledger, whatever is in it."""
        history, expected = cls(), 0
        for number, line in enumerate(whole_lines(folder / NAME), 1):
            event = decode(line)
            if event is None:
                history._say_at(number, f"expected event {expected} and its checksum, found {line[:80].rstrip()!r}")
                expected += 1
                continue
            if event["n"] != expected:
                history._say_at(number, f"expected event {expected}, found event {event['n']}: lines are missing")
            expected = event["n"] + 1
            history.read(event, number)
        return history

    @property
    def begun(self) -> int:
        return len(self.starts)

    @property
    def start(self) -> Start:
        return self.starts[-1] if self.starts else Start()

    def read(self, event: dict[str, Any], number: int | None = None) -> None:
        """Replay the event of the ledger's line `number`."""
        kind = event["event"]
        self._at = f"{NAME}, line {number or event['n'] + 1} ({kind})"
        if kind not in FIELDS:
            self._say(f"unknown event, expected one of {', '.join(FIELDS)}")
            return
        wrong = [key for key, valid in FIELDS[kind].items() if not valid(event.get(key))]
        wrong += [key for key, valid in OPTIONAL.items() if key in event and not valid(event[key])]
        if wrong:
            self._say(f"expected a valid {wrong[0]}, found {str(event.get(wrong[0], 'none'))[:80]}")
        elif kind in ("begun", "admitted", "trained", "logged", "saved"):
            getattr(self, f"_{kind}")(event)
        else:
            life = self._living(event["prompt"])
            if life is not None:
                getattr(self, f"_{kind}")(event, life)

    def _living(self, id: int) -> Life | None:
        life = self.lives.get(id)
        if life is None or life.undone:
            self._say(f"prompt {id} was never admitted")
            return None
        return life

    def _begun(self, event: dict[str, Any]) -> None:
        """Undo the prompts that were admitted after the cut to which the run returns, or were unfinished there."""
        step, cut, unfinished = event["step"], event["next"], frozenset(event["open"])
        if not self.starts and step > 0:
            self._say(f"the run begins after step {step}, of which the ledger has nothing")
        elif step > self.last:
            self._say(f"the run resumes after step {step}, but the last step is {self.last}")
        elif step in self.steps and not self.steps[step].saved and not self._snapshot(event):
            self._say(f"the run resumes after step {step}, which was not saved")
        if self.start.bounds is not None and "bounds" not in event:
            self._say("expected bounds, as in the start before")
        for id, life in self.lives.items():
            gone = id >= cut or id in unfinished
            if life.undone:
                continue
            if life.final and gone != (life.during > step):
                undoes = "undoes" if gone else "does not undo"
                self._say(f"the run resumes after step {step} and {undoes} prompt {id}, {life.outcome}")
            elif not life.final and not gone:
                self._say(f"the run resumes after step {step} without prompt {id}, which was unfinished")
            if gone:
                self.lives[id] = Life(-1, life.attempts)
        self.starts.append(Start(step, event.get("bounds"), event.get("time", math.inf)))
        self.steps = {n: kept for n, kept in self.steps.items() if n <= step}
        self.last, self._next, self._open, self._replaced = step, cut, deque(sorted(unfinished)), []

    def _snapshot(self, event: dict[str, Any]) -> bool:
        """Return True if the run may have rewound within its process, to a snapshot in memory."""
        interval = (self.start.bounds or {}).get("fault.snapshot_interval", 1)
        return event.get("attempt", 2) > 1 and interval > 0 and event["step"] % interval == 0

    def _admitted(self, event: dict[str, Any]) -> None:
        id, life = event["prompt"], self.lives.get(event["prompt"])
        while self._expected < id:
            self._say(f"prompt {self._expected} was skipped: the source gave it, and it was never admitted")
            if self._take() + SKIPPED < id:
                self._next, self._open = id, deque()
        if id == self._expected:
            self._take()
        else:
            self._say(f"prompt {id} is out of order, expected prompt {self._expected}")
        if life is not None and not life.undone:
            self._say(f"prompt {id} is admitted twice in one history")
        attempt = life.attempts + 1 if life else 1
        if event["attempt"] != attempt:
            self._say(f"prompt {id} is attempt {event['attempt']}, expected {attempt}")
        self.lives[id] = Life(event["turn"], attempt, self.start, self.last)

    @property
    def _expected(self) -> int:
        return self._open[0] if self._open else self._next

    def _take(self) -> int:
        if self._open:
            return self._open.popleft()
        self._next += 1
        return self._next - 1

    def _sampled(self, event: dict[str, Any], life: Life) -> None:
        id, versions, tokens = event["prompt"], event["versions"], event["tokens"]
        if life.sampled:
            self._say(f"prompt {id} is sampled twice")
        if len(versions) != 2 * any(tokens) or versions != sorted(versions):
            self._say(f"prompt {id} has samples of {tokens} tokens from versions {versions}")
        elif versions and versions[1] > self.last:
            self._say(f"prompt {id} was sampled from version {versions[1]} after step {self.last}")
        elif versions and versions[0] < self.start.step:
            self._say(
                f"prompt {id} was sampled from version {versions[0]}, though the run began after step {self.start.step}"
            )
        life.digests = event.get("digests")
        if life.digests is None and self.start.bounds is not None:
            self._say(f"prompt {id} has no digests")
        elif life.digests is not None and len(life.digests) != len(tokens):
            self._say(f"prompt {id} has {len(life.digests)} digests of {len(tokens)} samples")
            life.digests = None
        self.start.digests |= life.digests is not None
        life.sampled, life.versions, life.tokens = True, versions, tokens
        life.sampled_after = self.last

    def _failed(self, event: dict[str, Any], life: Life) -> None:
        life.failures += 1
        if life.scored or life.final or not life.sampled:
            self._say(f"prompt {event['prompt']} failed after its outcome was known, or before it was sampled")
        if event["attempt"] != life.failures:
            self._say(f"prompt {event['prompt']} failed at attempt {event['attempt']}, expected {life.failures}")

    def _scored(self, event: dict[str, Any], life: Life) -> None:
        id, rewards = event["prompt"], event["rewards"]
        if life.scored or life.final:
            self._say(f"prompt {id} is scored twice")
        if not life.sampled:
            self._say(f"prompt {id} is scored before it is sampled")
        elif len(rewards) != len(life.tokens):
            self._say(f"prompt {id} has {len(rewards)} rewards for {len(life.tokens)} samples")
        life.scored, life.rewards = True, rewards

    def _trained(self, event: dict[str, Any]) -> None:
        step, prompts = event["step"], event["prompts"]
        if step != self.last + 1:
            self._say(f"expected step {self.last + 1}, found {step}")
        for id in prompts:
            if (life := self._living(id)) is None:
                continue
            if life.final:
                self._say(f"prompt {id} has an outcome already: {life.outcome}")
            elif not life.scored:
                self._say(f"prompt {id} is trained on before it is scored")
            life.trained = life.during = step
        self.steps[step] = TrainedStep(prompts, self.start, self._replaced)
        self.last, self.reached, self._replaced = step, max(self.reached, step), []

    def _dropped(self, event: dict[str, Any], life: Life) -> None:
        id, reason = event["prompt"], event["reason"]
        if life.final:
            self._say(f"prompt {id} has an outcome already: {life.outcome}")
        failed = reason.startswith("failed")
        if failed and (life.scored or not life.failures):
            why = "was scored" if life.scored else "no attempt failed"
            self._say(f"prompt {id} is dropped as failed, but {why}")
        if not failed and not life.scored:
            self._say(f"prompt {id} is dropped ({reason}) before it is scored")
        if event["tokens"] != sum(life.tokens):
            self._say(f"prompt {id} is dropped with {event['tokens']} tokens, sampled with {sum(life.tokens)}")
        life.dropped, life.during = reason, self.last + 1
        self._replaced.append(id)

    def _logged(self, event: dict[str, Any]) -> None:
        trained = self.steps.get(self.last)
        if trained is None or event["step"] != self.last or trained.logged:
            self._say(f"step {event['step']} is logged after step {self.last}, or twice")
        else:
            trained.logged = (event["metrics"], event["rollouts"])

    def _saved(self, event: dict[str, Any]) -> None:
        step = event["step"]
        if step != self.last:
            self._say(f"step {step} is saved after step {self.last}")
        if step in self.steps:
            self.steps[step].saved = True
        self.saved.add(step)

    def _say(self, what: str) -> None:
        self.problems.append(f"{self._at}: {what}")

    def _say_at(self, number: int, what: str) -> None:
        self.problems.append(f"{NAME}, line {number}: {what}")


SKIPPED = 1000  # skipped prompts that are named one by one


def _is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return math.isfinite(value) if type(value) is float else type(value) is int and abs(value) < 1 << 63


def _is_list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(of, value))


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_bounds(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_int(int(value[key])) if type(value.get(key)) in (int, bool) else False for key in BOUNDS
    )


FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "begun": {"step": _is_int, "next": _is_int, "open": _is_list(_is_int)},
    "admitted": {"prompt": _is_int, "turn": _is_int, "attempt": _is_int},
    "sampled": {"prompt": _is_int, "versions": _is_list(_is_int), "tokens": _is_list(_is_int)},
    "scored": {"prompt": _is_int, "rewards": _is_list(_is_number)},
    "failed": {"prompt": _is_int, "attempt": _is_int, "error": _is_str},
    "dropped": {"prompt": _is_int, "reason": _is_str, "tokens": _is_int},
    "trained": {"step": _is_int, "prompts": _is_list(_is_int)},
    "logged": {"step": _is_int, "metrics": _is_int, "rollouts": _is_int},
    "saved": {"step": _is_int},
}
OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "attempt": _is_int,
    "time": _is_number,
    "bounds": _is_bounds,
    "digests": _is_list(_is_int),
}
