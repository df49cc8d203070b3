"""Context parallelism: the ranks of a group compute consecutive parts of each packed row.

    whole rows -> tokens and positions of a part -> blocks -> log-probs of the part's places -> of all places
                                                     └ attention: queries of the part, keys and values of whole rows

Each rank of the group gets whole rows, and the losses see the log-probs of whole rows on each: a ratio or a mean over a
sequence needs no other collective. The gradient goes back through the part's own log-probs only. FSDP2 shards over
dp x cp ranks and adds up the parts.

TorchTitan 0.3.0 refuses its own context parallelism for documents of any length (VarlenAttention). Its pull request
3430 adds it for full_dtensor, which needs a newer torch. So it is not asked: to TorchTitan the group's ranks are
further FSDP2 shards, and attention gathers keys and values itself.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titan_rl.actors.titan.document_masks import Attended
from titan_rl.actors.titan.row_parts import PartOfRows
from titan_rl.config.sections import ParallelismSection
from titan_rl.wire.types import Rows


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of each row a rank computes. Parts are equally long, a multiple of `multiple` places: rows are padded
    to that."""

    index: int
    count: int
    multiple: int = 1


class ContextParallel:
    """A part of each row, and the ranks that have the others."""

    def __init__(self, mesh: DeviceMesh, multiple: int) -> None:
        self._mesh = mesh
        self._part = Part(mesh.get_local_rank(), mesh.size(), multiple)

    @classmethod
    def of(cls, p: ParallelismSection, device_type: str) -> "ContextParallel":
        """Return this rank's part. Every rank of the mesh calls this."""
        cp, tp = p.context_parallel_degree, p.tensor_parallel_degree
        ranks = np.arange(p.world_size).reshape(p.dp, cp, tp).transpose(0, 2, 1).reshape(-1, cp)
        group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
        assert isinstance(group, dist.ProcessGroup)
        return cls(DeviceMesh.from_group(group, device_type, mesh_dim_names=("cp",)), multiple=tp)

    @property
    def count(self) -> int:
        return self._part.count

    def cut(self, rows: Rows) -> PartOfRows:
        return cut(rows, self._part)

    def of_whole_rows(self, k_BPNH: torch.Tensor, v_BPNH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values of all parts. The backward adds up the gradients of all ranks' queries."""
        side_by_side = 2 if k_BPNH.shape[3] == v_BPNH.shape[3] else 3  # heads, or their elements (MLA)
        part = DTensor.from_local(torch.cat([k_BPNH, v_BPNH], side_by_side), self._mesh, [Shard(1)], run_check=False)
        both_BLNH = part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        k_BLNH, v_BLNH = both_BLNH.split([x.shape[side_by_side] for x in (k_BPNH, v_BPNH)], side_by_side)
        return k_BLNH, v_BLNH

    def of_all_parts(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Add up what parts have of the same targets. The backward adds up nothing: all ranks of the group compute the
        same loss."""
        part = DTensor.from_local(x_BT, self._mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


def cut(rows: Rows, part: Part) -> PartOfRows:
    """Return a part of packed rows. A segment that began in an earlier part continues: its queries attend to its keys
    from its first place on."""
    count, length = rows.tokens.shape
    size = -(-length // (part.count * part.multiple)) * part.multiple
    first, wide = part.index * size, part.count * size

    def columns(x_BL: np.ndarray, padding: int = 0) -> np.ndarray:
        widths = [(0, 0), (0, wide - length), *[(0, 0)] * (x_BL.ndim - 2)]
        padded = np.pad(x_BL, widths, constant_values=padding)
        return np.ascontiguousarray(padded[:, first : first + size])

    row, column = np.divmod(rows.places, length)
    own = (first <= column) & (column < first + size)
    begin, places, prefix_begin, prefix = rows.segments.T
    row_of, column_of = np.divmod(begin, length)
    if wide > length:
        row_of = np.append(row_of, np.arange(count))
        column_of, places, prefix_begin, prefix = (
            np.append(x, np.full(count, last))
            for x, last in ((column_of, length), (places, wide - length), (prefix_begin, 0), (prefix, 0))
        )
    begin, end = np.maximum(column_of, first), np.minimum(column_of + places, first + size)
    here = begin < end
    prefix_row, prefix_column = np.divmod(prefix_begin, length)
    attended = Attended(
        begin=(row_of * size + begin - first)[here],
        length=(end - begin)[here],
        prefix_begin=(prefix_row * wide + prefix_column)[here],
        prefix=prefix[here],
        own_begin=(row_of * wide + column_of)[here],
        skipped=(begin - column_of)[here],
        keys=count * wide,
    )
    there = np.where(own, row * size + column - first, 0)
    in_order = attended.take(np.argsort(attended.begin))  # as FlashAttention takes queries
    return PartOfRows(columns(rows.tokens), columns(rows.positions), own, there, in_order, columns)
