"""Snapshots of all trained state in memory: as the controller names them, and as a rank finds its part."""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from titan_rl.config.sections import BYTES, Dtype
from titan_rl.wire.types import PhaseName

KEPT = 2  # the newest complete snapshot, and the one being written
TENSORS = 3  # per parameter: its values, and Adam's two moments

WRITING = 0  # serial numbers count from 1
HEAD = struct.Struct("=qqq")  # a part begins with its stamp, and start and end of its data besides tensors


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """One rank's part. Its stamp is the snapshot's serial number if it is complete, WRITING while it changes.

    >>> SnapshotPart("/proc/4711/fd/23", 8)
    """

    path: str  # of the controller's memory
    serial: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of every trained mesh after one step."""

    phase: PhaseName
    step: int
    controller: str  # JSON: the controller's state, as in a checkpoint of this step
    serial: int
    paths: Mapping[str, tuple[str, ...]]  # by mesh: the paths of its ranks' parts, in rank order

    def parts(self, mesh: str) -> list[SnapshotPart]:
        return [SnapshotPart(path, self.serial) for path in self.paths[mesh]]


def head(fd: int) -> tuple[int, int, int]:
    """Return a part's stamp, start and end; zeros if nothing was written to it yet."""
    return HEAD.unpack(os.pread(fd, HEAD.size, 0).ljust(HEAD.size, b"\0"))


def snapshot_bytes(parameters: int, dtype: Dtype, replicas: int) -> int:
    """Return the host memory that snapshots of a trained model take; each HSDP replica keeps its own.

    KEPT * TENSORS * bytes(dtype) * parameters * replicas: 24 bytes per float32 parameter.
    """
    return KEPT * TENSORS * BYTES[dtype] * parameters * replicas
