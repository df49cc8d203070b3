"""How the bytes that a trainer rank packed reach a reader, chosen for each pair of them.

    same host        Shared: the reader maps the trainer's memory, and writes from there into its parameters
    anywhere else    a link, which copies them into memory of the reader's host (an optional part: ext/remote_weights)

A trainer rank's memory holds two slots, so that a version can be packed while its predecessor is read:

    [ stamps | slot 0: a run for every reader | slot 1: a run for every reader ]

A slot's stamp is the serial number of the publication that it holds, and PACKING while it changes. Bytes that were
read belong to a publication if the slot has its stamp afterwards. The memory is anonymous (memfd): readers find it
through /proc, nothing has a name in /dev/shm, and nothing is left behind however a process ends.
"""

import mmap
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Literal, Protocol
from weakref import finalize

import torch
from torch import Tensor

from titan_rl.wire.cores import here
from titan_rl.wire.manifest import Block, Manifest
from titan_rl.wire.weight_source import FORCES_LINKS, SLOTS, HashKind, HostCopy, Offer

How = Literal["auto", "shm", "rdma", "broadcast"]

PACKING = 0  # serial numbers count from 1
REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
PAGE = 4096  # runs are aligned to it; the stamps fill one


class Memory:
    """Memory of a trainer rank: the stamps and both slots."""

    def __init__(self, runs: Sequence[int], pinned: bool) -> None:
        """`runs` is the size of each run in bytes."""
        ends = PAGE
        self.starts: list[tuple[int, ...]] = [()] * len(runs)
        for _ in range(SLOTS):
            for i, nbytes in enumerate(runs):
                self.starts[i] += (ends,)
                ends += -(-nbytes // PAGE) * PAGE
        self._fd = os.memfd_create("titan_rl weights")
        os.ftruncate(self._fd, ends)
        mapping = MappedFile(self._fd, ends, access=mmap.ACCESS_WRITE)
        # Calling close() lets no other process map the memory. It is freed when the last that mapped it has ended.
        self.close = finalize(self, _close, self._fd, mapping)
        self.close.atexit = False  # the kernel does it
        self.bytes = mapping.octets(pinned)
        self.stamps = _stamps(self.bytes)

    def offer(self, run: int, nbytes: int, layout: int, link: Any, kind: HashKind = "xxh3") -> Offer:
        return Offer(here(), os.getpid(), self._fd, len(self.bytes), self.starts[run], nbytes, layout, link, kind)


class Transport(Protocol):
    """Brings one run to a reader."""

    name: str

    def run(self, slot: int) -> Tensor:
        """Return the run's bytes.  # [nbytes]"""
        ...

    def stamp(self, slot: int) -> int:
        """Return the serial number of the publication that the bytes belong to."""
        ...


class Shared(Transport):
    """The trainer's memory itself. There is nothing to fetch: writing the parameters reads it first."""

    name = "shared memory"

    def __init__(self, offer: Offer, pinned: bool) -> None:
        # To be pinned, memory is mapped for writing, though nothing here writes it. CUDA registers a read-only mapping
        # only with cudaHostRegisterReadOnly, which some devices support and others refuse
        # (cudaDevAttrHostRegisterReadOnlySupported), and torch's cudart cannot ask which.
        path = f"/proc/{offer.pid}/fd/{offer.fd}"
        try:
            fd = os.open(path, os.O_RDWR if pinned else os.O_RDONLY)
        except OSError as error:
            raise RuntimeError(
                f"expected a trainer rank's weights at {path}, found {error.strerror}; "
                'weight_sync.transport = "rdma" reads them without mapping them'
            ) from None
        try:
            if (size := os.fstat(fd).st_size) != offer.size:
                raise RuntimeError(f"expected {offer.size} bytes of weights at {path}, found {size}")
            access = mmap.ACCESS_WRITE if pinned else mmap.ACCESS_READ
            self._bytes = MappedFile(fd, offer.size, access=access).octets(pinned)
        finally:
            os.close(fd)  # the mapping stays
        self._stamps = _stamps(self._bytes)
        self._runs = [self._bytes[start : start + offer.nbytes] for start in offer.starts]

    def run(self, slot: int) -> Tensor:
        return self._runs[slot]

    def stamp(self, slot: int) -> int:
        return int(self._stamps[slot])


class TrainerLink(Protocol):
    """A trainer rank's half of the link to readers that cannot map its memory."""

    offers: Mapping[int, Any]  # by reader, for its half

    def announce(self, slot: int, serial: int, note: Any, seconds: float) -> None:
        """Begin to send publication `serial` to the readers that the note names."""

    async def drop(self) -> None:
        """Make the memory unreachable."""


class ReaderLink(Protocol):
    """A reader's half: copies the runs of trainer ranks whose memory it cannot map."""

    runs: Sequence[Transport]
    copy: HostCopy  # for the other readers of its host
    senders: tuple[int, ...]  # trainer ranks that can send to it
    relay: Any  # its offer to readers of other hosts; None: it passes nothing on

    @property
    def received(self) -> int:
        """Count the bytes that this reader has copied."""
        ...

    @property
    def relayed(self) -> int:
        """Count the bytes that it has copied from hosts without trainers."""
        ...

    async def fetch(
        self, wanted: Sequence[tuple[Manifest, list[int]]], seconds: float, *, again: bool = False, note: Any = None
    ) -> str:
        """Fetch the wanted blocks of each run, or the ones that no other reader of this host has fetched; with `again`,
        all of them. With a note they are sent. Return why that failed, if it did, now or in the fetch before: then they
        have been read from the trainers."""
        ...

    def leave(self) -> None:
        """Let no fetch in progress wait for other readers, and pass nothing on any more."""


def is_remote(place: str, how: How) -> bool:
    """Return True if processes here and at `place` must copy each other's memory instead of mapping it."""
    if how == "shm" and place != here():
        raise ValueError('weight_sync.transport: expected "auto" or "rdma" for meshes on different hosts, found "shm"')
    return how in FORCES_LINKS or place != here()


class MappedFile(mmap.mmap):
    """A file's memory. It lives as long as a tensor that views it, and CUDA unregisters it before it is unmapped: the
    next mapping may get the same addresses, which would count as registered already (error 712)."""

    _unpin: Callable[[], None] | None = None  # while CUDA has it registered

    def octets(self, pinned: bool = False) -> Tensor:
        """View the bytes, page-locked if `pinned`.  # [size]"""
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch has no tensors that are read-only
            octets = torch.frombuffer(self, dtype=torch.uint8)
        if pinned:
            self._unpin = pin(octets)
        return octets

    def unpin(self) -> None:
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the driver unregisters the rest
            self.unpin()


def mapped(fd: int, size: int, *, write: bool) -> Tensor:
    """Map a file's bytes. The mapping lives as long as the tensor.  # [size]"""
    return MappedFile(fd, size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ).octets()


def octets(run: Tensor, block: Block) -> memoryview:
    """Return a block's bytes in a run on the host, to be hashed without a copy."""
    return run[block.start : block.start + block.elements].view(torch.uint8).numpy().data


def _stamps(memory: Tensor) -> Tensor:
    return memory[: SLOTS * 8].view(torch.int64)  # [SLOTS]


def pin(memory: Tensor) -> Callable[[], None]:
    """Page-lock memory so that copies between it and a GPU are DMA. Return what undoes it, before it is unmapped.

    Drivers refuse it under WSL2, and in containers and under limits that lock no memory. Copies then work at a lower
    rate, with one warning per process."""
    cuda: Any = torch.cuda.cudart()
    error = int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error == REGISTERED:  # our own mistake: it would be unpinned twice
        raise RuntimeError(f"expected to pin {memory.nbytes} bytes for CUDA, found cudaHostRegister error {error}")
    if error:
        _warn_of_pageable(error)
        _take_last_error()
        return _nothing
    return partial(_unpin, cuda, memory.data_ptr())


@cache
def _warn_of_pageable(error: int) -> None:
    warnings.warn(
        f"expected to pin memory of weights or snapshots, found cudaHostRegister error {error} (WSL2, a container or "
        "ulimit -l may forbid it); a GPU's copies go through pageable memory, several times slower",
        stacklevel=3,
    )


def _take_last_error() -> None:
    """Take the error that CUDA keeps for the next launch of a kernel, which did not cause it."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _nothing() -> None:
    """Undo nothing."""


def _unpin(cuda: Any, address: int) -> None:
    if error := int(cuda.cudaHostUnregister(address)):
        raise RuntimeError(f"expected to unpin the memory at {address:#x}, found cudaHostUnregister error {error}")


def _close(fd: int, mapping: MappedFile) -> None:
    os.close(fd)
    mapping.unpin()
