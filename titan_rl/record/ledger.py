"""ledger.jsonl: the life of every prompt of a run, in one append-only file.

    begun at step s ── admitted ── sampled ── scored ── trained at step t ── logged ── saved
                          │           │         └────── dropped: flat
                          │           └── failed ────── dropped: failed, and why
                          └── admitted again, by a run that resumes or rewinds: its next attempt

A group whose rollouts may have several turns has an event `turn` for each of them, when an engine has answered it: the
number and the checksum of the tokens before it, the images that came with it, and the digest of the sampled tokens. Its
`sampled` then has the status of each rollout, and the attempts of its driver; earlier attempts count for nothing.

Packing has no event: a step packs exactly the prompts that it trains. Replicas have none either: a group's samples may
be split and may move, and the run's timeline shows which replica sampled when. `failed` counts the attempts at judging
a group.

`begun` records the bounds that are in force from there on. `sampled` has a digest of each sample as the engine returned
it, and `logged` the checksums of the step's lines in metrics.jsonl and rollouts.jsonl, so that these files can be
compared with the ledger.

Each line is one event, `CRC-32 JSON`; the JSON includes the line's number. This is not a database: appending needs no
lock and no second file, and a person can grep the file. The events of a step are on disk before its checkpoint is
written: a ledger that loses its tail in a power cut still has everything up to the checkpoint from which the run
resumes, and later events do not count. A checksum finds damage and bugs; it is no signature.
"""

import json
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from titan_rl.config.sections import Config
from titan_rl.record.lines import LineFile, SelfClosing, encode, is_count, whole_lines
from titan_rl.record.run_names import LEDGER
from titan_rl.wire.types import Completion, Group, ImagePlace, Rollout, Turn, extremes, names_of, uniform

BOUNDS = (
    "training.steps",
    "rollout.groups_per_step",
    "rollout.group_size",
    "rollout.max_staleness_steps",
    "rollout.overtake_steps",
    "algorithm.dynamic_sampling",
    "checkpoint.interval",
    "fault.snapshot_interval",
)
"""The keys whose values bound a run in an audit. A run may be resumed with other values."""
EARLIER = ("rollout.lag", "rollout.window")
"""The bounds of staleness in ledgers of earlier versions: rollout.max_staleness_steps is their sum."""
MOST_ERROR = 500
"""Characters of why an answer has no reward."""


