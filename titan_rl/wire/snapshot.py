"""Snapshots of all trained state in memory: where each rank finds its part."""

from collections.abc import Mapping
from dataclasses import dataclass

from titan_rl.wire.types import PhaseName


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """One rank's part. Its stamp is the snapshot's serial number if it is complete.

    >>> SnapshotPart("/proc/4711/fd/23", 8)
    """

    path: str  # memory of the controller, or of the snapshot server of the rank's host
    serial: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of every trained mesh after one step."""

    phase: PhaseName
    step: int
    controller: str  # JSON: the controller's state, as in a checkpoint of this step
    serial: int
    paths: Mapping[str, tuple[str, ...]]  # paths of the ranks' parts, by mesh and in rank order

    def parts(self, mesh: str) -> list[SnapshotPart]:
        return [SnapshotPart(path, self.serial) for path in self.paths[mesh]]
