"""Snapshots of all trained state in memory, if a run takes any."""

from titan_rl.config.sections import Config
from titan_rl.record.incidents import Incidents
from titan_rl.record.terminal import Terminal
from titan_rl.train.bring_up import Meshes
from titan_rl.wire.parts import part
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.types import PhaseName


class Snapshots:
    """Takes none: a lost mesh costs the steps since the last checkpoint. titan_rl/ext/snapshots takes some."""

    async def take(self, phase: PhaseName, step: int, controller: str) -> None:
        """Begin a snapshot of the current state; return once all ranks have begun. No rank changes its state before its
        copy is whole, so the next step may be started at once."""

    def newest(self, *, before: int | None = None) -> Snapshot | None:
        """Return the newest whole snapshot, taken before the step `before` if one is passed."""

    def forget(self, *, but: Snapshot | None = None) -> None:
        """Drop all snapshots, or all but the one that every mesh was restored from: later steps are undone."""

    async def settle(self) -> None:
        """Return once it is certain which snapshots are whole."""

    async def bring(self) -> None:
        """Make the newest snapshot reachable from the ranks' present hosts. Drop snapshots that they cannot reach."""


async def start_snapshots(config: Config, meshes: Meshes, incidents: Incidents, terminal: Terminal) -> Snapshots:
    started = part("snapshots") if config.fault.snapshot_interval else None
    return await started(config, meshes, incidents, terminal) if started else Snapshots()
