"""The checkpoints of a phase on disk: which steps a run can resume from, and which may be deleted.

    checkpoint/step-20              the policy after RL step 20, its optimizer, the controller's state
    checkpoint/critic/step-20       the critic after the same step
    checkpoint/cold_start/step-40   the policy during its cold start

A step counts if every trained model has it whole. DCP writes .metadata last, so a folder without it is a save that did
not finish.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.wire.types import PhaseName


@dataclass(frozen=True, slots=True)
class Checkpoints:
    folders: tuple[Path, ...]  # of the policy, and of the critic if one is trained

    @classmethod
    def of(cls, folder: Path, config: Config, phase: PhaseName = "rl") -> "Checkpoints":
        """Return those of a phase in a run's folder."""
        policy = folder / config.checkpoint.folder
        if phase == "cold_start":
            return cls((policy / "cold_start",))
        return cls((policy, policy / "critic") if config.algorithm.needs_critic else (policy,))

    def whole_steps(self) -> list[int]:
        """Return the steps from which a run can resume, oldest first."""
        steps = ({step for step, path in _steps(folder) if (path / ".metadata").exists()} for folder in self.folders)
        return sorted(set.intersection(*steps))

    def purge(self, keep: int, writing: int) -> None:
        """Delete all but the newest `keep` whole steps and the one that may still be being `writing`. What one model
        has and another does not is no step to resume from, and goes too."""
        kept = {writing, *self.whole_steps()[-keep:]}
        for step, path in self.paths():
            if step in kept:
                continue
            with suppress(OSError):
                (path / ".metadata").unlink(missing_ok=True)  # first: a step that is half deleted does not count
                shutil.rmtree(path)

    def paths(self) -> list[tuple[int, Path]]:
        """Return every step's folders, whole or not."""
        return [found for folder in self.folders for found in _steps(folder)]


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step-*"):
        if found := re.fullmatch(r"step-(\d+)", path.name):
            yield int(found[1]), path
