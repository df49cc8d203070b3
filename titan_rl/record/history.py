"""Replays a run's ledger and compares it with metrics.jsonl and rollouts.jsonl, which other code writes."""

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
from titan_rl.record.lines import whole_lines


@dataclass(slots=True)
class Life:
    """What the ledger says about one prompt, without what the run undid."""

    turn: int
    attempts: int
    sampled: bool = False
    failures: int = 0  # failed attempts of its judge
    scored: bool = False
    oldest: int | None = None  # oldest version that sampled one of its tokens
    trained: int | None = None  # step
    dropped: str = ""  # reason

    @property
    def undone(self) -> bool:
        """The run rewound to before the prompt's admission, and has not admitted it again."""
        return self.turn < 0

    @property
    def final(self) -> bool:
        return self.trained is not None or bool(self.dropped)


@dataclass(slots=True)
class History:
    """The lives of all prompts, and the contradictions found while replaying the ledger."""

    lives: dict[int, Life] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)  # prompts, in the order in which they were trained on
    begun: int = 0  # starts of the run: by a new process, or by a rewind within one
    problems: list[str] = field(default_factory=list)

    def read(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("begun", "admitted"):
            getattr(self, f"_{kind}")(event)
        elif kind != "saved":  # which says only that the lines before it are on disk
            for id in event["prompts"] if kind == "trained" else [event["prompt"]]:
                one, life = {**event, "prompt": id}, self.lives.get(id)
                if life is None or life.undone:
                    self._say(one, "was never admitted")
                else:
                    getattr(self, f"_{kind}")(one, life)

    def _begun(self, event: dict[str, Any]) -> None:
        """Undo the prompts that were admitted after the cut to which the run returns, or were unfinished there."""
        self.begun += 1
        for id, life in self.lives.items():
            if id >= event["next"] or id in event["open"]:
                self.lives[id] = Life(-1, life.attempts)
        self.order = [id for id in self.order if self.lives[id].trained is not None]

    def _admitted(self, event: dict[str, Any]) -> None:
        life = self.lives.get(event["prompt"])
        if life is not None and not life.undone:
            self._say(event, "is admitted twice in one history")
        attempt = life.attempts + 1 if life else 1
        if event["attempt"] != attempt:
            self._say(event, f"is attempt {event['attempt']}, expected {attempt}")
        self.lives[event["prompt"]] = Life(event["turn"], attempt)

    def _sampled(self, event: dict[str, Any], life: Life) -> None:
        life.sampled, life.oldest = True, min(event["versions"], default=None)

    def _failed(self, event: dict[str, Any], life: Life) -> None:
        life.failures += 1
        if life.scored or life.final or not life.sampled:
            self._say(event, "failed after its outcome was known, or before it was sampled")
        if event["attempt"] != life.failures:
            self._say(event, f"failed at attempt {event['attempt']}, expected {life.failures}")

    def _scored(self, event: dict[str, Any], life: Life) -> None:
        if not life.sampled:
            self._say(event, "is scored before it is sampled")
        life.scored = True

    def _trained(self, event: dict[str, Any], life: Life) -> None:
        if life.final:
            self._say(event, f"has an outcome already: {_outcome(life)}")
        elif not life.scored:
            self._say(event, "is trained on before it is scored")
        life.trained = event["step"]
        self.order.append(event["prompt"])

    def _dropped(self, event: dict[str, Any], life: Life) -> None:
        if life.final:
            self._say(event, f"has an outcome already: {_outcome(life)}")
        failed = event["reason"].startswith("failed")
        if failed and (life.scored or not life.failures):
            self._say(event, "is dropped as failed, but " + ("was scored" if life.scored else "no attempt failed"))
        if not failed and not life.scored:
            self._say(event, f"is dropped ({event['reason']}) before it is scored")
        life.dropped = event["reason"]

    def _say(self, event: dict[str, Any], what: str) -> None:
        self.problems.append(f"ledger line {event['n'] + 1} ({event['event']}): prompt {event['prompt']} {what}")


def audit(folder: Path) -> tuple[list[str], str]:
    """Return all problems of a run, and one line about what was checked."""
    history = History()
    try:
        config = load(folder / "config.toml")
        for event in events(folder):
            history.read(event)
    except (Damaged, ConfigError, OSError) as error:
        return [str(error)], ""
    metrics = [line for line in _lines(folder / "metrics.jsonl") if line["kind"] == "rl"]
    rollouts = Counter((line["step"], line["prompt_id"]) for line in _lines(folder / "rollouts.jsonl"))
    problems = [*history.problems, *_outcomes(history, config, metrics), *_steps(history, config, metrics)]
    problems += _records(history, config, metrics, rollouts)
    trained = sum(life.trained is not None for life in history.lives.values())
    dropped = sum(bool(life.dropped) for life in history.lives.values())
    unfinished = sum(not life.undone and not life.final for life in history.lives.values())
    again = sum(life.attempts - 1 for life in history.lives.values())
    return problems, (
        f"{len(history.lives)} prompts: {trained} trained on in {len(metrics)} steps, {dropped} dropped, "
        f"{unfinished} unfinished, {again} admitted again by {history.begun - 1} restarts"
    )


def _outcomes(history: History, config: Config, metrics: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Check that no prompt is lost: all that the source gave are trained on or dropped, once the run is finished."""
    lives = {id: life for id, life in history.lives.items() if not life.undone}
    for id in range(max(lives, default=-1) + 1):
        if id not in lives:
            yield f"prompt {id} was skipped: the source gave it, and it was never admitted"
    finished = bool(metrics) and metrics[-1]["step"] >= config.training.steps
    for id, life in lives.items():
        if finished and not life.final:
            yield f"prompt {id} was neither trained on nor dropped, and the run is finished"


def _steps(history: History, config: Config, metrics: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Check that steps are complete, follow the source's order and respect the bound on staleness."""
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
        if life.trained is not None and life.oldest is not None and (age := life.trained - 1 - life.oldest) > bound:
            yield f"prompt {id} was {age} steps old at step {life.trained}, the bound is {bound}"


def _records(
    history: History, config: Config, metrics: Sequence[dict[str, Any]], rollouts: Counter[tuple[int, int]]
) -> Iterator[str]:
    """Check that the ledger, metrics.jsonl and rollouts.jsonl agree."""
    steps = [line["step"] for line in metrics]
    if steps != list(range(1, len(steps) + 1)):
        yield f"metrics.jsonl: expected steps 1 to {len(steps)} once each, found {steps[:8]}{' ...' * (len(steps) > 8)}"
    trained = {(life.trained, id) for id, life in history.lives.items() if life.trained is not None}
    for step, id in sorted(rollouts.keys() - trained):
        yield f"rollouts.jsonl has prompt {id} at step {step}, the ledger does not"
    for step, id in sorted(trained - rollouts.keys()):
        yield f"the ledger has prompt {id} at step {step}, rollouts.jsonl does not"
    size = config.rollout.group_size
    for (step, id), count in rollouts.items():
        if count != size:
            yield f"rollouts.jsonl: prompt {id} at step {step} has {count} rollouts, expected {size}"


def _outcome(life: Life) -> str:
    return f"trained at step {life.trained}" if life.trained is not None else f"dropped ({life.dropped})"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, whole_lines(path)) if path.exists() else iter(())
