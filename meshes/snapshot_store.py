"""Snapshots of all that is trained, in memory that outlives the ranks: a lost mesh costs the steps since the newest.

    take    ──> every rank of trainers and critic copies its state into its part, beside the next step
    newest  <── stamps: the newest snapshot whose parts are whole on every rank

A part is an anonymous file (memfd) that this process holds open, so no death of a rank ends it, and no end of this
process leaves it behind. This process reads stamps only. Ranks find the parts through /proc: they are on its host; on
several, each host would need a process that keeps its ranks' parts.

A snapshot is restored only if each of its parts carries its serial number, which a rank writes last; so a torn one is
never taken for a whole one, and the parts of all meshes are of one step. A take writes only parts that the newest
whole snapshot does not consist of, and abandons those of a torn one to whoever may still be writing them; so whatever
dies and whenever, what was whole before stays whole.
"""

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_rl.wire.snapshot import Snapshot, head
from titan_rl.wire.types import PhaseName

if TYPE_CHECKING:
    from titan_rl.meshes.model_mesh import TrainedMesh
    from titan_rl.meshes.roles import CriticMesh
    from titan_rl.meshes.trainers import TrainerMesh

Fds = dict[str, tuple[int, ...]]  # by mesh: of its ranks' parts


@dataclass(frozen=True, slots=True)
class Taken:
    """A snapshot, whole or not."""

    snapshot: Snapshot
    fds: Fds

    @property
    def whole(self) -> bool:
        return all(head(fd)[0] == self.snapshot.serial for fds in self.fds.values() for fd in fds)

    def drop(self) -> None:
        """The memory is freed when the last rank that has mapped it lets go."""
        for fds in self.fds.values():
            for fd in fds:
                os.close(fd)


class Snapshots:
    def __init__(self, trainers: "TrainerMesh", critic: "CriticMesh | None") -> None:
        self._trainers, self._critic = trainers, critic
        self._taken: list[Taken] = []  # two at most: the newest whole one, and the one begun after it
        self._serial = 0
        self.nbytes: dict[str, list[int]] = {}  # of one snapshot, by mesh and rank

    async def take(self, phase: PhaseName, step: int, controller: str) -> None:
        """Begin a snapshot of what the meshes hold now; returns once all ranks have begun. No rank changes its state
        before its copy is whole, so the next step may be asked for at once."""
        meshes: list[TrainedMesh] = [self._trainers]
        if self._critic is not None and phase == "rl":  # until then it has nothing to lose
            meshes.append(self._critic)
        self._serial += 1
        fds = self._free({mesh.name: mesh.dp * mesh.tp for mesh in meshes})
        paths = {name: tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in each) for name, each in fds.items()}
        snapshot = Snapshot(phase, step, controller, self._serial, paths)
        self._taken.append(Taken(snapshot, fds))
        sizes = await asyncio.gather(*(mesh.snapshot(snapshot) for mesh in meshes))
        self.nbytes = {mesh.name: each for mesh, each in zip(meshes, sizes, strict=True)}

    def newest(self, *, before: int | None = None) -> Snapshot | None:
        """The newest whole one, or the newest of those taken before a step."""
        taken = self._newest(before)
        return taken.snapshot if taken else None

    def forget(self, *, but: Snapshot | None = None) -> None:
        """All, or all but the one that everybody began again from: what came after it never happened."""
        for taken in self._taken:
            if taken.snapshot is not but:
                taken.drop()
        self._taken = [taken for taken in self._taken if taken.snapshot is but]

    def close(self) -> None:
        self.forget()

    def _newest(self, before: int | None = None) -> Taken | None:
        whole = (t for t in self._taken if (before is None or t.snapshot.step < before) and t.whole)
        return max(whole, key=lambda t: t.snapshot.serial, default=None)

    def _free(self, ranks: dict[str, int]) -> Fds:
        """Parts for so many ranks by mesh: of a snapshot that is no longer the newest, or new ones."""
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
