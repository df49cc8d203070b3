"""Outputs of a run: in its folder, in shared memory."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from support.running import RunFiles, Runs


def losses(run: RunFiles, kind: str = "rl") -> list[float]:
    return [line["loss"] for line in run.lines("metrics.jsonl", kind) if "loss" in line]


def losses_of_examples(runs: Runs, folder: Path, model: Path) -> list[float]:
    """Train a model's folder on examples for 80 steps, and return their losses."""
    keys = {"model__name": "auto", "model__hf_assets_path": model, "eval__size": 0}
    keys |= {"training__steps": 80, "training__global_batch_size": 64, "optimizer__lr": 3e-3}
    return losses(runs.finish(folder / "run", "sft_llama", small=False, **keys), "fit")


def logprob_gaps(run: RunFiles) -> list[float]:
    """Return the mean difference of log-probs between engines and trainers in each step."""
    return [line["logprob_gap/mean"] for line in run.lines("metrics.jsonl") if "logprob_gap/mean" in line]


def sampled(run: RunFiles) -> list[tuple[int, int, list[int], list[float]]]:
    return [(r["step"], r["prompt_id"], r["tokens"], r["logprobs"]) for r in run.lines("rollouts.jsonl")]


def same(run: RunFiles, other: RunFiles, accuracy: float = 0.0) -> bool:
    """Return True if two runs have computed the same losses and sampled tokens, to the last bit, and log-probs of
    engines that differ by at most `accuracy`. Print where the first difference is.

    Log-probs differ where engines had batches of another size: on some CPUs the same row of a product then has other
    last bits."""
    one, two = sampled(run), sampled(other)
    if not (
        _equal("losses of the cold start", losses(run, "cold_start"), losses(other, "cold_start"))
        and _equal("losses", losses(run), losses(other))
        and _equal("tokens", [row[:3] for row in one], [row[:3] for row in two])
    ):
        return False
    far = [(a, b) for a, b in zip(one, two, strict=True) if not np.allclose(a[3], b[3], rtol=0, atol=accuracy)]
    return _equal("log-probs that differ", far, [])


def _equal(what: str, found: list[Any], expected: list[Any]) -> bool:
    if found == expected:
        return True
    rows = zip(found, expected, strict=False)
    first = next((i for i, (one, two) in enumerate(rows) if one != two), min(len(found), len(expected)))
    print(f"{what}: {len(found)} and {len(expected)}; the first difference is at {first}:")
    print(*found[first : first + 1], *expected[first : first + 1], sep="\n")
    return False


def shared_memory() -> set[Path]:
    """Return the names in shared memory that no live process uses: another run's are not a leak of this one. Left out
    are folders, which other programs make there, and Python's own semaphores, which its resource tracker removes."""
    unused = _unused_names()
    if unused:  # another process may have created a name and not mapped it yet, or be about to remove it
        time.sleep(1)
        unused &= _unused_names()
    return unused


def _unused_names() -> set[Path]:
    named = {path for path in Path("/dev/shm").iterdir() if path.is_file() and not path.name.startswith("sem.")}
    for process in Path("/proc").glob("[0-9]*") if named else ():
        with suppress(OSError):  # it ended
            used = (process / "maps").read_text() + "".join(
                f"{link.readlink()}\n" for link in (process / "fd").iterdir()
            )
            named = {path for path in named if f"{path}\n" not in used}
    return named
