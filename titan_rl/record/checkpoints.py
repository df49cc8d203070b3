"""The checkpoints of a phase on disk: which steps a run can resume from, and which may be deleted.

    checkpoint/step-20              the policy after RL step 20, its optimizer, the controller's state
    checkpoint/critic/step-20       the critic after the same step
    checkpoint/cold_start/step-40   the policy during its cold start
    checkpoint/damaged-20.1         a step whose files have changed since; a run never touches it again

A step is whole if every trained model has it whole. DCP writes .metadata last, so a folder without it is a save that
did not finish. A step counts if it is whole and its files have the sizes that they were written with.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.config.sections import Config
from titan_rl.wire.checkpoint_sums import FOLDER, METADATA, SUMS, damage

if TYPE_CHECKING:  # its numpy would start threads
    from titan_rl.wire.types import PhaseName

NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")  # as the run writes it: not step-08


@dataclass(frozen=True, slots=True)
class Checkpoints:
    folders: tuple[Path, ...]  # the policy's, and the critic's if one is trained

    @classmethod
    def of(cls, folder: Path, config: Config, phase: "PhaseName" = "rl") -> "Checkpoints":
        """Return the checkpoints of a phase in a run's folder."""
        policy = folder / FOLDER
        if phase == "cold_start":
            return cls((policy / "cold_start",))
        return cls((policy, policy / "critic") if config.algorithm.needs_critic else (policy,))

    def whole_steps(self) -> list[int]:
        """Return the steps that were saved to the end, oldest first."""
        steps = ({step for step, path in _steps(folder) if (path / METADATA).exists()} for folder in self.folders)
        return sorted(set.intersection(*steps))

    def newest(self, *, read: bool = False) -> tuple[int | None, dict[int, str]]:
        """Return the newest step that counts, and the damage of each whole step after it. Sizes are compared, or all
        bytes are `read`."""
        damaged: dict[int, str] = {}
        for step in reversed(self.whole_steps()):
            why = self.damage(step, read=read)
            if not why:
                return step, damaged
            damaged[step] = why
        return None, damaged

    def damage(self, step: int, *, read: bool = False) -> str:
        """Return the folder and the damage of a whole step; "" if there is none."""
        paths = [folder / f"step-{step}" for folder in self.folders]
        found = ((path, _misplaced(path) or damage(path, read=read)) for path in paths)
        return next((f"{path}: {why}" for path, why in found if why), "")

    def without_sums(self, step: int) -> bool:
        """Return True if a step's bytes cannot be compared: an earlier version wrote it."""
        return not all((folder / f"step-{step}" / SUMS).exists() for folder in self.folders)

    def purge(self, keep: int, writing: int | None = None) -> None:
        """Delete every step that is not whole, except the one being written now. Then delete all steps older than the
        newest `keep` that count; 0 keeps all. A step of one model without the other's is not whole."""
        whole = self.whole_steps()
        kept = [step for step in whole if not self.damage(step)][-keep:] if keep else []
        oldest = kept[0] if len(kept) == keep > 0 else 0
        for step, path in self.paths():
            if step == writing or (step in whole and step >= oldest):
                continue
            with suppress(OSError):
                (path / METADATA).unlink(missing_ok=True)  # first: a step that is half deleted does not count
                shutil.rmtree(path)

    def paths(self) -> list[tuple[int, Path]]:
        """Return every step's folders, whole or not."""
        return [found for folder in self.folders for found in _steps(folder)]


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("step-*"):
        found = NAME.fullmatch(path.name)
        if found:
            yield int(found[1]), path


def _misplaced(path: Path) -> str:
    """Return why a step's folder is not what the run wrote under this name; "" if it may be."""
    if path.is_symlink():
        return "it is a link"
    step, sums = int(path.name.removeprefix("step-")), path / SUMS
    others = [(n, other / SUMS) for n, other in _steps(path.parent) if other != path and (other / SUMS).is_file()]
    if not sums.is_file():
        return f"{SUMS} is missing, which this run writes" if others else ""
    written = sums.read_bytes()  # also of the optimizer's step count, so no two steps have the same
    copied = next((other for n, other in others if n < step and other.read_bytes() == written), None)
    named = b'"name": "step-' in written  # then `damage` tells a copy by its name
    return f"it is a copy of {copied.parent.name}" if copied and not named else ""
