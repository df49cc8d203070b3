"""What a run finds in its folder: checkpoints to resume from, and free names for what is moved aside."""

from dataclasses import dataclass, replace
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.types import PhaseName


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run resumes: the newest whole step of each phase. Decided here once for each attempt, and passed down."""

    rl: int | None
    cold_start: int | None
    snapshot: Snapshot | None = None
    """Holds one of these steps in memory; None if both are on disk."""

    @classmethod
    def find(cls, folder: Path, config: Config, snapshot: Snapshot | None = None) -> "Resume":
        """Look at the checkpoints on disk, and at the newest snapshot of this process, which counts if it is newer."""

        def newest(phase: PhaseName) -> int | None:
            return max(Checkpoints.of(folder, config, phase).whole_steps(), default=None)

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


def aside(folder: Path) -> Path:
    """The first free name of `run.1`, `run.2`, ...: an old run is moved, never deleted."""
    return next(p for k in range(1, 10_000) if not (p := folder.with_name(f"{folder.name}.{k}")).exists())
