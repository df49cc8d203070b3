"""Broadcasts of packed runs: from a trainer rank to one reader on each host, by NCCL on GPUs and by gloo without.

    slot ── slice ──> buffer ── broadcast ──> buffer ──> host memory          root: trainer rank; member: reader
                      two of them, on the GPU if there is one

The members fill the memory that one-sided reads would fill (ext/remote_weights), and nothing else differs: the slot's
stamp follows the last slice and vouches for them, and checksums are compared as always. A group is separate from
torch's default one, which belongs to FSDP or vLLM. Its processes meet in a store that the trainer rank opens
(meeting.py).

If a process of a group fails, the connections of that group break, or the deadline passes. Its members then read
one-sided, and the controller has the groups made anew for the next publication.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan_rl.actors import meeting
from titan_rl.ext.broadcast.rosters import Gathering, Seat
from titan_rl.wire.manifest import Manifest

if TYPE_CHECKING:
    from torch.distributed import Work
    from torch.distributed.distributed_c10d import Store

    from titan_rl.ext.remote_weights.ranks.remote_run import RemoteRun

BUFFERS = 2  # slices in flight
MEET_SECONDS = 30.0  # for which a reader waits for the others of its groups: they are called at the same time
MEET_POLL_SECONDS, POLL_SECONDS = 0.02, 0.0002
LATE_SECONDS = 5.0  # gloo ends its operations at the deadline by itself


class Broadcasts:
    """The groups of one process. `agree` and `move` are collective: on an error all of its groups are lost."""

    def __init__(
        self, store_of: "Callable[[int], Store]", gpu: torch.device | None, stale: Callable[[], bool] = lambda: False
    ) -> None:
        """`store_of(peer)` returns the store of a group's trainer rank. With `stale()`, the
        readers wait for a newer broadcast."""
        self._store_of, self._gpu, self._stale = store_of, gpu, stale
        self._epoch = 0
        self._groups: dict[int, _Group] = {}  # by peer
        self._stream = None if gpu is None else torch.cuda.Stream(gpu)

    def agree(
        self, gathering: Gathering, serial: int, wanted: Mapping[int, Sequence[bool]], seconds: float
    ) -> dict[int, list[int]]:
        """Tell each group which slices of publication `serial` this process wants; return, by peer, the slices that any
        of its processes wants. Makes the groups if the gathering has another epoch than the last one."""
        ends = time.monotonic() + seconds
        with self._whole():
            if self._epoch != gathering.epoch:
                self.abort()
                self._epoch = gathering.epoch
                for seat in gathering.seats:
                    store = self._store_of(seat.peer)
                    self._groups[seat.peer] = _Group(store, seat, gathering.epoch, self._gpu, ends, self._stale)
            return {seat.peer: self._group(seat).agree(serial, wanted[seat.peer], ends) for seat in gathering.seats}

    def move(self, gathering: Gathering, slices: Mapping[int, Sequence[Tensor]], seconds: float) -> None:
        """Send the slices to each group, or receive them. Nothing is written to them after this has returned or
        raised."""
        ends = time.monotonic() + seconds
        with self._whole():
            for seat in gathering.seats:
                self._group(seat).move(slices[seat.peer], ends)

    def abort(self) -> None:
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.abort()

    def _group(self, seat: Seat) -> "_Group":
        if seat.peer not in self._groups:
            raise RuntimeError("its groups are broken")
        return self._groups[seat.peer]

    @contextmanager
    def _whole(self) -> Iterator[None]:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            try:
                yield
            except BaseException:
                self.abort()
                raise
            finally:  # also copies of slices that arrived before an error
                if self._stream is not None:
                    self._stream.synchronize()


class _Group:
    """The processes of one run."""

    def __init__(
        self,
        store: "Store",
        seat: Seat,
        epoch: int,
        gpu: torch.device | None,
        ends: float,
        stale: Callable[[], bool],
    ) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self._name = f"broadcast from trainer rank {seat.pair[0]} to {seat.size - 1} readers of number {seat.pair[1]}"
        self._root, self._stale = seat.rank == 0, stale
        self._device = gpu or torch.device("cpu")
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * BUFFERS
        store = PrefixStore(f"{epoch} {seat.pair}", store)
        ranks = [f"rank {rank}" for rank in range(seat.size)]
        store.set(ranks[seat.rank], "here")
        while missing := [rank for rank in ranks if not store.check([rank])]:  # NCCL would wait for them for ever
            if time.monotonic() > ends or stale():
                raise TimeoutError(f"{self._name}: {', '.join(missing)} did not come in time")
            time.sleep(MEET_POLL_SECONDS)
        self._processes = _processes(store, seat, gpu, _until(ends))

    def agree(self, serial: int, wanted: Sequence[bool], ends: float) -> list[int]:
        from torch.distributed import AllreduceOptions, ReduceOp

        votes = torch.tensor([serial, -serial, *wanted], dtype=torch.int64).to(self._device)
        options = AllreduceOptions()
        options.reduceOp, options.timeout = ReduceOp(ReduceOp.MAX), _until(ends)
        self._wait(self._processes.allreduce([votes], options), ends)
        newest, oldest, *slices = votes.tolist()
        if newest != -oldest:
            raise RuntimeError(f"{self._name}: expected one publication, found {-oldest} and {newest}")
        return [i for i, vote in enumerate(slices) if vote]

    def move(self, slices: Sequence[Tensor], ends: float) -> None:
        from torch.distributed import BroadcastOptions

        size = max(map(len, slices))
        if len(self._buffers[0]) < size:
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        flying: deque[tuple[Work, Tensor, Tensor]] = deque()
        for i, part in enumerate(slices):
            if len(flying) == BUFFERS:
                self._land(*flying.popleft(), ends)
            buffer = self._buffers[i % BUFFERS][: len(part)]
            if self._root:
                buffer.copy_(part, non_blocking=True)
            options = BroadcastOptions()
            options.rootRank, options.timeout = 0, _until(ends)
            flying.append((self._processes.broadcast([buffer], options), part, buffer))
        while flying:
            self._land(*flying.popleft(), ends)

    def abort(self) -> None:
        self._processes.abort()

    def _land(self, work: "Work", part: Tensor, buffer: Tensor, ends: float) -> None:
        self._wait(work, ends)
        if not self._root:
            part.copy_(buffer, non_blocking=True)

    def _wait(self, work: "Work", ends: float) -> None:
        while not work.is_completed():
            if time.monotonic() > ends + LATE_SECONDS or (self._device.type == "cuda" and self._stale()):
                raise TimeoutError(f"{self._name}: expected the next slice before its deadline")
            time.sleep(POLL_SECONDS)
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self._name}: {str(error).splitlines()[0]}") from None


class Sender:
    """Sends publications from a trainer rank in a thread, while the rank trains."""

    def __init__(self, gpu: torch.device | None) -> None:
        store, self.meets = meeting.open_store()
        self._broadcasts = Broadcasts(lambda _: store, gpu, lambda: self._current != self._newest)
        self._sending = threading.Lock()
        self._newest = self._current = 0  # serials

    def begin(
        self, gathering: Gathering, serial: int, slices: Mapping[int, Sequence[Tensor]], stamp: Tensor, seconds: float
    ) -> None:
        """Begin to send publication `serial`: by reader, the slices of its run, and the slot's stamp. An older one that
        still waits for readers ends: they have been called for this one."""
        self._newest = serial

        def send() -> None:
            with self._sending:
                self._current = serial
                try:
                    nothing = {reader: [False] * len(parts) for reader, parts in slices.items()}
                    wanted = self._broadcasts.agree(gathering, serial, nothing, seconds)
                    chosen = {reader: [*(slices[reader][i] for i in wanted[reader]), stamp] for reader in wanted}
                    self._broadcasts.move(gathering, chosen, seconds)
                except Exception as error:  # its readers read one-sided, and the rank trains
                    print(f"publication {serial} was not broadcast to all: {error}", file=sys.stderr, flush=True)

        threading.Thread(target=send, name="broadcast", daemon=True).start()


class Receiver:
    """Receives the runs of trainer ranks into the memory of a reader's host."""

    def __init__(self, stores: Mapping[int, str], gpu: torch.device | None) -> None:
        """`stores` has the address of each trainer rank's store."""
        self.name = f"broadcast ({'gloo' if gpu is None else 'NCCL'})"
        self._broadcasts = Broadcasts(lambda rank: meeting.store_at(stores[rank], MEET_SECONDS), gpu)

    def receive(
        self, runs: "Mapping[int, tuple[RemoteRun, Manifest, list[int]]]", gathering: Gathering, seconds: float
    ) -> None:
        """Receive the slices that any reader of a group lacks. `runs` has the run of each trainer rank, and its blocks
        that this reader wants."""
        missing = {rank: run.missing(manifest, blocks) for rank, (run, manifest, blocks) in runs.items()}
        (serial,) = {manifest.serial for _, manifest, _ in runs.values()}
        chosen = self._broadcasts.agree(gathering, serial, missing, min(seconds, MEET_SECONDS))
        targets = {rank: runs[rank][0].expect(runs[rank][1], parts) for rank, parts in chosen.items()}
        self._broadcasts.move(gathering, targets, seconds)
        for rank, parts in chosen.items():
            run, manifest, _ = runs[rank]
            run.arrived(manifest, parts)

    def leave(self) -> None:
        """Let no fetch in progress wait for other readers."""
        self._broadcasts.abort()


def _processes(store: "Store", seat: Seat, gpu: torch.device | None, seconds: timedelta) -> Any:
    """Make torch's process group, outside the default one."""
    import torch.distributed as dist

    meeting.use_interface()
    if gpu is None:
        return dist.ProcessGroupGloo(store, seat.rank, seat.size, seconds)
    nccl: Any = dist  # without the class where torch was built for CPUs
    options = nccl.ProcessGroupNCCL.Options()
    options._timeout = seconds
    # Else torch's watchdog would end this process, and the training, if a member dies. Only the constructor reads it.
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        with torch.cuda.device(gpu):
            return nccl.ProcessGroupNCCL(store, seat.rank, seat.size, options)
    finally:
        os.environ.pop("TORCH_NCCL_BLOCKING_WAIT")
        if before is not None:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before


def _until(ends: float) -> timedelta:
    return timedelta(seconds=max(ends - time.monotonic(), 0.001))
