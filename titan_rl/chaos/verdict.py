"""What must hold when a run has ended, whatever faults it had."""

import json
import statistics
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_rl.chaos.subject import ChaosRun
from titan_rl.config.sections import Config
from titan_rl.record.history import audit
from titan_rl.record.ledger import Damaged, events
from titan_rl.record.lines import whole_lines

SHARED = Path("/dev/shm")
LARGEST_GAP = 100.0  # times the median log-prob gap: damaged weights that were served exceed it by orders of magnitude


def shared_memory() -> set[Path]:
    """Return the names in shared memory, without Python's own semaphores, which its resource tracker removes."""
    return {path for path in SHARED.iterdir() if not path.name.startswith("sem.")}


def audits(run: ChaosRun, config: Config, shared: set[Path], left: dict[int, str]) -> dict[str, list[str]]:
    """Return the problems found by each check. `shared` are the names in shared memory before the run, `left` the
    processes that outlived it."""
    found: dict[str, Iterable[str]] = {
        "no prompt lost, none twice, none stale (titan_rl.audit)": audit(run.folder)[0],
        "versions in order, none of an undone history": versions(run.folder, config),
        "trainer and generators agree on log-probs": _gaps(run.folder),
    }
    if not run.killed:
        code = run.process.returncode
        found |= {
            "the run ended well": [f"expected exit code 0, found {code}"] if code else [],
            "every incident is closed": [f"{i.role} never came back: {i.reason}" for i in run.incidents if i.open],
            "no process is left": [f"process {pid} ({name}) outlived the run" for pid, name in left.items()],
            "no shared memory is left": [f"{path} is left" for path in _leaked(shared)],
            "no sockets are left": [f"{folder} is left" for folder in run.socket_folders()],
        }
    return {what: list(problems) for what, problems in found.items()}


def summary(folder: Path) -> dict[str, Any]:
    """Return the run's summary.json, or {} if it wrote none."""
    with suppress(OSError, ValueError):
        return json.loads((folder / "summary.json").read_text())
    return {}


def versions(folder: Path, config: Config) -> Iterator[str]:
    """Check each history, the part of a run between two rewinds. Steps must follow each other, no sample may come from
    a version that the history has not made yet, and a synchronous run must not sample older weights after newer ones.
    """
    trained, newest, history = 0, 0, 0
    wrong = "history {}: prompt {} was sampled from version {} after {}"
    try:
        for event in events(folder):
            match event:
                case {"event": "begun", "step": step}:
                    trained, newest, history = step, 0, history + 1
                case {"event": "trained", "step": step}:
                    if step != trained + 1:
                        yield f"history {history}: expected step {trained + 1}, found {step}"
                    trained = step
                case {"event": "sampled", "prompt": prompt, "versions": [oldest, latest]}:
                    if latest > trained:
                        yield wrong.format(history, prompt, latest, f"step {trained}")
                    if config.rollout.lag == 0 and oldest < newest:
                        yield wrong.format(history, prompt, oldest, f"version {newest}")
                    newest = max(newest, latest)
    except (Damaged, OSError) as error:
        yield str(error)


def _gaps(folder: Path) -> Iterator[str]:
    """Check that no damaged weights were served: the trainer scores the same tokens with its own weights."""
    lines = map(json.loads, whole_lines(folder / "metrics.jsonl"))
    gaps = {line["step"]: line["logprob_gap/mean"] for line in lines if "logprob_gap/mean" in line}
    usual = statistics.median(gaps.values()) if gaps else 0.0
    for step, gap in gaps.items():
        if not gap <= LARGEST_GAP * max(usual, 1e-7):
            yield f"step {step}: the log-prob gap is {gap:.2g}, the median {usual:.2g}"


def _leaked(shared: set[Path]) -> set[Path]:
    """Return new names that no process has mapped; other runs on this host have theirs mapped."""
    new = shared_memory() - shared
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            text = maps.read_text()
            new = {path for path in new if str(path) not in text}
    return {path for path in new if path.exists()}
