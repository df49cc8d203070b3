"""Finds a run's checkpoints by the names that users type. Imports no numpy, which would start threads."""

from pathlib import Path

from titan_rl.record.checkpoints import Checkpoints
from titan_rl.wire.checkpoint_sums import FOLDER


def saved_steps(run: Path, *, critic: bool = False) -> dict[str, Path]:
    """Return the folder of each whole step, oldest first, by the step's name: cold_start/7 or 2."""
    whole, folder = dict[str, Path](), run / FOLDER
    heads = {"": folder / "critic"} if critic else {"cold_start/": folder / "cold_start", "": folder}
    for head, steps in heads.items():
        whole |= {f"{head}{n}": steps / f"step-{n}" for n in Checkpoints((steps,)).whole_steps()}
    return whole
