"""The bytes that remote reads brought to a host, kept once for all of its replicas.

    trainer ranks elsewhere ── one reader ──> host memory ── mapped by each reader there ──> live parameters

Readers that read the same runs, which are the ranks of equal number of a host's replicas, share one memory. The first
of them makes it, anonymous as a trainer's is, and the others map it through /proc:

    [ digest, process, for each run: its stamp and its slices' keys | run | run | ... ]

A run's stamp is the serial number of its publication, and EMPTY while that changes. A slice is the unit of one read.
Its key identifies its bytes; EMPTY means that they are unknown. A reader fetches only the slices whose keys differ from
the publication's. So a byte crosses the link once for all readers, in any order, and if a reader dies amid a
read, the next one fetches only the missing slices.

The process that holds the memory's lock may write it. The kernel releases the lock of a process that ends, and the next
reader continues. A reader whose read failed keeps the lock as long as it maps the memory, because the requested bytes
may still arrive. It ends, or connects to other trainers.
"""

import asyncio
import fcntl
import mmap
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple
from weakref import finalize

import numpy as np
import numpy.typing as npt
from torch import Tensor

from titan_rl.actors.sync.transport import PAGE, MappedFile
from titan_rl.wire.cores import here
from titan_rl.wire.weight_source import HostCopy

Words = npt.NDArray[np.uint64]

EMPTY = 0  # serial numbers count from 1
DIGEST, PROCESS, FIRST = 0, 1, 2  # words of the header
LEAST_WAIT, MOST_WAIT = 0.001, 0.05  # seconds between two attempts to take the lock


class HeldRun(NamedTuple):
    """A run in the memory."""

    octets: Tensor  # [bytes]
    stamp: Words  # [1]
    keys: Words  # [slices]


class HostMemory:
    """The memory of a host that this process maps, and its lock."""

    def __init__(
        self, runs: Sequence[tuple[int, int]], digest: int, siblings: Sequence[HostCopy] = (), *, pinned: bool = False
    ) -> None:
        """Map the memory of the first of the `siblings` that lives on this host, or make one. `runs` has bytes and
        slices of each run. `digest` must be equal for all who share it."""
        words = FIRST + sum(1 + slices for _, slices in runs)
        self._starts = [-(-8 * words // PAGE) * PAGE]
        for nbytes, _ in runs:
            self._starts.append(self._starts[-1] + -(-nbytes // PAGE) * PAGE)
        size = self._starts[-1]
        shared_fd = next((fd for copy in siblings if copy.place == here() and (fd := _opened(copy)) is not None), None)
        self._fd = os.memfd_create("titan_rl received weights") if shared_fd is None else shared_fd
        self.close = finalize(self, os.close, self._fd)
        self.close.atexit = False  # the kernel does it
        if shared_fd is None:
            os.ftruncate(self._fd, size)
        elif (other := os.fstat(self._fd).st_size) != size:
            raise RuntimeError(f"expected {size} bytes of weights in the memory of this host's readers, found {other}")
        octets = MappedFile(self._fd, size, access=mmap.ACCESS_WRITE).octets(pinned)
        self.header = octets[: 8 * words]
        self._words: Words = self.header.numpy().view(np.uint64)
        if shared_fd is None:
            self._words[DIGEST] = digest
        elif (other_digest := int(self._words[DIGEST])) != digest:
            raise RuntimeError(
                f"expected runs {digest:016x} in the memory of this host's readers, found {other_digest:016x}"
            )
        self.runs, word = list[HeldRun](), FIRST
        for (nbytes, slices), start in zip(runs, self._starts, strict=False):
            stamp, keys = self._words[word : word + 1], self._words[word + 1 : word + 1 + slices]
            self.runs.append(HeldRun(octets[start : start + nbytes], stamp, keys))
            word += 1 + slices
        self._busy = self._left = False

    @property
    def copy(self) -> HostCopy:
        """Return where the readers of other replicas find this memory, as long as this process maps it."""
        return HostCopy(here(), os.getpid(), self._fd, os.fstat(self._fd).st_ino)

    def leave(self) -> None:
        """Let no task of this process wait for the lock any longer."""
        self._left = True

    @asynccontextmanager
    async def writing(self, reader: str, seconds: float) -> AsyncIterator[float]:
        """Hold the lock. Yields how many of the `seconds` are left. The lock is kept if the body fails."""
        ends, wait = time.monotonic() + seconds, LEAST_WAIT
        while self._busy or not self._locked():
            if self._left:
                raise RuntimeError(f"{reader} has been connected to other trainers")
            if (remaining := ends - time.monotonic()) <= 0:
                raise TimeoutError(
                    f"{reader}: expected its turn to read within {seconds:g} s, found process "
                    f"{int(self._words[PROCESS])} still reading for this host"
                )
            await asyncio.sleep(min(wait, remaining))
            wait = min(2 * wait, MOST_WAIT)
        self._busy, self._words[PROCESS] = True, os.getpid()
        try:
            yield max(ends - time.monotonic(), 0.0)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._busy = False

    def _locked(self) -> bool:
        """Take the lock, if no other process has it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _opened(copy: HostCopy) -> int | None:
    """Open the memory of another reader; None if that has ended."""
    try:
        fd = os.open(f"/proc/{copy.pid}/fd/{copy.fd}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if os.fstat(fd).st_ino == copy.inode:
        return fd
    os.close(fd)  # another process has its number by now
    return None
