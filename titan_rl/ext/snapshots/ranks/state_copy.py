"""Copies a rank's trained state into memory that outlives the process, and restores it from there.

    begin     [ WRITING | tensors <─ on a thread, during the next step | the rest, as JSON ] then the stamp
              the thread also maps and pins a part's memory at its first use
    wait      before anything changes a tensor
    restore   into the state that a new process has built, to the last bit

The memory is an anonymous file of another process on this machine, found through /proc. Tensors are copied as this rank
shards them, so only a mesh of the same layout can restore them.
"""

import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from titan_rl.actors.sync.transport import PAGE, mapped, pin
from titan_rl.actors.titan.copies import Copies
from titan_rl.actors.titan.model import local
from titan_rl.ext.snapshots.snapshot_parts import HEAD, KEPT, WRITING, head
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.spans import Span, span

ALIGNMENT = 64  # bytes, of each tensor in a part: a cache line


class StateCopy(Copies):
    """Copies `states`, by name: what a checkpoint saves. Their tensors must not change between `begin` and `wait`."""

    def __init__(self, states: Mapping[str, Stateful]) -> None:
        self._states = states
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._copying: Future[Span] | None = None
        self._mapped: dict[int, Tensor] = {}  # parts by inode, the most recently used last
        self._stream: torch.cuda.Stream | None = None

    def begin(self, part: SnapshotPart) -> int:
        self.wait()
        began, state = span.now(), RankState.of(self._state_dicts())
        fd = _open(part)
        try:
            os.pwrite(fd, HEAD.pack(WRITING, 0, 0), 0)
        except BaseException:
            os.close(fd)
            raise
        if state.on_gpu:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())  # kernels that the step launched may not have run yet
        self._copying = self._thread.submit(self._copy, state, fd, part.serial, began)
        return state.nbytes

    def wait(self) -> None:
        if self._copying is not None:
            copying, self._copying = self._copying, None
            try:
                span.add(copying.result())
            except Exception as error:
                print(f"a snapshot failed: {type(error).__name__}: {error}", file=sys.stderr)

    @torch.no_grad()
    def restore(self, part: SnapshotPart) -> None:
        states = self._state_dicts()
        current = RankState.of(states)
        fd = _open(part)
        try:
            stamp, start, end = head(fd)
            if stamp != part.serial:
                raise RuntimeError(f"{part.path}: expected snapshot {part.serial}, found the stamp {stamp}")
            tail = json.loads(os.pread(fd, end - start, start))
            _refuse_other(tail["layout"], current.layout, part)
            saved = current.places(self._memory(fd, current))
        finally:
            os.close(fd)
        torch.ops.aten._foreach_copy_(list(current.tensors.values()), saved)
        for name, state in states.items():
            values = {key: tail["values"].get(f"{name}/{key}") for key in state}
            self._states[name].load_state_dict({key: _as(live, values[key]) for key, live in state.items()})

    def close(self) -> None:
        self._thread.shutdown()
        while self._mapped:
            self._release(next(iter(self._mapped)))

    def _state_dicts(self) -> dict[str, dict[str, Any]]:
        return {name: state.state_dict() for name, state in self._states.items()}

    def _copy(self, state: "RankState", fd: int, serial: int, began: int) -> Span:
        """Run on the thread. A part's first use maps and pins its memory here too, which takes as long as the kernel
        needs to find the pages. torch releases the GIL for that, and during the one call that moves all bytes."""
        stream = self._stream if state.on_gpu else None
        try:
            targets = state.places(self._memory(fd, state))
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                torch.ops.aten._foreach_copy_(targets, list(state.tensors.values()), non_blocking=stream is not None)
            if stream is not None:
                stream.synchronize()
            tail, start = json.dumps({"layout": state.layout, "values": state.values}).encode(), state.starts[-1]
            os.pwrite(fd, tail, start)
            os.pwrite(fd, HEAD.pack(serial, start, start + len(tail)), 0)
        finally:
            os.close(fd)
        return Span("snapshot", "snapshot", began, span.now() - began, {"bytes": state.nbytes})

    def _memory(self, fd: int, state: "RankState") -> Tensor:
        """Return the part's bytes, mapped at its first use. [nbytes]"""
        inode, nbytes = os.fstat(fd).st_ino, state.starts[-1]
        memory = self._mapped.pop(inode, None)
        if memory is None:
            if os.fstat(fd).st_size < nbytes:
                os.ftruncate(fd, nbytes)
            memory = mapped(fd, nbytes, write=True)
            if state.on_gpu:
                pin(memory)
        self._mapped[inode] = memory
        while len(self._mapped) > KEPT:
            self._release(next(iter(self._mapped)))
        return memory

    def _release(self, inode: int) -> None:
        memory = self._mapped.pop(inode)
        if memory.is_pinned():
            cudart: Any = torch.cuda.cudart()
            cudart.cudaHostUnregister(memory.data_ptr())


@dataclass(frozen=True, slots=True)
class RankState:
    """The states of this rank, split into tensors and other values."""

    tensors: dict[str, Tensor]  # this rank's shard of each
    values: dict[str, Any]  # numbers, strings and tuples of them

    @classmethod
    def of(cls, states: Mapping[str, Mapping[str, Any]]) -> "RankState":
        every = {f"{name}/{key}": value for name, state in states.items() for key, value in state.items()}
        tensors = {key: local(value) for key, value in every.items() if isinstance(value, Tensor)}
        return cls(tensors, {key: value for key, value in every.items() if key not in tensors})

    @property
    def on_gpu(self) -> bool:
        return any(tensor.is_cuda for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def layout(self) -> dict[str, list[Any]]:
        return {key: [str(tensor.dtype), *tensor.shape] for key, tensor in self.tensors.items()}

    @property
    def starts(self) -> list[int]:
        """Return where each tensor starts in a part, and where the JSON after the last one starts."""
        starts = [PAGE]
        for tensor in self.tensors.values():
            starts.append(starts[-1] + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
        return starts

    def places(self, memory: Tensor) -> list[Tensor]:
        """Return each tensor's view of a part's bytes."""
        return [
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(self.starts, self.tensors.values(), strict=False)
        ]


def _open(part: SnapshotPart) -> int:
    try:
        return os.open(part.path, os.O_RDWR)
    except OSError as error:
        raise RuntimeError(
            f"expected memory for snapshots at {part.path}, found {error.strerror}; "
            "fault.snapshot_interval = 0 turns snapshots off"
        ) from None


def _refuse_other(saved: Mapping[str, list[Any]], live: Mapping[str, list[Any]], part: SnapshotPart) -> None:
    if saved != live:
        key = next(key for key in (*saved, *live) if saved.get(key) != live.get(key))
        raise RuntimeError(
            f"{part.path}: expected {key} as {live.get(key, 'no tensor')}, found {saved.get(key, 'none')}: "
            "a snapshot can only be restored on a mesh of the same layout"
        )


def _as(live: Any, saved: Any) -> Any:
    """Restore a type that JSON does not have. Tensors are returned as they are: their values are restored already."""
    if isinstance(live, Tensor):
        return live
    return tuple(saved) if isinstance(live, tuple) else saved
