"""Reads a run's folder: replays the ledger into the life of every prompt, the steps and the starts, and notes what
contradicts itself in it."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError, load_of_run
from titan_rl.record.ledger import EVENTS, NAME, OPTIONAL, bounds_of, decode
from titan_rl.record.lines import fields, invalid, is_text, objects, whole_lines
from titan_rl.wire.stop_reasons import FAILED

METRICS, ROLLOUTS, SUMMARY = "metrics.jsonl", "rollouts.jsonl", "summary.json"
SKIPPED = 1000  # skipped prompts that are named one by one

METRIC = fields("step", kind=is_text)


@dataclass(slots=True)
class Start:
    """A start of the run: by a new process, or by a rewind within one."""

    step: int = 0  # the last one done before
    bounds: Mapping[str, int] | None = None  # in force from here on; None: a ledger of an earlier version
    time: float = math.inf
    config: int | None = None  # checksum of config.toml
    digests: bool = False  # of samples


class RecordedTurn(NamedTuple):
    """One turn of a rollout, as an engine answered it."""

    read: Sequence[int]  # number and checksum of all the tokens before it
    tokens: int
    digest: int


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
    turns: dict[tuple[int, int], dict[int, RecordedTurn]] = field(default_factory=dict)  # by sample and attempt
    statuses: Sequence[str] = ()  # of each rollout; empty: single answers
    drives: Sequence[int] = ()  # attempts of each rollout; empty: one
    failures: int = 0  # failed attempts of its judge
    scored: bool = False
    rewards: Sequence[float | None] = ()
    trained: int | None = None  # step
    dropped: str = ""  # reason
    during: int = 0  # the step that trained or dropped it

    @property
    def undone(self) -> bool:
        """The run rewound to before the prompt's admission, and has not admitted it again."""
        return self.turn < 0

    def turns_of(self, sample: int) -> dict[int, RecordedTurn]:
        """Return the turns of a rollout's last attempt."""
        return self.turns.get((sample, self.drives[sample] if sample < len(self.drives) else 1), {})

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
    """A run's folder as read: the lives of all prompts, and the contradictions found while replaying the ledger."""

    folder: Path = Path()
    config: Config | None = None
    unread: str = ""  # why config.toml cannot be read
    lives: dict[int, Life] = field(default_factory=dict)
    steps: dict[int, TrainedStep] = field(default_factory=dict)  # in order, without those that the run undid
    starts: list[Start] = field(default_factory=list)
    last: int = 0  # step
    cut: float = math.inf  # the other files may lack later steps: a process that is not in the ledger yet, or was
    # killed before it was, has written config.toml and removed them
    reached: int = 0  # the highest step of all, with those that the run undid
    saved: set[int] = field(default_factory=set)  # every step that a checkpoint was begun for
    problems: list[str] = field(default_factory=list)
    _at: str = ""  # the line
    _next: int = 0  # the prompts that the source gives next: the open ones, then `_next` and on
    _open: deque[int] = field(default_factory=deque)
    _replaced: list[int] = field(default_factory=list)  # prompts dropped since the last step

    @classmethod
    def of(cls, folder: Path) -> "History":
        """Read a folder, also one with invalid lines. Raise OSError if there is no ledger."""
        history, expected = cls(folder), 0
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
        try:
            history.config = load_of_run(folder)
        except (ConfigError, OSError, ValueError) as error:
            history.unread = str(error)
        with suppress(OSError):
            for _, _, line in objects(folder / METRICS, METRIC):
                if isinstance(line, dict) and line["kind"] == "startup":
                    later = isinstance(time := line.get("time"), float) and time > history.start.time
                    history.cut = line["step"] if later else math.inf
        return history

    @property
    def start(self) -> Start:
        return self.starts[-1] if self.starts else Start()

    def bounds(self, start: Start) -> Mapping[str, int] | None:
        """Return the bounds of a start. A ledger of an earlier version has none: config.toml has them of its last
        start, and earlier ones are not known."""
        if start.bounds is None and start is self.start and self.config is not None:
            return bounds_of(self.config)
        return start.bounds

    def written(self, step: int) -> bool:
        """Return True if the ledger proves that the other files have the step: a process can end between the two."""
        trained = self.steps.get(step)
        if trained is None or step > self.cut:
            return False
        return step < self.last or trained.saved or trained.logged is not None

    def read(self, event: dict[str, Any], number: int | None = None) -> None:
        """Replay the event of the ledger's line `number`."""
        kind = event["event"]
        self._at = f"{NAME}, line {number or event['n'] + 1} ({kind})"
        if kind not in EVENTS:
            self._say(f"unknown event, expected one of {', '.join(EVENTS)}")
        elif wrong := invalid(event, EVENTS[kind], OPTIONAL):
            self._say(wrong)
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
        self.starts.append(Start(step, event.get("bounds"), event.get("time", math.inf), event.get("config")))
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

    def _turn(self, event: dict[str, Any], life: Life) -> None:
        recorded = life.turns.setdefault((event["sample"], event["attempt"]), {})
        if life.sampled or event["turn"] in recorded:
            what = "after its group was sampled" if life.sampled else "twice"
            self._say(f"prompt {event['prompt']}, sample {event['sample']}: turn {event['turn']} is sampled {what}")
        recorded[event["turn"]] = RecordedTurn(event["read"], event["tokens"], event["digest"])

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
        if {len(event.get(key, tokens)) for key in ("statuses", "attempts")} != {len(tokens)}:
            self._say(f"prompt {id} has another number of statuses or attempts than its {len(tokens)} samples")
        else:
            life.statuses, life.drives = event.get("statuses", ()), event.get("attempts", ())
        for sample, count in enumerate(tokens if life.statuses else ()):
            if (turns := sum(turn.tokens for turn in life.turns_of(sample).values())) != count:
                self._say(f"prompt {id}, sample {sample} has {count} tokens, and its turns {turns}")

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
        statuses = life.statuses or ["completed"] * len(rewards)
        for sample, (reward, status, tokens) in enumerate(zip(rewards, statuses, life.tokens, strict=False)):
            unrewarded = str(sample) in event.get("errors", {})  # its judge failed
            if (reward is None) != bool(status in FAILED or (life.statuses and not tokens) or unrewarded):
                self._say(f"prompt {id}, sample {sample} has the reward {reward}, though it ended as {status}")
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
