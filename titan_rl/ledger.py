"""Every prompt's life, in one append-only file of a run: ledger.jsonl.

    begun at step s ── admitted ── sampled ── scored ── trained at step t
                          │                     └────── dropped, with its reason
                          └── admitted again, by a run that resumes: its next attempt

One event a line, `CRC-32 JSON`, the JSON with a number that counts lines. Lines, not a database: appending needs no
lock and no second file, a person can grep it, and what a crash tears is the last line's end, which the next process
cuts off. Events of a step are on disk before its checkpoint is begun: a ledger that lost its tail to a power cut still
knows everything up to the checkpoint from which the run resumes, and what came after never counted.
"""

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from titan_rl.types import Completion, Group

NAME = "ledger.jsonl"


class Damaged(ValueError):
    """A line that is neither whole nor the last one."""


class Ledger:
    def __init__(self, folder: Path) -> None:
        self._file, self._lines = _open(folder / NAME)

    def begun(self, step: int, next: int, open: Sequence[int]) -> None:
        """A process goes on after step `step`, at the cut that its checkpoint holds: prompts before `next` have their
        fate, but for the `open` ones. What came later is undone."""
        self._append("begun", step=step, next=next, open=list(open))

    def admitted(self, prompt: int, turn: int) -> None:
        self._append("admitted", prompt=prompt, turn=turn)

    def sampled(self, prompt: int, completions: Sequence[Completion]) -> None:
        versions = [version for completion in completions for version in completion.versions]
        span = [min(versions), max(versions)] if versions else []
        self._append("sampled", prompt=prompt, versions=span, tokens=[len(c.tokens) for c in completions])

    def scored(self, prompt: int, rewards: Sequence[float]) -> None:
        self._append("scored", prompt=prompt, rewards=list(rewards))

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        self._append("trained", step=step, prompts=[group.prompt.id for group in groups])
        self._file.flush()

    def dropped(self, groups: Sequence[Group], reason: str) -> None:
        for group in groups:
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
