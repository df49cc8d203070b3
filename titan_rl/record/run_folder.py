"""Finds the checkpoints that a run resumes from, and moves old runs and damaged checkpoints aside."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from titan_rl.config.sections import Config, JobSection
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.wire.errors import RunError
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.types import PhaseName

FOLDER_CHECK_SECONDS = 1.0


class FolderRefused(Exception):
    """A run folder that cannot be used; str() names the key, the expected value and the actual one."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run resumes: the newest whole step of each phase. Decided here once for each attempt, and passed down."""

    rl: int | None
    cold_start: int | None
    snapshot: Snapshot | None = None
    """Holds one of these steps in memory; None if both are on disk."""

    @classmethod
    def find(cls, folder: Path, config: Config, snapshot: Snapshot | None = None) -> "Resume":
        """Look at the checkpoints on disk, and at the newest snapshot of this process, which counts if it is newer.
        Only the sizes of files are compared."""

        def newest(phase: PhaseName) -> int | None:
            return Checkpoints.of(folder, config, phase).newest()[0]

        on_disk = cls(newest("rl"), newest("cold_start"))
        if snapshot is None or snapshot.step <= on_disk.state(snapshot.phase)[0]:
            return on_disk
        later: dict[str, int] = {snapshot.phase: snapshot.step}
        return replace(on_disk, snapshot=snapshot, **later)

    def state(self, phase: PhaseName) -> tuple[int, Snapshot | None]:
        """The step at which a phase resumes, 0 if at its beginning, and the snapshot if that step is in memory."""
        in_memory = self.snapshot if self.snapshot is not None and self.snapshot.phase == phase else None
        return getattr(self, phase) or 0, in_memory

    @property
    def nothing(self) -> bool:
        """True if the run starts from the beginning."""
        return self.rl is None and self.cold_start is None

    def over_cold_start(self, config: Config) -> bool:
        return self.rl is not None or (self.cold_start or 0) >= config.cold_start.steps

    @property
    def kept_rl(self) -> int | None:
        """The last RL step whose records stay; None starts the records from scratch."""
        return 0 if self.rl is None and self.cold_start is not None else self.rl

    @property
    def kept_cold_start(self) -> int | None:
        """The step after which the cold start continues; None if it is over."""
        return self.cold_start if self.rl is None else None

    def __str__(self) -> str:
        if self.rl is not None:
            return f"RL step {self.rl}"
        if self.cold_start is not None:
            return f"cold start step {self.cold_start}"
        return ""


def sound_resume(
    folder: Path, config: Config, snapshot: Snapshot | None = None, *, dry: bool = False
) -> tuple[Resume, list[str]]:
    """Decide where a run resumes. Read the checkpoint's bytes first: a damaged one is renamed to damaged-N.1, and the
    one before it is used. Return the decision and what the user should know. If every checkpoint of a phase is
    damaged, raise: a run that was trained must not start from the beginning unnoticed. A `dry` call compares only the
    sizes of files, and renames nothing."""
    resume = Resume.find(folder, config, snapshot)
    phase: PhaseName = "rl" if Checkpoints.of(folder, config).whole_steps() else "cold_start"
    if resume.snapshot is not None:
        return resume, []
    checkpoints = Checkpoints.of(folder, config, phase)
    sound, damaged = checkpoints.newest(read=not dry)
    if damaged and sound is None and (snapshot is None or snapshot.phase != phase):
        raise RunError(
            f"every checkpoint in {checkpoints.folders[0]} is damaged",
            "\n".join([*damaged.values(), "Restore one of them, or start from scratch with --job.fresh."]),
        )
    notes: list[str] = []
    for step, why in damaged.items():
        used = "a snapshot" if sound is None else f"the checkpoint of step {sound}"
        moved = "" if dry else f"; it was renamed to {_set_aside(checkpoints, step)}"
        notes.append(f"the checkpoint of step {step} is damaged, and {used} is used instead: {why}{moved}")
    if damaged:
        before: dict[str, int | None] = {phase: sound}
        resume = replace(resume, **before) if dry else Resume.find(folder, config, snapshot)
    if sound is not None and resume.snapshot is None and checkpoints.without_sums(sound):
        notes.append(f"the checkpoint of step {sound} has no checksums: its bytes cannot be checked")
    return resume, notes


def _set_aside(checkpoints: Checkpoints, step: int) -> str:
    """Rename a step's folders, of all models, to names that nothing takes for a step."""
    names = []
    for folder in reversed(checkpoints.folders):
        (folder / f"step-{step}").rename(moved := aside(folder / f"damaged-{step}"))
        names.append(moved.name)
    return names[-1]


def folder_lost(folder: Path, before: os.stat_result) -> RunError | None:
    """Return the error that ends a run whose folder has been removed, renamed or replaced since `before`."""
    try:
        same = os.path.samestat(os.stat(folder), before)
    except FileNotFoundError:
        same = False
    except OSError:  # a network filesystem that does not answer now
        return None
    if same:
        return None
    return RunError(
        f"job.dump_folder: {folder} was removed or renamed while the run wrote to it",
        "Checkpoints, ledger, metrics and rollouts went with it. A renamed folder can be resumed under its new name: "
        "--job.dump_folder NEW_NAME.",
    )


async def watch_folder(folder: Path, before: os.stat_result, lost: Callable[[RunError], None]) -> None:
    """Call `lost` once this folder has been removed, renamed or replaced."""
    while (error := folder_lost(folder, before)) is None:
        await asyncio.sleep(FOLDER_CHECK_SECONDS)
    lost(error)


def check_folder(job: JobSection) -> None:
    """Raise if job.fresh cannot rename this folder, or must not."""
    if not job.fresh:
        return
    target, here = Path(job.dump_folder).resolve(), Path.cwd()
    found = ""
    if target in (here, *here.parents):
        found = f"{target}, which {'is the current folder' if target == here else 'holds the current folder'}"
    elif os.path.ismount(target):
        found = f"the mount point {target}: use a folder inside it"
    if found:
        raise FolderRefused(f"job.fresh: expected a job.dump_folder that can be renamed, found {found}")


def move_aside(folder: Path) -> Path:
    """Rename an old run's folder and create an empty one in its place. Return the old one's new name. A link stays: the
    folder that it leads to is renamed."""
    target = folder.resolve()
    moved = aside(target)
    try:
        target.rename(moved)
        target.mkdir()
    except OSError as error:
        why = f"found {target}: {error.strerror}"
        raise FolderRefused(f"job.fresh: expected a job.dump_folder that can be renamed, {why}") from None
    return moved


def aside(folder: Path) -> Path:
    """The first free name of `run.1`, `run.2`, ...: an old run is moved, never deleted."""
    return next(p for k in range(1, 10_000) if not (p := folder.with_name(f"{folder.name}.{k}")).exists())
