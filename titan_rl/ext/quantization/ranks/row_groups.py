"""The live parameters of an engine with quantized weights, written and compared by groups of whole rows.

    fetched bytes of all runs ── rows of a parameter ── quantize_rows ──> fp8: codes and scales, as vLLM's kernels read
                                                                          int8: codes x scales, in the parameter's dtype

A row's scale needs the whole row, of which each run may have a part, so nothing is written block by block. To verify,
the same rows are quantized again and compared with what the parameters hold, to the last bit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from titan_rl.actors.sync.row_writer import RowWriter
from titan_rl.actors.vllm.vllm_params import SCALE, is_quantized
from titan_rl.ext.quantization.ranks.quantize_rows import FP8, dequantize_rows, quantize_rows
from titan_rl.wire import failpoints
from titan_rl.wire.weight_plan import Copy

GROUP_BYTES = 16 << 20  # at most, of the rows that are quantized at once: in float32 they take twice as much or more


def planned_params(live: Mapping[str, Tensor], quantization: Literal["fp8", "int8"]) -> Mapping[str, Tensor]:
    """Return the live parameters with the rows and columns of the weight plan: vLLM transposes fp8 weights."""
    if quantization != "fp8":
        return live
    planned = {name: param for name, param in live.items() if not name.endswith(SCALE)}
    return {name: param.t() if is_quantized(name) else param for name, param in planned.items()}


@dataclass(slots=True)
class RowGroup:
    """Consecutive rows of a parameter, and what fills them: (number of the run, first element in it, copy)."""

    param: str
    parts: list[tuple[int, int, Copy]] = field(default_factory=list)

    @property
    def rows(self) -> slice:
        ends = [copy.dst_row0 + copy.rows for _, _, copy in self.parts]
        return slice(min(copy.dst_row0 for _, _, copy in self.parts), max(ends))

    @property
    def place(self) -> str:
        return f"{self.param}, rows {self.rows.start} to {self.rows.stop - 1}"


class RowGroups(RowWriter):
    """All parameters of a reader. Those that are not quantized are copied."""

    def __init__(self, live: Mapping[str, Tensor], quantization: Literal["fp8", "int8"]) -> None:
        self._live, self.planned = live, planned_params(live, quantization)
        self.quantization: Literal["fp8", "int8"] = quantization
        self._groups: dict[tuple[str, int], RowGroup] = {}

    def stored(self, param: str) -> torch.dtype | None:
        return FP8 if self.quantization == "fp8" and is_quantized(param) else None

    def connect(self, copies: Sequence[Iterable[Copy]], runs: Sequence[Sequence[Tensor]]) -> None:
        self._runs, self._dtype = runs, runs[0][0].dtype
        self._heights = {
            name: max(1, GROUP_BYTES // (_width(param) * self._dtype.itemsize)) for name, param in self.planned.items()
        }
        for run, run_copies in enumerate(copies):
            start = 0
            for copy in run_copies:
                for number, part in self._cut(copy):
                    group = self._groups.setdefault((copy.param, number), RowGroup(copy.param))
                    group.parts.append((run, start, part))
                    start += part.elements
        for group in self._groups.values():
            found, rows = sum(copy.elements for _, _, copy in group.parts), group.rows
            if found != (expected := (rows.stop - rows.start) * _width(self.planned[group.param])):
                raise ValueError(f"{group.place}: expected {expected} elements from all runs, found {found}")

    def _cut(self, copy: Copy) -> Iterator[tuple[int, Copy]]:
        """Yield the parts of a copy that are in one group each, with the group's number in the parameter."""
        height, row = self._heights[copy.param], 0
        while row < copy.rows:
            number, first = divmod(copy.dst_row0 + row, height)
            rows = min(copy.rows - row, height - first)
            down = {"src_row0": copy.src_row0 + row, "dst_row0": copy.dst_row0 + row}
            yield number, replace(copy, **down, rows=rows)
            row += rows

    def of(self, copies: Iterable[Copy]) -> list[RowGroup]:
        """Return the groups that these copies fill, wholly or in part."""
        keys = dict.fromkeys((copy.param, number) for copy in copies for number, _ in self._cut(copy))
        return [self._groups[key] for key in keys]

    def write(self, groups: Iterable[RowGroup], slots: Sequence[int]) -> None:
        """Write groups from these slots of the runs. A GPU may not have read them yet when this returns."""
        for group in groups:
            for place, value in zip(self._places(group), self._values(group, slots), strict=True):
                place.copy_(value)
                if failpoints.hit("put"):
                    place.view(torch.uint8).bitwise_not_()

    def different(self, slots: Sequence[int]) -> list[RowGroup]:
        """Return the groups that write() would change."""
        return [group for group in self._groups.values() if not self._holds(group, slots)]

    def _holds(self, group: RowGroup, slots: Sequence[int]) -> bool:
        pairs = zip(self._places(group), self._values(group, slots), strict=True)
        return all(torch.equal(place.view(torch.uint8), value.view(torch.uint8)) for place, value in pairs)

    def _values(self, group: RowGroup, slots: Sequence[int]) -> tuple[Tensor, ...]:
        """Return what the live tensors must hold.  # [rows, cols], and scales [rows, 1]"""
        param, rows = self.planned[group.param], group.rows
        weight = torch.empty(rows.stop - rows.start, _width(param), dtype=self._dtype, device=param.device)
        for run, start, copy in group.parts:
            part = self._runs[run][slots[run]][start : start + copy.elements].view(copy.rows, copy.cols)
            row0, col0 = copy.dst_row0 - rows.start, copy.dst_col0
            weight[row0 : row0 + copy.rows, col0 : col0 + copy.cols].copy_(part, non_blocking=param.is_cuda)
        if not is_quantized(group.param):
            return (weight,)
        codes, scale = quantize_rows(weight, self.quantization)
        return (codes, scale) if self.quantization == "fp8" else (dequantize_rows(codes, scale, weight.dtype),)

    def _places(self, group: RowGroup) -> tuple[Tensor, ...]:
        """Return the live tensors' rows, in the order of _values()."""
        param = self.planned[group.param]
        weight = param.view(-1, _width(param))[group.rows]
        scaled = self.quantization == "fp8" and is_quantized(group.param)
        return (weight, self._live[group.param + SCALE][group.rows]) if scaled else (weight,)


def _width(param: Tensor) -> int:
    return param.shape[-1] if param.dim() > 1 else 1
