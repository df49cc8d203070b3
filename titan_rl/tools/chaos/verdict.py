"""Audits a run that has ended, after any faults."""

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from titan_rl.tools.chaos.subject import ChaosRun
from titan_rl.tools.inspect.audit_rules import audit
from titan_rl.tools.inspect.run_files import RunFiles

SHARED = Path("/dev/shm")
EXACT_GAP = 1e-7  # between the same weights in float32
STALE_GAP = 1e-2  # what an update or two change, which the gap includes where samples are older than the weights
PASSING_SECONDS = 10.0
LARGEST_GAP = 100.0  # times the median log-prob gap: damaged weights that were served exceed it by orders of magnitude


def shared_memory() -> set[Path]:
    """Return the names in shared memory, without folders, which other programs make there, and without Python's own
    semaphores, which its resource tracker removes."""
    return {path for path in SHARED.iterdir() if path.is_file() and not path.name.startswith("sem.")}


def audits(run: ChaosRun, shared: set[Path], outlived: dict[int, str]) -> dict[str, list[str]]:
    """Return the problems found by each check. `shared` are the names in shared memory before the run, `left` the
    processes that outlived it."""
    checks: dict[str, Iterable[str]] = {
        "no prompt lost, none twice, none stale (titan_rl audit)": audit(run.folder)[0],
        "trainer and generators agree on log-probs": _gaps(run.folder),
    }
    if not run.killed:
        code = run.process.returncode
        checks |= {
            "the run ended well": [f"expected exit code 0, found {code}"] if code else [],
            "every incident is closed": [f"{i.role} never came back: {i.reason}" for i in run.open_incidents],
            "no process is left": [f"process {pid} ({name}) outlived the run" for pid, name in outlived.items()],
            "no shared memory is left": [f"{path} is left" for path in _leaked(shared)],
            "no sockets are left": [f"{folder} is left" for folder in run.socket_folders()],
        }
    return {what: list(problems) for what, problems in checks.items()}


def _gaps(folder: Path) -> Iterator[str]:
    """Check that no damaged weights were served: the trainer scores the same tokens with its own weights."""
    lines = [line for line in RunFiles(folder).metrics() if "logprob_gap/mean" in line]
    usual = statistics.median([line["logprob_gap/mean"] for line in lines] or [0.0])
    for line in lines:
        gap = line["logprob_gap/mean"]
        least = STALE_GAP if line.get("policy_age/max") else EXACT_GAP
        if not gap <= LARGEST_GAP * max(usual, least):
            yield f"step {line['step']}: the log-prob gap is {gap:.2g}, the median {usual:.2g}"


def _leaked(shared: set[Path]) -> set[Path]:
    """Return new names that no process has mapped and that do not go away: other runs on this host have theirs mapped,
    and other programs use theirs for a moment."""
    ends = time.monotonic() + PASSING_SECONDS
    new = shared_memory() - shared
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            text = maps.read_text(encoding="utf-8", errors="replace")
            new = {path for path in new if str(path) not in text}
    while (existing := {path for path in new if path.exists()}) and time.monotonic() < ends:
        time.sleep(0.1)
    return existing
