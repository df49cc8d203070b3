"""The parts of a run, wired once in session.py, and passed to the parts that drive them."""

from dataclasses import dataclass

from titan_rl.config.sections import Config
from titan_rl.meshes.faults import Watch
from titan_rl.preflight.plan import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.record.report import Report
from titan_rl.record.terminal import Terminal
from titan_rl.rollout.player import Shares
from titan_rl.train.bring_up import Meshes
from titan_rl.train.regrowth import Regrowth
from titan_rl.train.snapshots import Snapshots
from titan_rl.train.stop import Stop
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.spans import Clock


@dataclass(frozen=True, slots=True)
class RunParts:
    """Everything that lives as long as the run's process does; an attempt adds a controller."""

    setup: Setup
    terminal: Terminal
    clock: Clock
    stop: Stop
    incidents: Incidents
    meshes: Meshes
    watch: Watch
    weights: WeightSync | None  # None without generators
    snapshots: Snapshots
    report: Report
    regrowth: Regrowth
    shares: Shares | None = None  # plays episodes together with other policies

    @property
    def config(self) -> Config:
        return self.setup.config
