"""Chooses where a run's snapshots are."""

from titan_rl.config.sections import Config
from titan_rl.ext.snapshots.peer_snapshots import PeerSnapshots
from titan_rl.ext.snapshots.snapshot_servers import SnapshotServers
from titan_rl.ext.snapshots.snapshot_store import SnapshotStore
from titan_rl.record.incidents import Incidents
from titan_rl.record.terminal import Terminal
from titan_rl.train.bring_up import Meshes


async def placed_snapshots(config: Config, meshes: Meshes, incidents: Incidents, terminal: Terminal) -> SnapshotStore:
    """Return the run's snapshots: in this process's memory if all trained ranks reach it, else on snapshot servers."""
    trainers, critic = meshes.trainers, meshes.critic
    if all(mesh.near for mesh in (trainers, critic) if mesh is not None):
        return SnapshotStore(trainers, critic, incidents.note)
    ends = SnapshotServers(meshes.hosts, config.comm.init_timeout_seconds, config.comm.train_timeout_seconds)
    snapshots = PeerSnapshots(trainers, critic, ends, incidents.note, config.fault.snapshot_gbps)
    with terminal.phase("snapshots: servers"):
        copies, how = await snapshots.start()
    terminal.note(f"snapshots: copies of {', of '.join(copies)}; by {how}")
    return snapshots
