"""Estimates the host memory that snapshots take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_rl.config.sections import Config
from titan_rl.ext.snapshots.snapshot_parts import KEPT, peer_of
from titan_rl.preflight.memory import GIB, saved_bytes, trained_by, trained_meshes
from titan_rl.preflight.snapshot_sizes import Held, SnapshotSizes
from titan_rl.wire.cores import host_memory
from titan_rl.wire.model_shape import ModelShape

OWN, PEERS = "snapshots", "peers' snapshots"


def snapshot_bytes(parameters: int, each: int, replicas: int) -> int:
    """Return the host memory that snapshots of a trained model take, with `each` bytes per parameter; each HSDP replica
    keeps its own. 24 bytes per float32 parameter."""
    return KEPT * each * parameters * replicas


@dataclass(frozen=True, slots=True)
class MemoryOfSnapshots(SnapshotSizes):
    """The sizes in a run with snapshots."""

    config: Config

    def of_mesh(self, mesh: str, shape: ModelShape) -> int:
        p = trained_meshes(self.config).get(mesh)
        if p is None:
            return 0
        trained, each = trained_by(self.config, mesh, shape), saved_bytes(self.config, mesh)
        return snapshot_bytes(trained, each, p.data_parallel_replicate_degree)

    def by_host(self, mesh: str, shape: ModelShape, hosts: Sequence[int], number: int) -> Iterator[Held]:
        each = self.of_mesh(mesh, shape) // len(hosts)
        yield from ((host, OWN, each) for host in hosts)
        for host in hosts if self.config.hosts.at_addresses else ():
            peer = peer_of(host, [f"machine {other}" for other in range(number)])
            if peer is not None:
                yield peer, PEERS, each

    def formulas(self, peers: int) -> dict[str, str]:
        config, each = self.config, saved_bytes(self.config, "trainer")
        rate = min((gbps for gbps in (config.hosts.link_gbps, config.fault.snapshot_gbps) if gbps), default=0.0)
        seconds = f", at least {8 * (peers // KEPT) / (rate * 1e9):.2g} s at {rate:g} Gbit/s" if rate else ""
        return {
            OWN: f"{KEPT} x {each} per parameter, over the trainers' hosts",
            PEERS: f"of another host: each snapshot moves half of it{seconds}",
        }

    def warnings(self, shape: ModelShape) -> Iterator[str]:
        nbytes, memory = sum(self.of_mesh(mesh, shape) for mesh in trained_meshes(self.config)), host_memory()
        if nbytes > memory / 2:
            interval = self.config.fault.snapshot_interval
            yield (
                f"fault.snapshot_interval = {interval}: snapshots take {nbytes / GIB:.0f} GiB of the host's "
                f"{memory / GIB:.0f} GiB of memory; 0 disables them"
            )
