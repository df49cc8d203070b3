"""Snapshots of all trained state, in memory that outlives the ranks: a lost mesh costs the steps since the newest one.

    take    ──> every rank of trainers and critic copies its state into its part, during the next step
    newest  <── stamps: the newest snapshot whose parts are whole on every rank

A part is an anonymous file (memfd) that this process holds open: it survives the death of any rank, and is freed when
this process ends. This process reads stamps only. Ranks find the parts through /proc, so they must run on this machine;
peer_snapshots.py is for ranks on other machines.

A snapshot is restored only if each of its parts carries its serial number, which a rank writes last. So a torn snapshot
is never restored, and the parts of all meshes belong to one step. `take` never writes parts of the newest whole
snapshot, and drops the parts of a torn one, which a rank may still be writing. So no death harms a whole snapshot.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from titan_rl.ext.snapshots.snapshot_parts import head
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.train.snapshots import Snapshots
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.types import PhaseName

Fds = dict[str, tuple[int, ...]]  # file descriptors of the ranks' parts, by mesh


class Entry(Protocol):
    """A snapshot, and the memory of its parts."""

    @property
    def snapshot(self) -> Snapshot: ...

    @property
    def whole(self) -> bool:
        """Return True if it can be restored."""
        ...

    def drop(self) -> None:
        """Free the memory, once the last rank that has mapped it unmaps it."""


@dataclass(frozen=True, slots=True)
class LocalSnapshot:
    """Its parts are files of this process."""

    snapshot: Snapshot
    fds: Fds

    @property
    def whole(self) -> bool:
        return all(head(fd)[0] == self.snapshot.serial for fds in self.fds.values() for fd in fds)

    def drop(self) -> None:
        for fds in self.fds.values():
            for fd in fds:
                os.close(fd)


class SnapshotStore(Snapshots):
    """The snapshots of a run whose trainers find this process's memory."""

    def __init__(self, trainers: ModelMesh, critic: ModelMesh | None, note: Callable[[str], None] = print) -> None:
        """`note` prints what a user should know."""
        self._trainers, self._critic, self._note = trainers, critic, note
        self._entries: list[Entry] = []  # at most two: the newest whole one, and the one begun after it
        self._serial = 0
        self.nbytes: dict[str, list[int]] = {}  # bytes of one snapshot, by mesh and rank

    async def take(self, phase: PhaseName, step: int, controller: str) -> None:
        meshes = self._meshes(phase)
        if not all(mesh.near for mesh in meshes):  # they have moved to where they cannot reach this process's memory
            return
        fds = self._free({mesh.name: mesh.dp * mesh.row_ranks for mesh in meshes})
        paths = {name: tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in each) for name, each in fds.items()}
        entry = LocalSnapshot(Snapshot(phase, step, controller, self._next_serial(), paths), fds)
        await self._begin(entry, meshes)

    def newest(self, *, before: int | None = None) -> Snapshot | None:
        entry = self._newest(before)
        return entry.snapshot if entry else None

    def forget(self, *, but: Snapshot | None = None) -> None:
        for entry in self._entries:
            if entry.snapshot is not but:
                entry.drop()
        self._entries = [entry for entry in self._entries if entry.snapshot is but]

    async def bring(self) -> None:
        if not all(mesh.near for mesh in self._meshes("rl")):
            self._note(
                "there are no snapshots from here on: the trainers have moved to where they cannot reach the memory of "
                "this process, so the loss of a trainer costs the steps since the last checkpoint"
            )
            self.forget()

    def _meshes(self, phase: PhaseName) -> list[ModelMesh]:
        """Return the meshes whose state is a snapshot of this phase."""
        critic = self._critic if phase == "rl" else None  # before RL it has learnt nothing
        return [self._trainers] if critic is None else [self._trainers, critic]

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    async def _begin(self, entry: Entry, meshes: list[ModelMesh]) -> None:
        """Let every rank begin to copy."""
        self._entries.append(entry)
        sizes = await asyncio.gather(*(mesh.snapshot(entry.snapshot) for mesh in meshes))
        self.nbytes = {mesh.name: each for mesh, each in zip(meshes, sizes, strict=True)}

    def _newest(self, before: int | None = None) -> Entry | None:
        whole = (t for t in self._entries if (before is None or t.snapshot.step < before) and t.whole)
        return max(whole, key=lambda t: t.snapshot.serial, default=None)

    def _spare(self) -> list[Entry]:
        """Keep the newest whole snapshot only; return the others."""
        newest = self._newest()
        spare = [entry for entry in self._entries if entry is not newest]
        self._entries = [newest] if newest else []
        return spare

    def _free(self, ranks: dict[str, int]) -> Fds:
        """Return parts for N ranks per mesh: an outdated snapshot's, or new ones."""
        free: Fds | None = None
        for entry in self._spare():
            fds = entry.fds if isinstance(entry, LocalSnapshot) and entry.whole else {}
            if free is None and {name: len(each) for name, each in fds.items()} == ranks:
                free = fds
            else:
                entry.drop()
        return free or {
            name: tuple(os.memfd_create(f"titan_rl snapshot of {name}") for _ in range(count))
            for name, count in ranks.items()
        }
