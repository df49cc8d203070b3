"""Snapshots of ranks on other machines than the controller's: each part, and a copy of it on another host.

    rank ──> its part, with the keeper of its host ──> the copy, with the keeper of the next host

    a rank dies           it is restored from its own host's keeper
    a host is lost        its ranks start elsewhere, and their keepers fetch their parts from the peer
    a keeper dies         its parts are gone, their copies stay; a new one starts with the next snapshot

A snapshot is whole when every part and every copy has its stamp. Copies are made while training continues; the next
snapshot is left out if they take that long. The first copy that fails ends the others, and the snapshot. Otherwise all
is as in snapshot_store.py.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from titan_rl.meshes import deaths
from titan_rl.meshes.hosts import Host
from titan_rl.meshes.keepers import KeeperEnd, Keepers, Place
from titan_rl.meshes.kept_parts import ended, together
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.meshes.snapshot_store import Snapshots
from titan_rl.wire.errors import RunError
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.types import PhaseName

SETTLE_SECONDS = 10.0  # that ranks which are alive may still copy, after a mesh was lost: a hung one never ends it

_drops: set[asyncio.Task[None]] = set()


@dataclass(slots=True)
class Piece:
    """One rank's part, and its copy."""

    mesh: str
    rank: str
    own: Place
    copy: Place

    @property
    def living(self) -> list[Place]:
        return [place for place in (self.own, self.copy) if place.keeper.alive]

    @property
    def keepers(self) -> tuple[str, str, KeeperEnd, KeeperEnd]:
        return self.mesh, self.rank, self.own.keeper, self.copy.keeper


@dataclass(eq=False, slots=True)
class TakenAway:
    """A snapshot whose parts are with keepers."""

    snapshot: Snapshot
    pieces: list[Piece]
    complete: bool = False  # every part and copy had its stamp
    copying: "asyncio.Task[None] | None" = None
    hurried: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def whole(self) -> bool:
        return self.complete and all(piece.living for piece in self.pieces)

    def drop(self) -> None:
        if self.copying is not None:
            self.copying.cancel()
        self.abandon()

    def abandon(self) -> None:
        """Let go of the memory. A keeper ends the copies that it still makes there."""
        release([place for piece in self.pieces for place in (piece.own, piece.copy)])
        self.pieces = []

    async def copy(self, sizes: Sequence[int], rate: float) -> int:
        """Wait for the stamp of every part, then copy every part, of these sizes, to its peer, which reads at most
        `rate` bytes a second. Return the bytes that moved."""
        serial, owners = self.snapshot.serial, {piece.own.keeper for piece in self.pieces}
        await together(self._stamped([p for p in self.pieces if p.own.keeper is keeper]) for keeper in owners)
        arriving = Counter[KeeperEnd]()
        for piece, nbytes in zip(self.pieces, sizes, strict=True):
            arriving[piece.copy.keeper] += nbytes
        moved = await together(
            p.copy.keeper.fetch(p.copy.fd, serial, p.own, arriving[p.copy.keeper], rate) for p in self.pieces
        )
        self.complete = True
        return sum(moved)

    async def _stamped(self, pieces: Sequence[Piece]) -> None:
        """Return when these parts of one keeper have their stamps. Raise if one will not get it."""
        until = None
        while True:
            died = {piece.rank for piece in pieces if deaths.ended(piece.rank) is not None}  # before the look
            if self.hurried.is_set() and until is None:
                until = asyncio.get_running_loop().time() + SETTLE_SECONDS
            late = until is not None and asyncio.get_running_loop().time() > until
            found = await pieces[0].own.keeper.stamped([p.own.fd for p in pieces], self.snapshot.serial)
            torn = [piece.rank for piece, whole in zip(pieces, found, strict=True) if not whole]
            if not torn:
                return
            if late or died & set(torn):
                raise RunError(f"{', '.join(torn)} did not finish copying")

    def move(self, paths: Mapping[str, tuple[str, ...]]) -> None:
        """Let ranks find their parts there."""
        self.snapshot = replace(self.snapshot, paths=paths)


