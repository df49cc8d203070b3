"""Snapshots of all trained state, in memory that outlives the ranks: a lost mesh costs the steps since the newest one.

    take    ──> every rank of trainers and critic copies its state into its part, during the next step
    newest  <── stamps: the newest snapshot whose parts are whole on every rank

A part is an anonymous file (memfd) that this process holds open: it survives the death of any rank, and is freed when
this process ends. This process reads stamps only. Ranks find the parts through /proc, so they must run on this machine:
with ranks on another one there are no snapshots, and a lost mesh costs the steps since the last checkpoint.

A snapshot is restored only if each of its parts carries its serial number, which a rank writes last. So a torn snapshot
is never restored, and the parts of all meshes belong to one step. A take never writes parts of the newest whole
snapshot. It drops the parts of a torn one, which a rank may still be writing. So a whole snapshot stays whole, whatever
dies and whenever.
"""

import asyncio
import os
from dataclasses import dataclass

from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.wire.snapshot import Snapshot, head
from titan_rl.wire.types import PhaseName

Fds = dict[str, tuple[int, ...]]  # by mesh: the file descriptors of its ranks' parts


@dataclass(frozen=True, slots=True)
class Taken:
    snapshot: Snapshot
    fds: Fds

    @property
    def whole(self) -> bool:
        return all(head(fd)[0] == self.snapshot.serial for fds in self.fds.values() for fd in fds)

    def drop(self) -> None:
        """Close the parts. Their memory is freed when the last rank that has mapped it unmaps it."""
        for fds in self.fds.values():
            for fd in fds:
                os.close(fd)


class Snapshots:
    def __init__(self, trainers: ModelMesh, critic: ModelMesh | None) -> None:
        self._trainers, self._critic = trainers, critic
        self._taken: list[Taken] = []  # at most two: the newest whole one, and the one begun after it
        self._serial = 0
        self.nbytes: dict[str, list[int]] = {}  # by mesh and rank, of one snapshot

    async def take(self, phase: PhaseName, step: int, controller: str) -> None:
        """Begin a snapshot of the meshes' current state; return once all ranks have begun. No rank changes its state
        before its copy is whole, so the next step may be started at once."""
        meshes: list[ModelMesh] = [self._trainers]
        if self._critic is not None and phase == "rl":  # before RL it has not learnt anything
            meshes.append(self._critic)
        if not all(mesh.near for mesh in meshes):  # they cannot reach this process's memory
            return
        self._serial += 1
        fds = self._free({mesh.name: mesh.dp * mesh.tp for mesh in meshes})
        paths = {name: tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in each) for name, each in fds.items()}
        snapshot = Snapshot(phase, step, controller, self._serial, paths)
        self._taken.append(Taken(snapshot, fds))
        sizes = await asyncio.gather(*(mesh.snapshot(snapshot) for mesh in meshes))
        self.nbytes = {mesh.name: each for mesh, each in zip(meshes, sizes, strict=True)}

    def newest(self, *, before: int | None = None) -> Snapshot | None:
        """Return the newest whole snapshot, or the newest of those taken before a step."""
        taken = self._newest(before)
        return taken.snapshot if taken else None

    def forget(self, *, but: Snapshot | None = None) -> None:
        """Drop all snapshots, or all but the one that every mesh was restored from: later steps are undone."""
        for taken in self._taken:
            if taken.snapshot is not but:
                taken.drop()
        self._taken = [taken for taken in self._taken if taken.snapshot is but]

    def _newest(self, before: int | None = None) -> Taken | None:
        whole = (t for t in self._taken if (before is None or t.snapshot.step < before) and t.whole)
        return max(whole, key=lambda t: t.snapshot.serial, default=None)

    def _free(self, ranks: dict[str, int]) -> Fds:
        """Return parts for N ranks per mesh: those of a snapshot that is no longer the newest, or new ones."""
        kept = self._newest()
        rest = [taken for taken in self._taken if taken is not kept]
        self._taken = [kept] if kept else []
        free: Fds | None = None
        for taken in rest:
            if free is None and taken.whole and {name: len(fds) for name, fds in taken.fds.items()} == ranks:
                free = taken.fds
            else:
                taken.drop()
        return free or {
            name: tuple(os.memfd_create(f"titan_rl snapshot of {name}") for _ in range(count))
            for name, count in ranks.items()
        }
