"""Replays the ledger of a run's folder into the history of every prompt, the steps and the starts, and notes each event
that cannot follow those before it."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.config.sections import Config
from titan_rl.record.ledger import decode
from titan_rl.record.lines import whole_lines
from titan_rl.record.run_names import LEDGER, METRICS
from titan_rl.tools.inspect.ledger_events import EVENTS, OPTIONAL
from titan_rl.tools.inspect.line_checks import fields, invalid, is_text, valid_objects
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.wire.stop_reasons import FAILED

SKIPPED = 1000  # skipped prompts that are named one by one

METRIC = fields("step", kind=is_text)


@dataclass(slots=True)
class Start:
    """A start of the run: by a new process, or by a rewind within one."""

    step: int = 0  # the last one done before
    bounds: Mapping[str, int] = field(default_factory=dict)  # in force from here on
    time: float = math.inf
    own_loop: bool = False  # the user's: it may train on a prompt again, reward it anew or leave it out


class RecordedTurn(NamedTuple):
    """One turn of a rollout, as an engine answered it."""

    read: Sequence[int]  # number and checksum of all the tokens before it
    tokens: int
    digest: int
    seat: str = ""  # the player
    opponent: str = ""  # who plays it in place of the policy
    images: Sequence[str] = ()  # names; they came with it


@dataclass(slots=True)
class PromptHistory:
    """One prompt in the ledger, without what the run undid."""

    turn: int  # the step that it was admitted for; -1: the run rewound to before its admission
    admissions: int
    start: Start = field(default_factory=Start)  # whose bounds count
    admitted: int = 0  # the last step when it was admitted
    versions: Sequence[int] = ()  # the policy's oldest and newest that sampled one of its tokens
    tokens: Sequence[int] | None = None  # per sample; None: it is not sampled
    digests: Sequence[int] = ()  # per sample
    turns: dict[tuple[int, int], dict[int, RecordedTurn]] = field(default_factory=dict)  # by sample and attempt
    statuses: Sequence[str] = ()  # per rollout; empty: single answers
    attempts: Sequence[int] = ()  # per rollout; empty: one
    rewards: Sequence[float | None] | None = None  # None: it is not scored
    trained: int | None = None  # the last step
    steps: list[int] = field(default_factory=list)  # all that trained on it
    dropped: str = ""  # reason
    during: int = 0  # the step that trained or dropped it

    @property
    def undone(self) -> bool:
        return self.turn < 0

    @property
    def final(self) -> bool:
        return self.trained is not None or bool(self.dropped)

    @property
    def outcome(self) -> str:
        return f"trained at step {self.trained}" if self.trained is not None else f"dropped ({self.dropped})"

    def turns_of(self, sample: int) -> dict[int, RecordedTurn]:
        """Return the turns of a rollout's last attempt."""
        return self.turns.get((sample, self.attempts[sample] if sample < len(self.attempts) else 1), {})


@dataclass(slots=True)
class TrainedStep:
    """One step in the ledger."""

    prompts: list[int]
    start: Start
    logged: tuple[int, int] | None = None  # checksums of its lines in metrics.jsonl and rollouts.jsonl
    saved: bool = False