class Ledger(SelfClosing):
    def __init__(self, folder: Path, warn: Callable[[str], None] = lambda message: None) -> None:
        self._path = folder / LEDGER
        self._lines = 0  # number of the next line
        self._file = LineFile(self._path, sound=self._sound, warn=warn)
        self._before: Counter[int] = Counter()  # admissions that were undone, by prompt

    def begun(
        self,
        step: int,
        next: int,
        open: Sequence[int],
        *,
        bounds: Mapping[str, int],
        attempt: int = 1,
        bad_rows: int = 0,
        changed: Mapping[str, Sequence[str]] = MappingProxyType({}),
        own_loop: bool = False,
    ) -> None:
        """The run continues after step `step`, at the cut in that step's checkpoint or snapshot: prompts before `next`
        were trained on or dropped, except the `open` ones. Everything later is undone. `attempt` counts the attempts
        of this process; `bad_rows` were left out of the data. `changed`: the settings that differ from here on, with
        both values. `own_loop`: the loop is the user's, which may train on a prompt again, reward it anew or leave it
        out."""
        more: dict[str, Any] = {"attempt": attempt, "time": time.time(), "bounds": dict(bounds)}
        more |= {"bad_rows": bad_rows} if bad_rows else {}
        more |= {"changed": {key: list(values) for key, values in changed.items()}} if changed else {}
        more |= {"own_loop": True} if own_loop else {}
        self._append("begun", step=step, next=next, open=list(open), **more)
        self._file.flush()
        lines = (line for line in whole_lines(self._path) if b'"event":"admitted"' in line)
        admitted = (json.loads(line.partition(b" ")[2]).get("prompt", -1) for line in lines)  # checked when opened
        unfinished = frozenset(open)
        self._before = Counter(prompt for prompt in admitted if prompt >= next or prompt in unfinished)

    def admitted(self, prompt: int, turn: int, images: Sequence[ImagePlace] = ()) -> None:
        more = {"images": names_of(images)} if images else {}
        self._append("admitted", prompt=prompt, turn=turn, attempt=1 + self._before[prompt], **more)

    def turn(
        self,
        prompt: int,
        sample: int,
        attempt: int,
        read: tuple[int, int],
        turn: Turn,
        opponent: str = "",
    ) -> None:
        """An engine has answered a turn of a rollout, which the `opponent` plays if it is not the policy. `read`:
        number and checksum of the tokens before it."""
        completion = turn.completion
        self._append(
            "turn",
            prompt=prompt,
            sample=sample,
            attempt=attempt,
            turn=turn.index,
            read=read,
            tokens=len(completion.tokens),
            digest=digest(completion.tokens, completion.versions),
            **({"seat": turn.seat} if turn.seat else {}),
            **({"opponent": opponent} if opponent else {}),
            **({"images": names_of(turn.images)} if turn.images else {}),
        )

    def sampled(self, prompt: int, completions: Sequence[Completion], turns: Sequence[Rollout] = ()) -> None:
        """All samples of a prompt are there. `turns`: its rollouts, if each of their turns has had its own event."""
        versions = [rollout.policy_versions for rollout in turns] or [c.versions for c in completions]
        ends = [end for each in versions if each for end in extremes(each)]
        span = [min(ends), max(ends)] if ends else []
        digests = [digest(c.tokens, c.versions) for c in completions]
        more: dict[str, Any] = {}
        if turns:
            more = {"statuses": [rollout.status for rollout in turns], "attempts": [r.attempts for r in turns]}
        self._append(
            "sampled",
            prompt=prompt,
            versions=span,
            tokens=[len(c.tokens) for c in completions],
            digests=digests,
            **more,
        )

    def scored(self, prompt: int, rewards: Sequence[float], errors: Mapping[int, str] = MappingProxyType({})) -> None:
        """Record the rewards; NaN: the rollout has none. `errors`: why the judge gave none, by sample."""
        more = {"errors": {str(sample): error[:MOST_ERROR] for sample, error in errors.items()}} if errors else {}
        self._append("scored", prompt=prompt, rewards=rewards, **more)

    def failed(self, prompt: int, attempt: int, error: str) -> None:
        """The prompt's judge raised an exception, or did not answer in time."""
        self._append("failed", prompt=prompt, attempt=attempt, error=error)

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        self._append("trained", step=step, prompts=[group.prompt.id for group in groups])
        self._file.flush()

    def dropped(self, group: Group, reason: str) -> None:
        tokens = sum(rollout.sampled for rollout in group.rollouts)
        self._append("dropped", prompt=group.prompt.id, reason=reason, tokens=tokens)

    def logged(self, step: int, metrics: int, rollouts: int) -> None:
        """Record the checksums of the step's lines in metrics.jsonl and rollouts.jsonl, which are written."""
        self._append("logged", step=step, metrics=metrics, rollouts=rollouts)

    def saved(self, step: int) -> None:
        """A checkpoint of this step is about to be written. All earlier events are on disk when this returns."""
        self._append("saved", step=step)
        self._file.to_disk()

    def close(self) -> None:
        self._file.close()

    def _append(self, event: str, **fields: Any) -> None:
        self._write(encode({"n": self._lines, "event": event, **fields}))

    def _write(self, text: bytes) -> None:
        self._file.append([b"%08x %s" % (zlib.crc32(text), text)], flush=False)
        self._lines += 1

    def _sound(self, line: bytes) -> bool:
        event = decode(line)
        if event is not None:
            self._lines = event["n"] + 1
        return event is not None


def bounds_of(config: Config) -> dict[str, int]:
    return {key: attrgetter(key)(config) for key in BOUNDS}


def digest(tokens: Sequence[int], versions: Sequence[int]) -> int:
    """Return a checksum of one sample: its tokens, and the versions that sampled them."""
    written = array("q", versions[:1]) * len(versions) if uniform(versions) else array("q", versions)
    return zlib.crc32(written, zlib.crc32(array("q", tokens)))


def read_checksum(tokens: Sequence[int], before: int = 0) -> int:
    """Return the checksum of tokens that were read, after those whose checksum is `before`."""
    return zlib.crc32(array("q", tokens), before)


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or None if the line does not match its checksum or is no event."""
    crc, _, text = line.removesuffix(b"\n").partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        return None
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(event, dict) and type(event.get("n")) is int and isinstance(event.get("event"), str)):
        return None
    if isinstance(bounds := event.get("bounds"), dict) and all(is_count(bounds.get(key)) for key in EARLIER):
        lag, window = (bounds[key] for key in EARLIER)
        bounds |= {"rollout.max_staleness_steps": lag + window, "rollout.overtake_steps": window}
    return event
