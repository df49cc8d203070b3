"""Names what a run's folder had recorded and lost, before a resumed run trains anything again."""

import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError, load_of_run
from titan_rl.record.ledger import decode
from titan_rl.record.lines import is_count, whole_lines
from titan_rl.record.run_folder import Resume
from titan_rl.record.run_names import LEDGER, METRICS, ROLLOUTS

LOGS = (METRICS, ROLLOUTS)
LAST_BYTES = 1 << 22  # at the end of a file, in which its last line is looked for


class Tail(NamedTuple):
    """The last RL step in a file of lines, and the checksum of its lines; 0 if there is none, None if it is unknown."""

    step: int = 0
    checksum: int | None = None


@dataclass(slots=True)
class RunRecords:
    """What the files of an RL run's folder record: read once, when a run starts, before anything is written."""

    folder: Path
    trained: int = 0  # the last step that the ledger trained; a rewind undoes later ones
    saved: int = 0  # the last step that it saved
    logged: dict[int, tuple[int, int]] = field(default_factory=dict)  # checksums of lines of metrics and rollouts
    ends: dict[str, Tail] = field(default_factory=dict)
    config: str = ""  # why config.toml cannot be read

    @classmethod
    def of(cls, folder: Path) -> "RunRecords":
        found = cls(folder, ends={name: _tail(folder / name) for name in LOGS})
        _read_ledger(folder / LEDGER, found)
        try:
            load_of_run(folder)
        except (ConfigError, OSError, ValueError) as error:
            found.config = str(error)
        return found

    def missing(self, config: Config, resume: Resume) -> list[str]:
        """Return a note for each file that ends before the step at which the run resumes, or is another run's, and for
        a step that the ledger saved and that has no checkpoint."""
        if config.algorithm.kind != "rl" or (resume.nothing and not self.saved):
            return []
        step, notes = resume.rl or 0, list[str]()
        if self.saved > step:
            since = f"after step {step}" if step else "of the whole run" if resume.nothing else "after the cold start"
            notes.append(
                f"the checkpoint of step {self.saved}, which the ledger saved, is missing or not whole: the steps "
                f"{since} are trained again"
            )
        for name, end in {LEDGER: self.trained, **{name: tail.step for name, tail in self.ends.items()}}.items():
            if end < step:
                what = "is missing" if not (self.folder / name).exists() else f"ends at step {end}"
                notes.append(f"{name} {what}, and the run resumes from step {step}: records of its steps are lost")
        for which, (name, tail) in enumerate(self.ends.items()):
            logged = self.logged.get(tail.step)
            if logged is not None and tail.checksum not in (None, logged[which]):
                notes.append(
                    f"{name}: the lines of step {tail.step} are not those in {LEDGER}: one of the files changed"
                )
        if self.config:
            notes.append(f"{self.config}: the keys of the run cannot be compared with this command's")
        return notes


def _read_ledger(path: Path, found: RunRecords) -> None:
    kinds = tuple(b'"event":"%s"' % kind for kind in (b"trained", b"saved", b"begun", b"logged"))
    for line in whole_lines(path) if path.is_file() else ():
        if not any(kind in line for kind in kinds):
            continue
        event = decode(line)
        step = event.get("step") if event is not None else None
        if event is None or not isinstance(step, int):
            continue
        if event["event"] == "begun":
            found.trained, found.saved = min(found.trained, step), min(found.saved, step)
            found.logged = {n: checksums for n, checksums in found.logged.items() if n <= step}
        elif event["event"] == "trained":
            found.trained = step
        elif event["event"] == "saved":
            found.saved = step
        elif isinstance(metrics := event.get("metrics"), int) and isinstance(rollouts := event.get("rollouts"), int):
            found.logged[step] = (metrics, rollouts)


def _tail(path: Path) -> Tail:
    if not path.is_file():
        return Tail()
    begin = max(0, os.path.getsize(path) - LAST_BYTES)
    tail = _tail_from(path, begin)
    return tail if tail.step or not begin else _tail_from(path, 0)  # a line may be longer


def _tail_from(path: Path, begin: int) -> Tail:
    last, checksum, whole = 0, 0, begin == 0
    for line in whole_lines(path, begin):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # the first one may be a part of a line
            continue
        if not isinstance(record, dict) or record.get("kind") != "rl":
            continue
        step = record.get("step")
        if isinstance(step, int) and is_count(step):
            if step != last:
                whole, last, checksum = whole or last > 0, step, 0
            checksum = zlib.crc32(line, checksum)
    return Tail(last, checksum if whole else None)
