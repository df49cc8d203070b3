"""Every prompt's life, in one append-only file of a run: ledger.jsonl.

    begun at step s ── admitted ── sampled ── scored ── trained at step t
                          │           │         └────── dropped: flat
                          │           └── failed ────── dropped: failed, and why
                          └── admitted again, by a run that resumes or goes back: its next attempt

Packing has no event of its own: a step packs exactly the prompts that it trains. Nor has a replica: a group's samples
may be divided and move, and the run's timeline has who sampled when. `failed` counts a judge's attempts at a group.

One event a line, `CRC-32 JSON`, the JSON with a number that counts lines. Lines, not a database: appending needs no
lock and no second file, a person can grep it, and what a crash tears is the last line's end, which the next process
cuts off. Events of a step are on disk before its checkpoint is begun: a ledger that lost its tail to a power cut still
knows everything up to the checkpoint from which the run resumes, and what came after never counted.
"""

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from titan_rl.wire.types import Completion, Group

NAME = "ledger.jsonl"


class Damaged(ValueError):
    """A line that is neither whole nor the last one."""


class Ledger:
    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file, self._lines = _open(self._path)
        self._before: Counter[int] = Counter()  # of what is undone: how often it was admitted

    def begun(self, step: int, next: int, open: Sequence[int]) -> None:
        """The run goes on after step `step`, at the cut that a checkpoint or a snapshot of it holds: prompts before
        `next` have their fate, but for the `open` ones. What came later is undone."""
        self._append("begun", step=step, next=next, open=list(open))
        self._before = self._admissions(next, frozenset(open))

    def admitted(self, prompt: int, turn: int) -> None:
        self._append("admitted", prompt=prompt, turn=turn, attempt=1 + self._before[prompt])

    def sampled(self, prompt: int, completions: Sequence[Completion]) -> None:
        versions = [version for completion in completions for version in completion.versions]
        span = [min(versions), max(versions)] if versions else []
        self._append("sampled", prompt=prompt, versions=span, tokens=[len(c.tokens) for c in completions])

    def scored(self, prompt: int, rewards: Sequence[float]) -> None:
        self._append("scored", prompt=prompt, rewards=list(rewards))

    def failed(self, prompt: int, attempt: int, error: str) -> None:
        """Its judge raised, or did not answer in time."""
        self._append("failed", prompt=prompt, attempt=attempt, error=error)

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        self._append("trained", step=step, prompts=[group.prompt.id for group in groups])
        self._file.flush()

    def dropped(self, group: Group, reason: str) -> None:
        tokens = sum(rollout.sampled for rollout in group.rollouts)
        self._append("dropped", prompt=group.prompt.id, reason=reason, tokens=tokens)

    def saved(self, step: int) -> None:
        """A checkpoint of this step is about to be written, with its cut. All before is on disk when this returns."""
        self._append("saved", step=step)
        self._to_disk()

    def close(self) -> None:
        self._to_disk()
        self._file.close()

    def _to_disk(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _admissions(self, next: int, open: frozenset[int]) -> Counter[int]:
        """How often each prompt that has no fate yet was admitted."""
        self._file.flush()
        with self._path.open("rb") as file:
            admitted = (_event(line)["prompt"] for line in file if b'"event":"admitted"' in line)
            return Counter(prompt for prompt in admitted if prompt >= next or prompt in open)

    def _append(self, event: str, **what: Any) -> None:
        self._file.write(_line({"n": self._lines, "event": event, **what}))
        self._lines += 1


def events(folder: Path) -> Iterator[dict[str, Any]]:
    """Every whole line but a torn last one. Raises Damaged where one is not whole, or missing."""
    path = folder / NAME
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        event = _read(line)
        if event is None or event["n"] != number:
            raise Damaged(f"{path}, line {number + 1}: expected event {number} and its checksum, found {line[:80]!r}")
        yield event


def _open(path: Path) -> tuple[BinaryIO, int]:
    """For appending after the last whole line, and how many there are."""
    file = path.open("a+b")
    file.seek(0)
    whole = lines = 0
    for line in file:
        if not line.endswith(b"\n") or _read(line[:-1]) is None:
            break
        whole, lines = whole + len(line), lines + 1
    file.truncate(whole)
    return file, lines


def _line(event: dict[str, Any]) -> bytes:
    text = json.dumps(event, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(line: bytes) -> dict[str, Any] | None:
    crc, _, text = line.partition(b" ")
    if len(crc) != 8 or crc != b"%08x" % zlib.crc32(text):
        return None
    return json.loads(text)


def _event(line: bytes) -> dict[str, Any]:
    """Of a line that was found whole before."""
    return json.loads(line.partition(b" ")[2])
