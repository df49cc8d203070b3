"""What a run left behind: in its folder, in shared memory, in the temporary folder."""

import tempfile
from pathlib import Path

from support.running import Run


def losses(run: Run, kind: str = "rl") -> list[float]:
    return [line["loss"] for line in run.lines("metrics.jsonl", kind) if "loss" in line]


def sampled(run: Run) -> list[tuple[int, int, list[int], list[float]]]:
    return [(r["step"], r["prompt_id"], r["tokens"], r["logprobs"]) for r in run.lines("rollouts.jsonl")]


def shared_memory() -> set[Path]:
    """What has a name in shared memory; Python's own semaphores apart, which its resource tracker removes."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


def socket_folders() -> set[Path]:
    return {path for pattern in (".tmp*", "titan_rl-*") for path in Path(tempfile.gettempdir()).glob(pattern)}