@dataclass(slots=True)
class LedgerHistory:
    """A run's folder as read: the history of all prompts, and the contradictions in the ledger."""

    files: RunFiles
    config: Config | None = None
    unread: str = ""  # why config.toml cannot be read
    prompts: dict[int, PromptHistory] = field(default_factory=dict)
    steps: dict[int, TrainedStep] = field(default_factory=dict)  # in order, without undone ones
    starts: list[Start] = field(default_factory=list)
    last: int = 0  # step
    cut: float = math.inf
    """The other files may lack later steps: a process that is not in the ledger yet, or was killed before it was, has
    removed them."""
    saved: set[int] = field(default_factory=set)  # every step that a checkpoint was begun for
    all_bytes: bool = False  # also the bytes of earlier checkpoints than the newest are read
    problems: list[str] = field(default_factory=list)
    _at: str = ""  # the line that is read
    _next: int = 0  # the source gives the open prompts, then `_next` and on
    _open: deque[int] = field(default_factory=deque)

    @classmethod
    def of(cls, folder: Path) -> "LedgerHistory":
        """Read a folder, also one with invalid lines. Raise OSError if there is no ledger."""
        files, expected = RunFiles(folder), 0
        history = cls(files)
        for number, line in enumerate(whole_lines(files / LEDGER), 1):
            history._at = f"{LEDGER}, line {number}"
            event = decode(line)
            if event is None:
                history._report(f"expected event {expected} and its checksum, found {line[:80].rstrip()!r}")
                expected += 1
                continue
            if event["n"] != expected:
                history._report(f"expected event {expected}, found event {event['n']}: lines are missing")
            expected = event["n"] + 1
            history._at += f" ({event['event']})"
            history._read(event)
        history.config, history.unread = files.config_or_why()
        with suppress(OSError):
            for line in valid_objects(files / METRICS, METRIC):
                if line["kind"] == "startup":
                    later = isinstance(time := line.get("time"), float) and time > history.start.time
                    history.cut = line["step"] if later else math.inf
        return history

    @property
    def start(self) -> Start:
        return self.starts[-1] if self.starts else Start()

    @property
    def finished(self) -> bool:
        """True if the run has made all of its steps."""
        return bool(self.starts) and self.last >= self.start.bounds["training.steps"]

    def written(self, step: int) -> bool:
        """Return True if the ledger proves that the other files have the step: a process can end between the two."""
        return step <= self.cut and self.uncut(step)

    def uncut(self, step: int) -> bool:
        """Return True if the ledger proves that the other files had the step, before a process removed later ones."""
        trained = self.steps.get(step)
        if trained is None:
            return False
        return step < self.last or trained.saved or trained.logged is not None

    def _read(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind not in EVENTS:
            self._report(f"unknown event, expected one of {', '.join(EVENTS)}")
        elif wrong := invalid(event, EVENTS[kind], OPTIONAL):
            self._report(wrong)
        elif "prompt" not in event or kind == "admitted":
            getattr(self, f"_{kind}")(event)
        elif (prompt := self._admitted_prompt(event["prompt"])) is not None:
            getattr(self, f"_{kind}")(event, prompt)

    def _admitted_prompt(self, id: int) -> PromptHistory | None:
        prompt = self.prompts.get(id)
        if prompt is None or prompt.undone:
            self._report(f"prompt {id} was never admitted")
            return None
        return prompt

    def _begun(self, event: dict[str, Any]) -> None:
        """Undo the prompts that were admitted after the cut to which the run returns, or were unfinished there."""
        step, cut, unfinished = event["step"], event["next"], frozenset(event["open"])
        if not self.starts and step > 0:
            self._report(f"the run begins after step {step}, of which the ledger has nothing")
        elif step > self.last:
            self._report(f"the run resumes after step {step}, but the last step is {self.last}")
        elif step in self.steps and not self.steps[step].saved and not self._snapshot(event):
            self._report(f"the run resumes after step {step}, which was not saved")
        for id, prompt in self.prompts.items():
            gone = id >= cut or id in unfinished
            if prompt.undone:
                continue
            if prompt.final and gone != (prompt.during > step):
                undoes = "undoes" if gone else "does not undo"
                self._report(f"the run resumes after step {step} and {undoes} prompt {id}, {prompt.outcome}")
            elif not prompt.final and not gone:
                self._report(f"the run resumes after step {step} without prompt {id}, which was unfinished")
            if gone:
                self.prompts[id] = PromptHistory(-1, prompt.admissions)
        self.starts.append(Start(step, event["bounds"], event.get("time", math.inf), event.get("own_loop", False)))
        self.steps = {n: trained for n, trained in self.steps.items() if n <= step}
        self.last, self._next, self._open = step, cut, deque(sorted(unfinished))

    def _snapshot(self, event: dict[str, Any]) -> bool:
        """Return True if the run may have rewound within its process, to a snapshot in memory."""
        interval = self.start.bounds.get("fault.snapshot_interval", 0)
        return event.get("attempt", 2) > 1 and interval > 0 and event["step"] % interval == 0

    def _admitted(self, event: dict[str, Any]) -> None:
        id, before = event["prompt"], self.prompts.get(event["prompt"])
        while self._expected < id:
            self._report(f"prompt {self._expected} was skipped: the source gave it, and it was never admitted")
            if self._take() + SKIPPED < id:
                self._next, self._open = id, deque()
        if id == self._expected:
            self._take()
        else:
            self._report(f"prompt {id} is out of order, expected prompt {self._expected}")
        if before is not None and not before.undone:
            self._report(f"prompt {id} is admitted twice in one history")
        admissions = before.admissions + 1 if before else 1
        self.prompts[id] = PromptHistory(event["turn"], admissions, self.start, self.last)

    @property
    def _expected(self) -> int:
        return self._open[0] if self._open else self._next

    def _take(self) -> int:
        if self._open:
            return self._open.popleft()
        self._next += 1
        return self._next - 1

    def _turn(self, event: dict[str, Any], prompt: PromptHistory) -> None:
        turns = prompt.turns.setdefault((event["sample"], event["attempt"]), {})
        turns[event["turn"]] = RecordedTurn(
            event["read"],
            event["tokens"],
            event["digest"],
            event.get("seat", ""),
            event.get("opponent", ""),
            tuple(event.get("images", ())),
        )

    def _sampled(self, event: dict[str, Any], prompt: PromptHistory) -> None:
        id, versions, tokens = event["prompt"], event["versions"], event["tokens"]
        if prompt.tokens is not None:
            self._report(f"prompt {id} is sampled twice")
        turns = [turn for each in prompt.turns.values() for turn in each.values()]
        opponents_only = bool(turns) and all(turn.opponent for turn in turns)
        if len(versions) != 2 * (any(tokens) and not opponents_only):
            self._report(f"prompt {id} has samples of {tokens} tokens from versions {versions}")
        elif versions and max(versions) > self.last:
            self._report(f"prompt {id} was sampled from version {max(versions)} after step {self.last}")
        elif versions and versions[0] < self.start.step:
            began = f"though the run began after step {self.start.step}"
            self._report(f"prompt {id} was sampled from version {versions[0]}, {began}")
        if {len(event.get(key, tokens)) for key in ("digests", "statuses", "attempts")} != {len(tokens)}:
            self._report(f"prompt {id} has another number of digests, statuses or attempts than {len(tokens)} samples")
        else:
            prompt.statuses, prompt.attempts = event.get("statuses", ()), event.get("attempts", ())
        prompt.versions, prompt.tokens, prompt.digests = versions, tokens, event["digests"]

    def _failed(self, event: dict[str, Any], prompt: PromptHistory) -> None:
        if prompt.rewards is not None or prompt.final:
            self._report(f"the judge of prompt {event['prompt']} failed after the prompt was scored or dropped")

    def _scored(self, event: dict[str, Any], prompt: PromptHistory) -> None:
        id, rewards = event["prompt"], event["rewards"]
        if (prompt.rewards is not None or prompt.final) and not self.start.own_loop:
            self._report(f"prompt {id} is scored twice")
        if prompt.tokens is None:
            self._report(f"prompt {id} is scored before it is sampled")
        elif len(rewards) != len(prompt.tokens):
            self._report(f"prompt {id} has {len(rewards)} rewards for {len(prompt.tokens)} samples")
        statuses = prompt.statuses or ["completed"] * len(rewards)
        for sample, (reward, status, tokens) in enumerate(zip(rewards, statuses, prompt.tokens or (), strict=False)):
            unrewarded = str(sample) in event.get("errors", {})  # its judge failed
            if not self.start.own_loop and (reward is None) != bool(
                status in FAILED or (prompt.statuses and not tokens) or unrewarded
            ):
                self._report(f"prompt {id}, sample {sample} has the reward {reward}, though it ended as {status}")
        prompt.rewards = rewards

    def _trained(self, event: dict[str, Any]) -> None:
        step = event["step"]
        if step != self.last + 1:
            self._report(f"expected step {self.last + 1}, found {step}")
        for id in event["prompts"]:
            prompt = self._admitted_prompt(id)
            if prompt is None:
                continue
            if prompt.final and not self.start.own_loop:
                self._report(f"prompt {id} has an outcome already: {prompt.outcome}")
            elif prompt.rewards is None:
                self._report(f"prompt {id} is trained on before it is scored")
            prompt.trained = prompt.during = step
            prompt.steps.append(step)
        self.steps[step] = TrainedStep(event["prompts"], self.start)
        self.last = step

    def _dropped(self, event: dict[str, Any], prompt: PromptHistory) -> None:
        id, reason = event["prompt"], event["reason"]
        if prompt.final:
            self._report(f"prompt {id} has an outcome already: {prompt.outcome}")
        if prompt.rewards is None and not reason.startswith("failed") and not self.start.own_loop:
            self._report(f"prompt {id} is dropped ({reason}) before it is scored")
        prompt.dropped, prompt.during = reason, self.last + 1

    def _logged(self, event: dict[str, Any]) -> None:
        trained = self.steps.get(self.last)
        if trained is None or event["step"] != self.last or trained.logged:
            self._report(f"step {event['step']} is logged after step {self.last}, or twice")
        else:
            trained.logged = (event["metrics"], event["rollouts"])

    def _saved(self, event: dict[str, Any]) -> None:
        step = event["step"]
        if step != self.last:
            self._report(f"step {step} is saved after step {self.last}")
        if step in self.steps:
            self.steps[step].saved = True
        self.saved.add(step)

    def _report(self, what: str) -> None:
        self.problems.append(f"{self._at}: {what}")