class PeerSnapshots(Snapshots):
    """The snapshots of a run, with keepers."""

    def __init__(
        self,
        trainers: ModelMesh,
        critic: ModelMesh | None,
        keepers: Keepers,
        note: Callable[[str], None],
        gbps: float = 0.0,
    ) -> None:
        """`gbps`: gigabits per second that each host reads at most of the parts of others; 0: no bound."""
        super().__init__(trainers, critic, note)
        self._keepers = keepers
        self._rate = gbps * 1e9 / 8
        self.moved = 0  # bytes that went to peers for the newest snapshot that is whole
        self._late = False  # a snapshot was left out, which was said

    async def start(self) -> tuple[list[str], str]:
        """Start the keepers; return which keeps copies of whose parts, and how they read them."""
        hosts = {host.name: host for mesh in self._meshes("rl") for host in mesh.hosts.values()}
        return await self._keepers.start([*hosts.values()])

    async def take(self, phase: PhaseName, step: int, controller: str) -> None:
        """Begin a snapshot, and copy it to peers while training continues. Leave it out while the one before is still
        being copied."""
        last = self._taken[-1] if self._taken else None
        if isinstance(last, TakenAway) and last.copying is not None and not last.copying.done():
            if not self._late:
                self._note(
                    f"there is no snapshot of step {step}: that of step {last.snapshot.step} is still being copied to "
                    "other hosts. A larger fault.snapshot_interval leaves more time; this is said once"
                )
            self._late = True
            return
        meshes = self._meshes(phase)
        try:
            pieces = await self._pieces(meshes)
        except RunError as error:  # a keeper or a host has died; the next snapshot does without it
            self._note(f"there is no snapshot of step {step}: {error}")
            return
        taken = TakenAway(Snapshot(phase, step, controller, self._next_serial(), paths_of(pieces)), pieces)
        await self._begin(taken, meshes)
        taken.copying = asyncio.create_task(self._copy(taken))

    async def settle(self) -> None:
        """Wait until copies that are being made are whole, or will not be."""
        for taken in self._taken:
            if isinstance(taken, TakenAway) and taken.copying is not None:
                taken.hurried.set()
                await asyncio.wait({taken.copying})

    async def bring(self) -> None:
        """Let the keeper of each rank's host have the rank's part of the newest snapshot. Drop one that is lost."""
        while (taken := self._newest()) is not None:
            assert isinstance(taken, TakenAway)
            try:
                await self._bring(taken)
                return
            except RunError as error:
                self._note(f"the snapshot of step {taken.snapshot.step} is lost: {error}")
            taken.drop()
            self._taken.remove(taken)

    async def _copy(self, taken: TakenAway) -> None:
        sizes = [nbytes for mesh in taken.snapshot.paths for nbytes in self.nbytes[mesh]]
        try:
            self.moved = await taken.copy(sizes, self._rate)
        except RunError as error:  # training does not need it
            self._note(f"the snapshot of step {taken.snapshot.step} has no copy on other hosts: {error}")
            taken.abandon()

    async def _pieces(self, meshes: Sequence[ModelMesh]) -> list[Piece]:
        """Return memory for each rank's part and its copy: that of a snapshot that is no longer the newest, or new."""
        wanted: list[tuple[str, str, KeeperEnd, KeeperEnd]] = []
        for mesh in meshes:
            for rank, host in mesh.hosts.items():
                own = await self._keepers.of(host)
                wanted.append((mesh.name, rank, own, await self._keepers.of(self._keepers.peer_of(host))))
        free: list[Piece] | None = None
        for taken in self._spare():
            # Once it is whole, no rank and no keeper writes to its memory.
            pieces = taken.pieces if isinstance(taken, TakenAway) and taken.whole else []
            if free is None and [piece.keepers for piece in pieces] == wanted:
                free = pieces
            else:
                taken.drop()
        return free or list(await asyncio.gather(*(self._held(*each) for each in wanted)))

    async def _held(self, mesh: str, rank: str, own: KeeperEnd, peer: KeeperEnd) -> Piece:
        return Piece(mesh, rank, await self._keepers.hold(own, mesh), await self._keepers.hold(peer, mesh))

    async def _bring(self, taken: TakenAway) -> None:
        hosts: dict[str, Host] = {}
        for mesh in self._meshes(taken.snapshot.phase):
            hosts |= mesh.hosts
        await ended(self._settle(piece, hosts[piece.rank], taken.snapshot) for piece in taken.pieces)
        taken.move(paths_of(taken.pieces))

    async def _settle(self, piece: Piece, host: Host, snapshot: Snapshot) -> None:
        """Let the keeper of `host` have a part."""
        home = await self._keepers.of(host)
        living = piece.living
        if not living:
            raise RunError(f"the hosts with the part of {piece.rank} are gone")
        there = next((place for place in living if place.keeper is home), None)
        if there is None:
            there = await self._keepers.hold(home, piece.mesh)
            try:
                await home.fetch(there.fd, snapshot.serial, living[0])
            except BaseException:
                release([there])
                raise
        rest = [place for place in (piece.own, piece.copy) if place is not there]
        piece.own, piece.copy = there, next((place for place in rest if place.keeper.alive), rest[0])
        release([place for place in rest if place is not piece.copy])


def paths_of(pieces: Sequence[Piece]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for piece in pieces:
        found[piece.mesh] = (*found.get(piece.mesh, ()), piece.own.path)
    return found


def release(places: Sequence[Place]) -> None:
    """Tell keepers to drop memory. Dead ones have none."""

    async def drop(keeper: KeeperEnd, fds: list[int]) -> None:
        with suppress(RunError):  # it has died meanwhile
            await keeper.drop(fds)

    for keeper in {place.keeper for place in places if place.keeper.alive}:
        task = asyncio.create_task(drop(keeper, [place.fd for place in places if place.keeper is keeper]))
        _drops.add(task)
        task.add_done_callback(_drops.discard)
