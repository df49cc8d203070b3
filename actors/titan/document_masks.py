"""What packed rows attend to, as index tensors that all layers of a forward share.

A segment (see batch/prefixes.py) attends to its prefix and, causally, to itself. So its keys and values are gathered
from two places, one after the other, and then every attention that knows documents of any length computes it. Of the
row that batch/packing.py draws, with its segments and what their queries attend to:

    segment        0     1          2          3          4      5
    queries        0-3   4-5        6          7-8        9-12   13-15
    keys, values   0-3   0-3 4-5    0-3 6      0-3 7-8    9-12   13-15

With context parallelism a rank has the queries of a part of each row. A segment that began in an earlier part then
attends to its own earlier places as it does to a prefix.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torchtitan.models.common.attention import VarlenMetadata

from titan_rl.wire.types import ranges


class Attended(NamedTuple):
    """The segments of a rank's rows, [G] each: their queries, and the keys that these attend to, which are in whole
    rows."""

    begin: np.ndarray  # place of the first query
    length: np.ndarray
    prefix_begin: np.ndarray
    prefix: np.ndarray  # its length
    own_begin: np.ndarray  # the segment's first key
    skipped: np.ndarray  # places of the segment before its first query here
    keys: int  # places of the whole rows

    @classmethod
    def whole(cls, segments_G4: np.ndarray) -> "Attended":
        begin, length, prefix_begin, prefix = segments_G4.T
        return cls(begin, length, prefix_begin, prefix, begin, np.zeros_like(begin), int(length.sum()))

    @property
    def before(self) -> np.ndarray:
        """Return how many keys come before the first query's."""
        return self.prefix + self.skipped

    def take(self, order: np.ndarray) -> "Attended":
        *arrays, keys = self
        return Attended(*(x[order] for x in arrays), keys)  # pyright: ignore[reportCallIssue]


class Gather(NamedTuple):
    """Indices of a gather of rows, and of its backward."""

    source: torch.Tensor  # [K]
    back: torch.Tensor  # [T]: where each source row went; a row with copies, where its own segment is
    shared: torch.Tensor  # [F]: the source rows with copies
    copies: torch.Tensor  # [F, M]: where their other copies went; -1: it has fewer than M
    used: torch.Tensor | None = None  # [T] bool: whether `back` has a place for it; None: for all

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _Gathered.apply(x, *self)  # pyright: ignore[reportReturnType]


class _Gathered(torch.autograd.Function):
    """x[index]. The backward adds up copies in a fixed order, in float32: indexing's own does neither everywhere."""

    @staticmethod
    def forward(ctx: Any, x_TNH: torch.Tensor, index: torch.Tensor, *back: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(*back)
        return x_TNH.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore
        (grad_KNH,) = grads
        back, shared, copies_FM, used_T = ctx.saved_tensors
        grad_TNH = grad_KNH.index_select(0, back)
        if used_T is not None:
            grad_TNH = grad_TNH.masked_fill(~used_T[:, None, None], 0)
        if copies_FM.shape[1]:
            copied = grad_KNH.index_select(0, copies_FM.clamp(min=0).flatten()).unflatten(0, copies_FM.shape)
            copied = copied.masked_fill((copies_FM < 0)[:, :, None, None], 0).sum(1, dtype=torch.float32)
            total = copied + grad_TNH.index_select(0, shared)
            grad_TNH = grad_TNH.index_copy(0, shared, total.to(grad_TNH.dtype))
        return grad_TNH, None, None, None, None, None


class SharedMetadata(NamedTuple):
    """Masks of rows that share prompts, for attention that takes its keys by cu_seq_k."""

    varlen: VarlenMetadata
    keys: Gather


class SegmentClass(NamedTuple):
    """Segments of one shape, which are attended to together."""

    segments: int  # how many
    length: int  # in places
    prefix: int

    @property
    def keys(self) -> int:
        return self.prefix + self.length


class ClassedSegments(NamedTuple):
    """Masks of packed rows for attention that takes equally long documents: segments sorted by class."""

    classes: tuple[SegmentClass, ...]
    queries: Gather
    outputs: Gather  # the way back
    keys: Gather


def varlen_masks(attended: Attended, device: torch.device) -> VarlenMetadata | SharedMetadata:
    """Return masks: without a gather of keys if queries and keys are at the same places."""
    length, before = attended.length, attended.before
    cu_q, cu_k = (_to(np.append(0, n.cumsum()).astype(np.int32), device) for n in (length, before + length))
    metadata = VarlenMetadata(cu_q, cu_k, int(length.max()), int((before + length).max()))
    if attended.keys == length.sum() and not before.any():
        return metadata._replace(cu_seq_k=cu_q)
    return SharedMetadata(metadata, _keys(attended, device))


def classed_masks(attended: Attended, device: torch.device) -> ClassedSegments:
    attended = attended.take(np.lexsort((attended.begin, attended.length, attended.before)))
    length, before = attended.length, attended.before
    shapes, counts = np.unique(np.stack([before, length], 1), axis=0, return_counts=True)  # sorted as the segments are
    classes = tuple(SegmentClass(int(n), int(of), int(ahead)) for n, (ahead, of) in zip(counts, shapes, strict=True))
    to = ranges(attended.begin, length)
    there, back = _to(to, device), _to(np.argsort(to), device)
    none, nothing = there[:0], there[:0].view(0, 0)
    queries, outputs = Gather(there, back, none, nothing), Gather(back, there, none, nothing)
    return ClassedSegments(classes, queries, outputs, _keys(attended, device))


def _keys(attended: Attended, device: torch.device) -> Gather:
    """Return the gather of each segment's prefix, then its own places up to its last query."""
    begins = np.stack([attended.prefix_begin, attended.own_begin], 1).ravel()
    lengths = np.stack([attended.prefix, attended.skipped + attended.length], 1).ravel()
    index = ranges(begins, lengths)
    is_own = np.repeat(np.arange(len(begins)) % 2 == 1, lengths)
    back, used = np.zeros(attended.keys, np.int64), np.zeros(attended.keys, bool)
    back[index[is_own]], used[index[is_own]] = np.flatnonzero(is_own), True
    copied = np.flatnonzero(~is_own)
    copied = copied[np.argsort(index[copied], kind="stable")]
    shared, counts = np.unique(index[copied], return_counts=True)
    copies = np.full((len(shared), counts.max(initial=0)), -1)
    copies[np.repeat(np.arange(len(shared)), counts), ranges(np.zeros_like(counts), counts)] = copied
    if 1 in copies.shape:  # torch.compile takes a size of 1 for a constant: let there be 2, without copies
        shared = np.append(shared, np.setdiff1d([0, 1], shared)[: max(2 - len(shared), 0)])
        copies = np.pad(copies, [(0, max(2 - n, 0)) for n in copies.shape], constant_values=-1)
    arrays = (
        (index, back, shared, copies) if attended.keys == attended.length.sum() else (index, back, shared, copies, used)
    )
    return Gather(*(_to(x, device) for x in arrays))


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
