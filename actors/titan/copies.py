"""Copies of a rank's trained state in memory that outlives it, if this installation takes any
(titan_rl/ext/snapshots)."""

from collections.abc import Mapping
from typing import Protocol

from torch.distributed.checkpoint.stateful import Stateful

from titan_rl.wire.parts import part
from titan_rl.wire.snapshot import SnapshotPart


class StateCopies(Protocol):
    def begin(self, part: SnapshotPart) -> int:
        """Start copying into `part`; return the bytes of the tensors."""
        ...

    def wait(self) -> None:
        """Block until the pending copy is whole. A failed one is printed and dropped; training does not need it."""

    def restore(self, part: SnapshotPart) -> None: ...

    def close(self) -> None:
        """Release the memory, after the pending copy, which may still become whole."""


class NoCopies:
    """Has nothing to wait for: no snapshot is asked for."""

    def begin(self, part: SnapshotPart) -> int:
        raise NotImplementedError

    def wait(self) -> None: ...

    def restore(self, part: SnapshotPart) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


def state_copies(states: Mapping[str, Stateful]) -> StateCopies:
    """Return the copies of states, by name: what a checkpoint saves."""
    copies = part("copies of states")
    return copies(states) if copies else NoCopies()
