"""Freezes the logs of a run that is still writing them, so that no file is ahead of another.

A step is written in this order: trained (ledger), its rollouts, its metrics, logged (ledger). The copy is made in the
opposite order, and ends with the last step that all of them have: as if the run had been killed there.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_rl.config.toml import CONFIG
from titan_rl.record.ledger import decode
from titan_rl.record.lines import whole_lines
from titan_rl.record.run_names import LEDGER, METRICS, ROLLOUTS
from titan_rl.tools.inspect.line_checks import parsed
from titan_rl.tools.inspect.run_files import RunFiles


@contextmanager
def frozen(run: RunFiles) -> Iterator[tuple[RunFiles, str]]:
    """Yield the run and ""; or, while it is active, a copy without checkpoints, and what the copy is."""
    if not run.active:
        yield run, ""
        return
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        metrics = _lines(run / METRICS)
        rollouts = _lines(run / ROLLOUTS)
        ledger = _lines(run / LEDGER)
        last = _last_step(metrics)
        (copy / METRICS).write_bytes(b"".join(metrics))
        kept = (line for line in rollouts if (parsed(line) or {}).get("step", 0) <= last)
        (copy / ROLLOUTS).write_bytes(b"".join(kept))
        (copy / LEDGER).write_bytes(b"".join(ledger[: _end_of_step(ledger, last)]))
        with suppress(OSError):
            shutil.copy(run / CONFIG, copy)
        yield RunFiles(copy), f"the run is active: compared up to step {last}, without its checkpoints"


def _lines(path: Path) -> list[bytes]:
    with suppress(FileNotFoundError):
        return list(whole_lines(path))
    return []


def _last_step(metrics: list[bytes]) -> int:
    """Return the last RL step with a line, or the one that the run resumed at after it."""
    found = (parsed(line) or {} for line in reversed(metrics))
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
