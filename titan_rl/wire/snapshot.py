"""A snapshot of all that is trained, in memory: as the controller names it, and as a rank finds its part of it."""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from titan_rl.config.sections import BYTES, Dtype
from titan_rl.wire.types import PhaseName

KEPT = 2  # the newest whole one, and the one that is being written
TENSORS = 3  # of a parameter: its values, and Adam's two moments

WRITING = 0  # serial numbers count from 1
HEAD = struct.Struct("=qqq")  # a part begins with its stamp, and where what it holds beside tensors starts and ends


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """One rank's. Its stamp is the snapshot's serial number when it is whole, WRITING while it changes.

    >>> Part("/proc/4711/fd/23", 8)
    """

    path: str  # of the controller's memory
    serial: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of every trained mesh behind one step."""

    phase: PhaseName
    step: int
    controller: str  # JSON: what a checkpoint of this step would keep of the controller
    serial: int
    paths: Mapping[str, tuple[str, ...]]  # by mesh: of its ranks' parts, in rank order

    def parts(self, mesh: str) -> list[SnapshotPart]:
        return [SnapshotPart(path, self.serial) for path in self.paths[mesh]]


def head(fd: int) -> tuple[int, int, int]:
    """Of a part: stamp, start, end. Nothing was ever written to a new one."""
    stamp, start, end = HEAD.unpack(os.pread(fd, HEAD.size, 0).ljust(HEAD.size, b"\0"))
    return stamp, start, end


def snapshot_bytes(parameters: int, dtype: Dtype, replicas: int) -> int:
    """What snapshots of a trained model take of the host's memory; each HSDP replica keeps its own.

    KEPT * TENSORS * bytes(dtype) * parameters * replicas: 24 bytes a float32 parameter.
    """
    return KEPT * TENSORS * BYTES[dtype] * parameters * replicas
