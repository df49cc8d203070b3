"""A reader's part in a chain of hosts: it reads from the host before it, and offers its host's memory to the next one.

    host before                          this host                            host behind
    [ keys | slices ] ── keys ──────────> which slices are there
                      ── a slice ───────> memory
                      ── keys ──────────> still the same: mark the slice ───> the next host finds its key

Keys vouch for slices: they are emptied before the bytes change, and read again after the bytes. A slice may be wrong
nevertheless, on a faulty host. So every reader compares its live parameters with the trainers' checksums, which come
from the controller (weight_sync.verify = "live"), and reads wrong blocks from the trainers.

If a read fails, or no slice comes in time, the rest is read from the trainers. Bytes of the failed read may still
arrive, until the reader's process ends: the same checksums catch them.
"""

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import torch

from titan_rl.ext.relay.chains import Followed, RelayOffer
from titan_rl.ext.remote_weights.ranks import remote_run
from titan_rl.ext.remote_weights.ranks.host_memory import DIGEST, FIRST, HostMemory
from titan_rl.ext.remote_weights.ranks.remote_run import LANES, RemoteRun
from titan_rl.wire.manifest import Manifest

Runs = Sequence[tuple[RemoteRun, Manifest, list[int]]]  # each with the blocks that this reader wants

POLL_SECONDS = 0.002  # between two looks at keys of which none is new
_leaving = set[asyncio.Task[None]]()  # asyncio alone would forget them


class Relay:
    """One rank's reads from the host before, and its offer to the host behind."""

    def __init__(self, memory: HostMemory, senders: int, slices: Sequence[Sequence[int]], reader: str) -> None:
        """`senders` is the number of the trainers' hosts, `slices` has the sizes of each run's slices."""
        from monarch.rdma import RDMABuffer

        self.relayed = 0  # bytes that this reader has read from other relays
        self._reader, self._memory, self._words = reader, memory, len(memory.header) // 8
        self._firsts = [FIRST + sum(1 + len(sizes) for sizes in slices[:run]) for run in range(len(slices))]
        digest = int(memory.header.numpy().view(np.uint64)[DIGEST])
        parts = zip(memory.runs, slices, strict=True)
        registered = tuple([RDMABuffer(part) for part in run.octets.split(list(sizes))] for run, sizes in parts)
        self.offer = RelayOffer(digest, senders, RDMABuffer(memory.header), registered)
        self._epoch, self._followed = 0, self.offer  # whom the notes of this epoch name
        self._from = ""  # the replica whose bytes the last fetch brought

    async def fetch(self, runs: Runs, note: Followed | None, seconds: float) -> str:
        """Fetch missing slices from the host that the note names. Return why it did not bring them all, or ""."""
        self._from = ""
        if note is None:
            return ""
        failure = ""
        try:
            reading = _Reading(self._offer_of(note), runs, self._firsts, self._words, note.patience, seconds)
        except RuntimeError as error:
            return f"{self._reader}: {note.name}: {error}"
        try:
            await reading.finish()
        except Exception as error:
            failure = f"{self._reader}: {note.name}: {str(error).partition(chr(10))[0] or type(error).__name__}"
        self.relayed += reading.nbytes
        self._from = note.name if reading.nbytes else ""
        return failure

    def blamed(self, wanted: Sequence[tuple[Manifest, list[int]]]) -> str:
        """Return that blocks of the last fetch are wrong, if it brought them from another relay, or ""."""
        blocks, name = sum(len(indices) for _, indices in wanted), self._from
        self._from = ""
        return f"{self._reader}: {blocks} blocks from {name} differ from their checksums" if name and blocks else ""

    def leave(self) -> None:
        """Make the memory unreachable for other hosts, soon. It lives until then."""
        task = asyncio.ensure_future(_drop(self.offer))
        _leaving.add(task)
        task.add_done_callback(_leaving.discard)

    def _offer_of(self, note: Followed) -> RelayOffer:
        if note.offer is not None:
            self._epoch, self._followed = note.epoch, note.offer
        if self._epoch != note.epoch:
            raise RuntimeError(f"expected an offer of epoch {note.epoch}, found the one of {self._epoch}")
        if self._followed.digest != self.offer.digest:
            raise RuntimeError(f"expected runs {self.offer.digest:016x}, found {self._followed.digest:016x}")
        return self._followed


class _Reading:
    """Reads of one publication's missing slices, as they appear at the host before."""

    def __init__(
        self, offer: RelayOffer, runs: Runs, firsts: Sequence[int], words: int, patience: float, seconds: float
    ) -> None:
        """`firsts` has the header's first word of each run, which is its stamp; its keys follow."""
        self.nbytes = 0
        self._offer, self._runs, self._words, self._firsts = offer, [run for run, _, _ in runs], words, firsts
        self._serials = [manifest.serial for _, manifest, _ in runs]
        self._waiting = {
            (i, part): key
            for i, (run, manifest, blocks) in enumerate(runs)
            for part, key in run.await_relayed(manifest, blocks).items()
        }
        self._patience, self._ends = patience, time.monotonic() + seconds
        self._moved = time.monotonic()  # when the last slice came
        self._failed = False

    async def finish(self) -> None:
        lanes = [self._or_fail(self._read_in_turn()) for _ in range(min(LANES, len(self._waiting)))]
        outcomes = await asyncio.gather(*lanes, return_exceptions=True)  # no read is in flight afterwards
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _or_fail(self, lane: Coroutine[Any, Any, None]) -> None:
        try:
            await lane
        except BaseException:
            self._failed = True
            raise

    async def _read_in_turn(self) -> None:
        header = torch.empty(self._words, dtype=torch.int64)
        keys, look = header.numpy().view(np.uint64), remote_run.reads([(self._offer.header, header.view(torch.uint8))])
        while self._waiting and not self._failed:
            await look.submit(timeout=self._limit)
            if (found := self._next(keys)) is None:
                if all(keys[first] == serial for first, serial in zip(self._firsts, self._serials, strict=True)):
                    return  # the host before has this publication, but never needed these slices
                if time.monotonic() > min(self._moved + self._patience, self._ends):
                    raise TimeoutError(f"expected {len(self._waiting)} more slices, found none for a while")
                await asyncio.sleep(POLL_SECONDS)
                continue
            run, part = found
            key, place = self._waiting.pop(found), self._runs[run].place_of(part)
            await remote_run.reads([(self._offer.slices[run][part], place)]).submit(timeout=self._limit)
            await look.submit(timeout=self._limit)  # after the bytes: it vouches for them
            if int(keys[self._firsts[run] + 1 + part]) == key:
                self._runs[run].relayed(part, key)
                self.nbytes, self._moved = self.nbytes + len(place), time.monotonic()
            else:
                self._waiting[found] = key

    def _next(self, keys: Any) -> tuple[int, int] | None:
        """Return a slice that the host before has and that no lane reads yet."""
        for (run, part), key in self._waiting.items():
            if int(keys[self._firsts[run] + 1 + part]) == key:
                return run, part
        return None

    @property
    def _limit(self) -> int:
        return max(1, math.ceil(min(self._patience, self._ends - time.monotonic())))


async def _drop(offer: RelayOffer) -> None:
    for buffer in (offer.header, *(part for run in offer.slices for part in run)):
        await buffer.drop()
