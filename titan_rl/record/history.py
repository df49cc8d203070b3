"""Replays a run's ledger and compares it with metrics.jsonl and rollouts.jsonl, which other code wrote."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError, load
from titan_rl.record.ledger import Damaged, events


@dataclass(slots=True)
class Life:
    """What the ledger says of one prompt, in the history that counts."""

    turn: int
    attempts: int
    sampled: bool = False
    failures: int = 0  # of its judge
    scored: bool = False
    oldest: int | None = None  # version that sampled a token
    trained: int | None = None  # step
    dropped: str = ""

    @property
    def undone(self) -> bool:
        """The run went back behind its admission, and has not come to it again."""
        return self.turn < 0

    @property
    def final(self) -> bool:
        return self.trained is not None or bool(self.dropped)


@dataclass(slots=True)
class History:
    """The lives of all prompts, and what contradicts itself on the way."""

    lives: dict[int, Life] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)  # in which prompts were trained on
    begun: int = 0  # times; by a process that resumes, or by one that goes back
    problems: list[str] = field(default_factory=list)

    def read(self, event: dict[str, Any]) -> None:
        getattr(self, f"_{event['event']}")(event)

    def _begun(self, event: dict[str, Any]) -> None:
        """A run goes back to a cut, in this process or the next: what came later, or was under way then, begins
        anew."""
        self.begun += 1
        for id, life in self.lives.items():
            if id >= event["next"] or id in event["open"]:
                self.lives[id] = Life(-1, life.attempts)
        self.order = [id for id in self.order if self.lives[id].trained is not None]

    def _saved(self, event: dict[str, Any]) -> None:
        """Tells when the lines before were safe; the cut itself is in the checkpoint, and in who begins with it."""

    def _admitted(self, event: dict[str, Any]) -> None:
        life = self.lives.get(event["prompt"])
        if life is not None and not life.undone:
            self._say(event, "is admitted twice in one history")
        attempt = life.attempts + 1 if life else 1
        if event["attempt"] != attempt:
            self._say(event, f"is attempt {event['attempt']}, expected {attempt}")
        self.lives[event["prompt"]] = Life(event["turn"], attempt)

    def _sampled(self, event: dict[str, Any]) -> None:
        if (life := self._of(event)) is not None:
            life.sampled, life.oldest = True, min(event["versions"], default=None)

    def _failed(self, event: dict[str, Any]) -> None:
        if (life := self._of(event)) is not None:
            life.failures += 1
            if life.scored or life.final or not life.sampled:
                self._say(event, "failed after its fate was known, or before it was sampled")
            if event["attempt"] != life.failures:
                self._say(event, f"failed at attempt {event['attempt']}, expected {life.failures}")

    def _scored(self, event: dict[str, Any]) -> None:
        if (life := self._of(event)) is not None:
            if not life.sampled:
                self._say(event, "is scored before it is sampled")
            life.scored = True

    def _trained(self, event: dict[str, Any]) -> None:
        for id in event["prompts"]:
            if (life := self._of({**event, "prompt": id})) is not None:
                if life.final or not life.scored:
                    how = f"has its fate already: {_fate(life)}" if life.final else "is trained on before it is scored"
                    self._say({**event, "prompt": id}, how)
                life.trained = event["step"]
                self.order.append(id)

    def _dropped(self, event: dict[str, Any]) -> None:
        if (life := self._of(event)) is not None:
            if life.final:
                self._say(event, f"has its fate already: {_fate(life)}")
            failed = event["reason"].startswith("failed")
            if failed and (life.scored or not life.failures):
                self._say(event, "is dropped as failed, but " + ("was scored" if life.scored else "no attempt failed"))
            if not failed and not life.scored:
                self._say(event, f"is dropped ({event['reason']}) before it is scored")
            life.dropped = event["reason"]

    def _of(self, event: dict[str, Any]) -> Life | None:
        life = self.lives.get(event["prompt"])
        if life is None or life.undone:
            self._say(event, "was never admitted")
            return None
        return life

    def _say(self, event: dict[str, Any], what: str) -> None:
        self.problems.append(f"ledger line {event['n'] + 1} ({event['event']}): prompt {event['prompt']} {what}")


def audit(folder: Path) -> tuple[list[str], str]:
    """Everything that is wrong, and one line about what was looked at."""
    history = History()
    try:
        config = load(folder / "config.toml")
        for event in events(folder):
            history.read(event)
    except (Damaged, ConfigError, OSError) as error:
        return [str(error)], ""
    metrics = [line for line in _lines(folder / "metrics.jsonl") if line["kind"] == "rl"]
    rollouts = Counter((line["step"], line["prompt_id"]) for line in _lines(folder / "rollouts.jsonl"))
    problems = [*history.problems, *_fates(history, config, metrics), *_steps(history, config, metrics)]
    problems += _records(history, config, metrics, rollouts)
    trained = sum(life.trained is not None for life in history.lives.values())
    dropped = sum(bool(life.dropped) for life in history.lives.values())
    under_way = sum(not life.undone and not life.final for life in history.lives.values())
    again = sum(life.attempts - 1 for life in history.lives.values())
    return problems, (
        f"{len(history.lives)} prompts: {trained} trained on in {len(metrics)} steps, {dropped} dropped, "
        f"{under_way} under way, {again} admitted again by {history.begun - 1} restarts"
    )


def _fates(history: History, config: Config, metrics: Sequence[dict[str, Any]]) -> Iterator[str]:
    """No prompt is lost: of those that the source gave, all have a fate, but for those under way in a run that is."""
    lives = {id: life for id, life in history.lives.items() if not life.undone}
    for id in range(max(lives, default=-1) + 1):
        if id not in lives:
            yield f"prompt {id} was skipped: the source gave it, and nobody admitted it"
    finished = bool(metrics) and metrics[-1]["step"] >= config.training.steps
    for id, life in lives.items():
        if finished and not life.final:
            yield f"prompt {id} has no fate, and the run is over"


def _steps(history: History, config: Config, metrics: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Whole steps, in the source's order, within the bound."""
    rollout = config.rollout
    sizes = Counter(life.trained for life in history.lives.values() if life.trained is not None)
    for step, size in sorted(sizes.items()):
        if size != rollout.groups_per_step:
            yield f"step {step} trained on {size} prompts, expected {rollout.groups_per_step}"
    late = [b for a, b in pairwise(history.order) if b < a]
    if late and rollout.window == 0:
        yield f"prompt {late[0]} was trained on after a later one, though rollout.window is 0"
    bound = rollout.lag + rollout.window
    for id, life in history.lives.items():
        if life.trained is not None and life.oldest is not None and life.trained - 1 - life.oldest > bound:
            age = life.trained - 1 - life.oldest
            yield f"prompt {id} was {age} steps old at step {life.trained}, the bound is {bound}"


