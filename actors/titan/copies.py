"""Copies of a rank's trained state in memory that outlives the rank."""

from collections.abc import Mapping

from torch.distributed.checkpoint.stateful import Stateful

from titan_rl.wire.parts import part
from titan_rl.wire.snapshot import SnapshotPart


class Copies:
    """Takes none, for a run without snapshots. titan_rl/ext/snapshots/ranks/state_copy.py takes some."""

    def begin(self, part: SnapshotPart) -> int:
        """Start copying into `part`; return the bytes of the tensors."""
        raise NotImplementedError

    def wait(self) -> None:
        """Block until the pending copy is whole. A failed one is printed and dropped; training does not need it."""

    def restore(self, part: SnapshotPart) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Release the memory, after the pending copy, which may still become whole."""


def copies_of(states: Mapping[str, Stateful]) -> Copies:
    copies = part("copies of states")
    return copies(states) if copies else Copies()
