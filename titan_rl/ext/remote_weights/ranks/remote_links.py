"""Both halves of the link between trainer ranks and readers of other hosts, who read one-sided, through RDMABuffers.

    trainer rank   RegisteredRuns   offers its runs, once
    reader         RemoteReads      fetches the slices that the memory of its host lacks

If the trainer ranks also send their runs by broadcast (ext/broadcast), or other hosts pass them on (ext/relay), these
reads fetch what did not arrive.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import xxhash
from torch import Tensor

from titan_rl.actors.sync.transport import How, ReaderLink, TrainerLink
from titan_rl.config.sections import WeightSyncSection
from titan_rl.ext.remote_weights.ranks.host_memory import HostMemory
from titan_rl.ext.remote_weights.ranks.remote_run import RemoteRun
from titan_rl.ext.remote_weights.registered import Registered
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.parts import needed_part, part
from titan_rl.wire.weight_source import HostCopy, Source

KEY = "weight_sync.transport"


class RegisteredRuns(TrainerLink):
    """Registers a trainer rank's runs for one-sided reads."""

    def __init__(
        self, stamps: Tensor, slots: Sequence[Mapping[int, Sequence[Tensor]]], how: How, gpu: torch.device | None
    ) -> None:
        """`slots` has the slices of each reader's run, by slot."""
        from monarch.rdma import RDMABuffer

        self._stamps, self._slots = stamps, slots
        registered = RDMABuffer(stamps.view(torch.uint8))
        self._buffers, slices = [registered], dict[int, tuple[list[Any], ...]]()
        for reader in slots[0]:
            slices[reader] = tuple([RDMABuffer(part) for part in slot[reader]] for slot in slots)
            self._buffers += chain.from_iterable(slices[reader])
        make = _sender(how, gpu, registered.backend)
        self._sender = make(gpu) if make else None
        meets = self._sender.meets if self._sender else ""
        self.offers: Mapping[int, Registered] = {
            reader: Registered(registered, each, meets) for reader, each in slices.items()
        }

    def announce(self, slot: int, serial: int, note: Any, seconds: float) -> None:
        assert self._sender is not None
        stamp = self._stamps[slot : slot + 1].view(torch.uint8)
        self._sender.begin(note, serial, self._slots[slot], stamp, seconds)

    async def drop(self) -> None:
        for buffer in self._buffers:
            await buffer.drop()


def _sender(how: How, gpu: torch.device | None, backend: str) -> Any:
    """Return what sends runs by broadcast, or None if readers read everything one-sided, through this backend of
    Monarch's."""
    if how == "broadcast":
        return needed_part("broadcasts of trainers", KEY)
    return part("broadcasts of trainers") if how == "auto" and gpu is not None and backend == "tcp" else None


class RemoteReads(ReaderLink):
    """Reads runs into the memory of this host, together with the host's other readers."""

    def __init__(
        self,
        sources: Sequence[Source],
        blocks: Sequence[Sequence[tuple[int, int]]],
        *,
        sync: WeightSyncSection,
        reader: str,
        siblings: Sequence[HostCopy],
        gpu: torch.device | None,
    ) -> None:
        """`blocks` has the bytes of each run's blocks, [start, end)."""
        self._reader = reader
        self._ranks = [source.trainer_rank for source in sources]
        links: list[Registered] = [source.offer.link for source in sources]
        self._memory = _host_memory(sources, siblings, pinned=gpu is not None)
        self.copy = self._memory.copy
        stores = {rank: link.meets for rank, link in zip(self._ranks, links, strict=True) if link.meets}
        self.senders = tuple(stores)
        self._receiver = needed_part("broadcasts of readers", KEY)(stores, gpu) if stores else None
        name = self._receiver.name if self._receiver else ""
        relays = sync.relay is True and not stores
        self.runs = self._runs = [
            RemoteRun(link, held, spans, delta=sync.delta, name=name if link.meets else "", passes_on=relays)
            for link, held, spans in zip(links, self._memory.runs, blocks, strict=True)
        ]

        self._relay = None
        if relays:
            hosts = len({source.offer.place for source in sources})
            slices = [[part.size() for part in link.slices[0]] for link in links]
            self._relay = needed_part("relays of readers", "weight_sync.relay")(self._memory, hosts, slices, reader)
        self.relay = self._relay.offer if self._relay else None

    @property
    def received(self) -> int:
        return sum(run.received for run in self._runs)

    @property
    def relayed(self) -> int:
        return self._relay.relayed if self._relay else 0

    async def fetch(
        self, wanted: Sequence[tuple[Manifest, list[int]]], seconds: float, *, again: bool = False, note: Any = None
    ) -> str:
        if self._relay is None and note is None and not any(indices for _, indices in wanted):
            return ""
        far, failure = list(zip(self._runs, wanted, strict=True)), ""
        async with self._memory.writing(self._reader, seconds) as remaining:
            ends = time.monotonic() + remaining
            if self._relay is not None:
                runs = [(run, *each) for run, each in far]
                failure = self._relay.blamed(wanted) if again else await self._relay.fetch(runs, note, remaining / 2)
            elif note is not None:
                failure = await asyncio.to_thread(self._receive, wanted, note, remaining / 2)
            left = max(ends - time.monotonic(), 0.0)
            reads = [
                run.fetch_blocks(manifest, indices, left, again=again)
                for run, (manifest, indices) in far
                if indices or self._relay is not None
            ]
            await asyncio.gather(*reads)
        return failure

    def _receive(self, wanted: Sequence[tuple[Manifest, list[int]]], note: Any, seconds: float) -> str:
        """Receive what the note announces. Return why it failed, or ""."""
        runs = {rank: (run, *each) for rank, run, each in zip(self._ranks, self._runs, wanted, strict=True)}
        try:
            assert self._receiver is not None
            self._receiver.receive(runs, note, seconds)
        except Exception as error:
            return f"{self._reader}: {error}"
        return ""

    def leave(self) -> None:
        self._memory.leave()
        if self._receiver is not None:
            self._receiver.leave()
        if self._relay is not None:
            self._relay.leave()


def _host_memory(sources: Sequence[Source], siblings: Sequence[HostCopy], *, pinned: bool) -> HostMemory:
    """Return the memory of this host for the runs of these sources."""
    sizes, hashed = list[tuple[int, int]](), xxhash.xxh3_64()
    for offer in (source.offer for source in sources):
        if offer.link is None:
            raise RuntimeError(f"expected registered slices from the trainer process {offer.pid}, found none")
        sizes.append((offer.nbytes, len(offer.link.slices[0])))
        hashed.update(repr((offer.place, offer.pid, offer.fd, offer.starts, offer.nbytes, offer.layout)).encode())
    return HostMemory(sizes, hashed.intdigest(), siblings, pinned=pinned)