def _records(
    history: History, config: Config, metrics: Sequence[dict[str, Any]], rollouts: Counter[tuple[int, int]]
) -> Iterator[str]:
    """The ledger, metrics.jsonl and rollouts.jsonl tell the same story."""
    steps = [line["step"] for line in metrics]
    if steps != list(range(1, len(steps) + 1)):
        yield f"metrics.jsonl: expected steps 1 to {len(steps)} once each, found {_brief(steps)}"
    told = {(life.trained, id) for id, life in history.lives.items() if life.trained is not None}
    for step, id in sorted(rollouts.keys() - told):
        yield f"rollouts.jsonl has prompt {id} at step {step}, the ledger does not"
    for step, id in sorted(told - rollouts.keys()):
        yield f"the ledger has prompt {id} at step {step}, rollouts.jsonl does not"
    size = config.rollout.group_size
    for (step, id), count in rollouts.items():
        if count != size:
            yield f"rollouts.jsonl: prompt {id} at step {step} has {count} rollouts, expected {size}"


def _fate(life: Life) -> str:
    return f"trained at step {life.trained}" if life.trained is not None else f"dropped ({life.dropped})"


def _brief(values: Sequence[int]) -> str:
    return f"{list(values[:8])}{' ...' if len(values) > 8 else ''}"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; a crash may have torn the last."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
