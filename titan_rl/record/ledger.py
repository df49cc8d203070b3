"""ledger.jsonl: the life of every prompt of a run, in one append-only file.

    begun at step s ── admitted ── sampled ── scored ── trained at step t
                          │           │         └────── dropped: flat
                          │           └── failed ────── dropped: failed, and why
                          └── admitted again, by a run that resumes or rewinds: its next attempt

Packing has no event: a step packs exactly the prompts that it trains. Replicas have none either: a group's samples may
be split and may move, and the run's timeline shows which replica sampled when. `failed` counts the attempts at judging
a group.

Each line is one event, `CRC-32 JSON`; the JSON includes the line's number. This is not a database: appending needs no
lock and no second file, and a person can grep the file. The events of a step are on disk before its checkpoint is
written: a ledger that loses its tail in a power cut still has everything up to the checkpoint from which the run
resumes, and later events do not count.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_rl.record.lines import LineFile, SelfClosing, whole_lines
from titan_rl.wire.types import Completion, Group

NAME = "ledger.jsonl"


class Damaged(ValueError):
    """A line before the last one is missing, or does not match its checksum."""


class Ledger(SelfClosing):
    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file = LineFile(self._path, keep=_decode)
        self._lines = self._file.kept
        self._before: Counter[int] = Counter()  # admissions that were undone, by prompt

    def begun(self, step: int, next: int, open: Sequence[int]) -> None:
        """The run continues after step `step`, at the cut in that step's checkpoint or snapshot: prompts before `next`
        were trained on or dropped, except the `open` ones. Everything later is undone."""
        self._append("begun", step=step, next=next, open=list(open))
        self._file.flush()
        lines = (line for line in whole_lines(self._path) if b'"event":"admitted"' in line)
        admitted = (json.loads(line.partition(b" ")[2])["prompt"] for line in lines)  # checked when it was opened
        unfinished = frozenset(open)
        self._before = Counter(prompt for prompt in admitted if prompt >= next or prompt in unfinished)

    def admitted(self, prompt: int, turn: int) -> None:
        self._append("admitted", prompt=prompt, turn=turn, attempt=1 + self._before[prompt])

    def sampled(self, prompt: int, completions: Sequence[Completion]) -> None:
        versions = [version for completion in completions for version in completion.versions]
        span = [min(versions), max(versions)] if versions else []
        self._append("sampled", prompt=prompt, versions=span, tokens=[len(c.tokens) for c in completions])

    def scored(self, prompt: int, rewards: Sequence[float]) -> None:
        self._append("scored", prompt=prompt, rewards=list(rewards))

    def failed(self, prompt: int, attempt: int, error: str) -> None:
        """The prompt's judge raised an exception, or did not answer in time."""
        self._append("failed", prompt=prompt, attempt=attempt, error=error)

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        self._append("trained", step=step, prompts=[group.prompt.id for group in groups])
        self._file.flush()

    def dropped(self, group: Group, reason: str) -> None:
        tokens = sum(rollout.sampled for rollout in group.rollouts)
        self._append("dropped", prompt=group.prompt.id, reason=reason, tokens=tokens)

    def saved(self, step: int) -> None:
        """A checkpoint of this step is about to be written. All earlier events are on disk when this returns."""
        self._append("saved", step=step)
        self._file.to_disk()

    def close(self) -> None:
        self._file.to_disk()
        self._file.close()

    def _append(self, event: str, **fields: Any) -> None:
        text = json.dumps({"n": self._lines, "event": event, **fields}, separators=(",", ":")).encode()
        self._file.append([b"%08x %s" % (zlib.crc32(text), text)], flush=False)
        self._lines += 1


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield every event, without a torn last line. Raise Damaged at a line that is changed or missing."""
    path = folder / NAME
    for number, line in enumerate(whole_lines(path)):
        event = _decode(line)
        if event is None or event["n"] != number:
            raise Damaged(
                f"{path}, line {number + 1}: expected event {number} and its checksum, found {line[:80].rstrip()!r}"
            )
        yield event


def _decode(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line, or None if the line does not match its checksum."""
    crc, _, text = line.removesuffix(b"\n").partition(b" ")
    return json.loads(text) if crc == b"%08x" % zlib.crc32(text) else None
