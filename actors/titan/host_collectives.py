"""FSDP2's collectives among ranks of one host, through memory that they share.

    a slice of each rank's tensor ── own slot ── all meet ── all ranks' slots ── output

gloo moves these bytes through sockets, and wakes two threads of each rank: that was 39 of the 163 ms that two ranks of
grpo_llama took for a step. Here a rank copies its own to where the others read them, and counts how often it has.

A rank has two slots and uses them in turn. It writes a slot again once all have met at the other one, where a rank goes
only after it has read the first. As everywhere in FSDP2, all ranks call the collectives in one order.
"""

import os
import platform
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools.logging import logger

from titan_rl.actors.sync.transport import PAGE, mapped
from titan_rl.actors.titan.private import gathers_together
from titan_rl.wire.cores import here

SLOT_BYTES = 4 << 20  # slots of larger tensors are filled more than once
TURNS = 2
NAPS, NAP = 200, 20e-6  # naps of a rank that waits, and their seconds; after them it looks once a millisecond
# On these CPUs other ranks see a rank's writes in the order in which it made them: the bytes before the count.
IN_ORDER = platform.machine() in ("x86_64", "AMD64")


class Offer(NamedTuple):
    """Where other ranks find a rank's memory: the count of its meetings, then its slots."""

    place: str
    pid: int
    fd: int


class HostGroup:
    """The memory of a process group's ranks, which are all on this host."""

    def __init__(self, rank: int, offers: Sequence[Offer], slot_bytes: int, seconds: float) -> None:
        """Raise OSError if this rank cannot map another one's memory."""
        self._rank, self._seconds, self._turn, self._met = rank, seconds, 0, 0
        memories = [opened(offer, slot_bytes) for offer in offers]
        self._counts = [memory[:PAGE].view(torch.int64).numpy() for memory in memories]
        self._slots = [memory[PAGE:].chunk(TURNS) for memory in memories]
        others = [(i, offer.pid) for i, offer in enumerate(offers) if offer.pid != os.getpid()]
        self._others = {os.pidfd_open(pid): f"rank {i} of this mesh, process {pid}" for i, pid in others}
        self._ends = select.poll()
        for pidfd in self._others:
            self._ends.register(pidfd, select.POLLIN)

    def all_gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `output` with the `own` tensors of all ranks, one after the other.  # [ranks * N], [N]"""
        whole = output.view(len(self._slots), -1)
        for at, slots in self._slices(own.numel(), 1, own.dtype):
            slots[self._rank][0].copy_(own[at])
            self._meet()
            for part, slot in zip(whole, slots, strict=True):
                part[at].copy_(slot[0])

    def reduce_scatter(self, output: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `output` with the sum of the ranks' tensors for this rank, in the order of ranks. `own` has this rank's
        tensors for every rank.  # [N], [ranks * N]"""
        tensors = own.view(len(self._slots), -1)
        for at, slots in self._slices(output.numel(), len(tensors), own.dtype):
            slots[self._rank].copy_(tensors[:, at])
            self._meet()
            first, *others = (slot[self._rank] for slot in slots)
            output[at].copy_(first)
            for other in others:
                output[at].add_(other)

    def close(self) -> None:
        for pidfd in self._others:
            os.close(pidfd)

    def _slices(self, numel: int, rows: int, dtype: torch.dtype) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """Yield slices of `numel` elements, each with the ranks' memory for `rows` of it.  # [rows, slice]"""
        most = len(self._slots[0][0]) // (rows * dtype.itemsize)
        for start in range(0, numel, most):
            at = slice(start, min(start + most, numel))
            nbytes = rows * (at.stop - at.start) * dtype.itemsize
            yield at, [slots[self._turn][:nbytes].view(dtype).view(rows, -1) for slots in self._slots]
            self._turn = (self._turn + 1) % TURNS

    def _meet(self) -> None:
        """Wait until every rank has written its slot."""
        self._met += 1
        self._counts[self._rank][0] = self._met
        began, naps = time.monotonic(), 0
        for rank, count in enumerate(self._counts):
            while count[0] < self._met:
                naps += 1
                if naps <= NAPS:
                    time.sleep(NAP)
                elif ended := self._ends.poll(1):
                    raise RuntimeError(f"{self._others[ended[0][0]]}, has ended")
                elif time.monotonic() - began > self._seconds:
                    raise TimeoutError(f"expected rank {rank} of this mesh within {self._seconds:g} s, found it absent")


class HostCollectives:
    """FSDP2's all-gather and reduce-scatter of a model. A process group whose ranks are on several hosts, or cannot map
    each other's memory, keeps torch's."""

    def __init__(self, seconds: float, slot_bytes: int = SLOT_BYTES) -> None:
        """`seconds` is the longest wait for other ranks."""
        self._groups: dict[dist.ProcessGroup, HostGroup | None] = {}
        self._seconds, self._slot_bytes = seconds, slot_bytes

    def serve(self, module: FSDPModule) -> None:
        """Let a module use them, where they are safe, and where FSDP2 lets it: not if some of its experts are dealt."""
        if IN_ORDER and gathers_together(module):
            module.set_custom_all_gather(AllGather(self))  # pyright: ignore[reportArgumentType]: a private base class
            module.set_custom_reduce_scatter(ReduceScatter(self))  # pyright: ignore[reportArgumentType]

    def of(self, group: dist.ProcessGroup) -> HostGroup | None:
        """Return the memory of a group's ranks. All of them ask for the first time together."""
        if group not in self._groups:
            self._groups[group] = self._shared(group)
        return self._groups[group]

    def _shared(self, group: dist.ProcessGroup) -> HostGroup | None:
        offers, refusals = (list[Any]([None] * group.size()) for _ in range(2))
        shared, refusal = None, ""
        with ExitStack() as stack:
            fd = os.memfd_create("titan_rl collectives")
            stack.callback(os.close, fd)  # the memory lives as long as it is mapped
            os.ftruncate(fd, memory_bytes(self._slot_bytes))
            dist.all_gather_object(offers, Offer(here(), os.getpid(), fd), group=group)
            if len({offer.place for offer in offers}) > 1:
                return None
            try:
                shared = HostGroup(group.rank(), offers, self._slot_bytes, self._seconds)
            except OSError as error:
                refusal = str(error)
            dist.all_gather_object(refusals, refusal, group=group)  # from now on no rank opens another's memory
        if not any(refusals):
            return shared
        logger.warning(f"gloo carries FSDP2's tensors, because ranks cannot map each other's memory: {refusals}")
        if shared is not None:
            shared.close()
        return None


def memory_bytes(slot_bytes: int) -> int:
    return PAGE + TURNS * slot_bytes


def opened(offer: Offer, slot_bytes: int) -> torch.Tensor:
    """Map a rank's memory.  # [bytes]"""
    fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mapped(fd, memory_bytes(slot_bytes), write=True)
    finally:
        os.close(fd)


class Collective:
    """What FSDP2 asks of both of them."""

    def __init__(self, collectives: HostCollectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Collective):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if (host := self._collectives.of(group)) is None:
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        host.all_gather(output_tensor, input_tensor)
        return None


class ReduceScatter(Collective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        host = self._collectives.of(group)
        if host is None or op != dist.ReduceOp.SUM:
            return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        host.reduce_scatter(output_tensor, input_tensor)
        return None
