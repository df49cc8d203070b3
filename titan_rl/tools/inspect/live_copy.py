"""Freezes the logs of a run that is still writing them, so that no file is ahead of another.

A step is written in this order: trained (ledger), its rollouts, its metrics, logged (ledger). The copy is made in the
opposite order, and ends with the last step that all of them have: as if the run had been killed there.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from titan_rl.record.ledger import NAME, decode
from titan_rl.record.lines import whole_lines
from titan_rl.record.run_lock import in_use
from titan_rl.tools.inspect.run_history import METRICS, ROLLOUTS


@contextmanager
def frozen(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folder and ""; or, while a run uses it, a copy without checkpoints, and what the copy is."""
    if not in_use(folder):
        yield folder, ""
        return
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        metrics = _lines(folder / METRICS)
        rollouts = _lines(folder / ROLLOUTS)
        ledger = _lines(folder / NAME)
        last = _last_step(metrics)
        (copy / METRICS).write_bytes(b"".join(metrics))
        (copy / ROLLOUTS).write_bytes(b"".join(line for line in rollouts if _object(line).get("step", 0) <= last))
        (copy / NAME).write_bytes(b"".join(ledger[: _end_of_step(ledger, last)]))
        with suppress(OSError):
            shutil.copy(folder / "config.toml", copy)
        yield copy, f"the run is active: compared up to step {last}, without its checkpoints"


def _lines(path: Path) -> list[bytes]:
    with suppress(FileNotFoundError):
        return list(whole_lines(path))
    return []


def _last_step(metrics: list[bytes]) -> int:
    """Return the last RL step with a line, or the one that the run resumed at after it."""
    found = (_object(line) for line in reversed(metrics))
    return next((line.get("step", 0) for line in found if line.get("kind") in ("rl", "startup")), 0)


def _end_of_step(ledger: list[bytes], step: int) -> int:
    """Return how many lines of the ledger there are before a later step is trained."""
    end = len(ledger)
    for at in reversed(range(len(ledger))):
        event = decode(ledger[at]) or {}
        if event.get("event") == "begun":
            break
        if event.get("event") == "trained" and event["step"] > step:
            end = at
    return end


def _object(line: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        return found if isinstance(found, dict) else {}
    return {}
