"""Snapshots of ranks on other machines than the controller's: each part, and a copy of it on another host.

    rank ──> its part, at its host's snapshot server ──> the copy, at the next host's server

    a rank dies           it is restored from its host's server
    a host is lost        its ranks start elsewhere, and the servers there fetch their parts from the copies
    a server dies         its parts are lost, their copies remain; a new one starts with the next snapshot

A snapshot is whole when every part and every copy has its stamp. Copies are made while training continues; the next
snapshot is left out if they take that long. The first copy that fails ends the others, and the snapshot. The rest is as
in snapshot_store.py.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from titan_rl.ext.snapshots.snapshot_server import together
from titan_rl.ext.snapshots.snapshot_servers import Place, ServerHandle, SnapshotServers
from titan_rl.ext.snapshots.snapshot_store import SnapshotStore
from titan_rl.meshes import deaths
from titan_rl.meshes.hosts import Host
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.wire.errors import RunError
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.types import PhaseName

SETTLE_SECONDS = 10.0  # how long live ranks may still copy after a mesh was lost: a hung one never finishes

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
        return [place for place in (self.own, self.copy) if place.server.alive]

    @property
    def servers(self) -> tuple[str, str, ServerHandle, ServerHandle]:
        return self.mesh, self.rank, self.own.server, self.copy.server


@dataclass(eq=False, slots=True)
class ServedSnapshot:
    """A snapshot whose parts are at snapshot servers."""

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
        """Free the memory. A server ends the copies that it still makes there."""
        release([place for piece in self.pieces for place in (piece.own, piece.copy)])
        self.pieces = []

    async def copy(self, sizes: Sequence[int], rate: float) -> int:
        """Wait for the stamp of every part, then copy every part, of these sizes, to its peer, which reads at most
        `rate` bytes a second. Return the number of bytes."""
        serial, owners = self.snapshot.serial, {piece.own.server for piece in self.pieces}
        await together(self._stamped([p for p in self.pieces if p.own.server is server]) for server in owners)
        arriving = Counter[ServerHandle]()
        for piece, nbytes in zip(self.pieces, sizes, strict=True):
            arriving[piece.copy.server] += nbytes
        moved = await together(
            p.copy.server.fetch(p.copy.fd, serial, p.own, arriving[p.copy.server], rate) for p in self.pieces
        )
        self.complete = True
        return sum(moved)

    async def _stamped(self, pieces: Sequence[Piece]) -> None:
        """Return when these parts of one server have their stamps. Raise if one will not get it."""
        until = None
        while True:
            died = {piece.rank for piece in pieces if deaths.ended(piece.rank) is not None}  # before stamps are read
            if self.hurried.is_set() and until is None:
                until = asyncio.get_running_loop().time() + SETTLE_SECONDS
            late = until is not None and asyncio.get_running_loop().time() > until
            stamped = await pieces[0].own.server.stamped([p.own.fd for p in pieces], self.snapshot.serial)
            torn = [piece.rank for piece, whole in zip(pieces, stamped, strict=True) if not whole]
            if not torn:
                return
            if late or died & set(torn):
                raise RunError(f"{', '.join(torn)} did not finish copying")


class PeerSnapshots(SnapshotStore):
    """The snapshots of a run, at snapshot servers."""

    def __init__(
        self,
        trainers: ModelMesh,
        critic: ModelMesh | None,
        servers: SnapshotServers,
        note: Callable[[str], None],
        gbps: float = 0.0,
    ) -> None:
        """`gbps`: gigabits per second that each host reads at most of the parts of others; 0: no bound."""
        super().__init__(trainers, critic, note)
        self._servers = servers
        self._rate = gbps * 1e9 / 8
        self.moved = 0  # bytes copied for the newest whole snapshot
        self._late = False  # a snapshot was left out, and the user was notified

    async def start(self) -> tuple[list[str], str]:
        """Start the servers; return whose parts are copied where, and by which transport."""
        hosts = {host.name: host for mesh in self._meshes("rl") for host in mesh.hosts.values()}
        return await self._servers.start([*hosts.values()])

    async def take(self, phase: PhaseName, step: int, controller: str) -> None:
        """Begin a snapshot, and copy it to peers while training continues. Leave it out while the one before is still
        being copied."""
        last = self._entries[-1] if self._entries else None
        if isinstance(last, ServedSnapshot) and last.copying is not None and not last.copying.done():
            if not self._late:
                self._note(
                    f"there is no snapshot of step {step}: step {last.snapshot.step}'s is still being copied to other "
                    "hosts. A larger fault.snapshot_interval leaves more time; this is said once"
                )
            self._late = True
            return
        meshes = self._meshes(phase)
        try:
            pieces = await self._pieces(meshes)
        except RunError as error:  # a server or a host has died; the next snapshot does without it
            self._note(f"there is no snapshot of step {step}: {error}")
            return
        entry = ServedSnapshot(Snapshot(phase, step, controller, self._next_serial(), paths_of(pieces)), pieces)
        await self._begin(entry, meshes)
        entry.copying = asyncio.create_task(self._copy(entry))

    async def settle(self) -> None:
        """Wait until each copy in progress is whole or has failed."""
        for entry in self._entries:
            if isinstance(entry, ServedSnapshot) and entry.copying is not None:
                entry.hurried.set()
                await asyncio.wait({entry.copying})

    async def bring(self) -> None:
        """Move each rank's part of the newest snapshot to its host's server. Drop a snapshot that is lost."""
        while (entry := self._newest()) is not None:
            assert isinstance(entry, ServedSnapshot)
            try:
                await self._bring(entry)
                return
            except RunError as error:
                self._note(f"the snapshot of step {entry.snapshot.step} is lost: {error}")
            entry.drop()
            self._entries.remove(entry)

    async def _copy(self, entry: ServedSnapshot) -> None:
        sizes = [nbytes for mesh in entry.snapshot.paths for nbytes in self.nbytes[mesh]]
        try:
            self.moved = await entry.copy(sizes, self._rate)
        except RunError as error:  # training does not need it
            self._note(f"the snapshot of step {entry.snapshot.step} has no copy on other hosts: {error}")
            entry.abandon()

    async def _pieces(self, meshes: Sequence[ModelMesh]) -> list[Piece]:
        """Return memory for each rank's part and its copy: an outdated snapshot's, or new."""
        wanted: list[tuple[str, str, ServerHandle, ServerHandle]] = []
        for mesh in meshes:
            for rank, host in mesh.hosts.items():
                own = await self._servers.of(host)
                wanted.append((mesh.name, rank, own, await self._servers.of(self._servers.peer_of(host))))
        free: list[Piece] | None = None
        for entry in self._spare():
            # Once it is whole, no rank and no server writes to its memory.
            pieces = entry.pieces if isinstance(entry, ServedSnapshot) and entry.whole else []
            if free is None and [piece.servers for piece in pieces] == wanted:
                free = pieces
            else:
                entry.drop()

        async def new(mesh: str, rank: str, own: ServerHandle, peer: ServerHandle) -> Piece:
            return Piece(mesh, rank, await own.hold(mesh), await peer.hold(mesh))

        return free or list(await asyncio.gather(*(new(*each) for each in wanted)))

    async def _bring(self, entry: ServedSnapshot) -> None:
        hosts: dict[str, Host] = {}
        for mesh in self._meshes(entry.snapshot.phase):
            hosts |= mesh.hosts
        moves = (self._move(piece, hosts[piece.rank], entry.snapshot) for piece in entry.pieces)
        for result in await asyncio.gather(*moves, return_exceptions=True):  # all have ended before one is dropped
            if isinstance(result, BaseException):
                raise result
        entry.snapshot = replace(entry.snapshot, paths=paths_of(entry.pieces))

    async def _move(self, piece: Piece, host: Host, snapshot: Snapshot) -> None:
        """Move a part to the server of `host`, unless it is there."""
        home = await self._servers.of(host)
        living = piece.living
        if not living:
            raise RunError(f"the hosts with the part of {piece.rank} are gone")
        there = next((place for place in living if place.server is home), None)
        if there is None:
            there = await home.hold(piece.mesh)
            try:
                await home.fetch(there.fd, snapshot.serial, living[0])
            except BaseException:
                release([there])
                raise
        rest = [place for place in (piece.own, piece.copy) if place is not there]
        piece.own, piece.copy = there, next((place for place in rest if place.server.alive), rest[0])
        release([place for place in rest if place is not piece.copy])


def paths_of(pieces: Sequence[Piece]) -> Mapping[str, tuple[str, ...]]:
    """Return the paths of ranks' parts, by mesh."""
    paths: dict[str, tuple[str, ...]] = {}
    for piece in pieces:
        paths[piece.mesh] = (*paths.get(piece.mesh, ()), piece.own.path)
    return paths


def release(places: Sequence[Place]) -> None:
    """Make live servers drop memory. A dead one's is free already."""

    async def drop(server: ServerHandle, fds: list[int]) -> None:
        with suppress(RunError):  # it has died meanwhile
            await server.drop(fds)

    for server in {place.server for place in places if place.server.alive}:
        task = asyncio.create_task(drop(server, [place.fd for place in places if place.server is server]))
        _drops.add(task)
        task.add_done_callback(_drops.discard)
