"""The generator's side of a weight sync: one-sided reads into host memory, then in-place writes into vLLM's parameters.

read() may overlap with sampling, for it touches no parameter; write() must not. Replicated engines, tensor-parallel
ranks and restarted processes all land alike: a Landing knows one rank's parameters and the runs that it reads.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from monarch.rdma import RDMAAction, RDMABuffer
from torch import Tensor

from titan_rl.actors.staging import window
from titan_rl.weight_plan import Copy


@dataclass(frozen=True, slots=True)
class Source:
    """What one trainer rank offers to one reader: its registered run, and what lies in it in which order."""

    trainer_rank: int
    buffers: list[RDMABuffer]
    copies: tuple[Copy, ...]
    dtype: str  # torch's name of it, "bfloat16"

    @property
    def elements(self) -> int:
        return sum(copy.elements for copy in self.copies)

    @property
    def nbytes(self) -> int:
        return self.elements * getattr(torch, self.dtype).itemsize


class Landing:
    """Reads every source's run at once into memory allocated here, once, and writes it where the plan says."""

    def __init__(self, params: Mapping[str, Tensor], sources: Sequence[Source]) -> None:
        self._params = params
        self._sources = sources
        pinned = any(param.is_cuda for param in params.values())
        self._runs = [_run(params, source, pinned) for source in sources]
        self._reads = RDMAAction()  # resubmitted for every version: addresses never change
        for source, run in zip(sources, self._runs, strict=True):
            parts = run.view(torch.uint8).split([buffer.size() for buffer in source.buffers])
            for buffer, part in zip(source.buffers, parts, strict=True):
                self._reads.read_remote(part, buffer)
        self._whole = False  # the runs hold one version, completely

    async def read(self, timeout: float) -> None:
        """Bring every run over, all slices in flight together. Fails within `timeout` seconds if a source is gone."""
        self._whole = False
        await self._reads.submit(timeout=math.ceil(timeout))
        self._whole = True

    @torch.no_grad()
    def write(self) -> int:
        """Overwrite the live parameters with what was read; returns the bytes."""
        if not self._whole:
            raise RuntimeError("expected a completed read() before write(): the memory holds no whole version")
        for source, run in zip(self._sources, self._runs, strict=True):
            parts = run.split([copy.elements for copy in source.copies])
            for part, copy in zip(parts, source.copies, strict=True):
                target = window(self._params[copy.param], copy, copy.dst_row0, copy.dst_col0, step=1)
                target.copy_(part.view(copy.blocks, copy.rows, copy.cols))
        return sum(source.nbytes for source in self._sources)


def _run(params: Mapping[str, Tensor], source: Source, pinned: bool) -> Tensor:
    """Memory for a source's run, after checking that it will fit.  # [elements]"""
    dtype = getattr(torch, source.dtype)
    registered = sum(buffer.size() for buffer in source.buffers)
    if registered != source.nbytes:
        raise ValueError(
            f"trainer rank {source.trainer_rank}: expected {source.nbytes} registered bytes for its copies in "
            f"{source.dtype}, found {registered}"
        )
    for copy in source.copies:
        if copy.param not in params:
            raise ValueError(f"{copy.param}: expected in the live model, which has no such parameter")
        param = params[copy.param]
        rows = copy.dst_row0 + (copy.blocks - 1) * copy.block_stride + copy.rows
        cols = copy.dst_col0 + copy.cols
        height, width = param.shape if param.dim() == 2 else (*param.shape, 1)
        if rows > height or cols > width:
            raise ValueError(f"{copy.param}: expected at least {rows} x {cols}, found shape {tuple(param.shape)}")
        if param.dtype != dtype:
            raise ValueError(f"{copy.param}: expected {source.dtype} as staged by the trainer, found {param.dtype}")
    return torch.empty(source.elements, dtype=dtype, pin_memory=pinned)
