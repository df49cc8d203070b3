"""The host memory that snapshots take, if a run takes any (titan_rl/ext/snapshots)."""

from collections.abc import Iterable, Mapping, Sequence

from titan_rl.config.sections import Config
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.parts import part

Held = tuple[int, str, int]
"""A host, and the name and bytes of snapshots there."""


class SnapshotSizes:
    """The sizes in a run without snapshots."""

    def of_mesh(self, mesh: str, shape: ModelShape) -> int:
        """Return the bytes that snapshots of a mesh take on all hosts."""
        return 0

    def by_host(self, mesh: str, shape: ModelShape, hosts: Sequence[int], number: int) -> Iterable[Held]:
        """Yield the snapshots on each of `number` hosts, of a mesh whose ranks are on `hosts`."""
        return ()

    def formulas(self, peers: int) -> Mapping[str, str]:
        """Return how the bytes of each name come about. `peers`: the most that a host holds for others."""
        return {}

    def warnings(self, shape: ModelShape) -> Iterable[str]:
        return ()


def snapshot_sizes(config: Config) -> SnapshotSizes:
    sizes = part("sizes of snapshots") if config.fault.snapshot_interval else None
    return sizes(config) if sizes else SnapshotSizes()
