"""Learn from vLLM's own loader which rectangle of which Hugging Face tensor fills which part of a live parameter.

The loader runs over a second model whose memory is never touched: a copy is recorded instead of made. The offset and
the strides of two views name the elements on both sides, at any size of model, in milliseconds. Each element of a
parameter has one source, or the model is refused.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_rl.actors.vllm.vllm_params import LiveLayout, is_quantized
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import Piece

aten = torch.ops.aten
DUPLICATES = {aten.clone.default, aten._to_copy.default}  # a copy of a folder's elements is as good as they are
FILLS = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
MOST_PIECES = 1 << 12  # a copy in more pieces scatters single elements


def learned_layout(
    vllm_config: Any, shape: ModelShape, *, quantized: bool = False, given: Collection[str] = ()
) -> LiveLayout:
    """Return the parameters of this process's tensor-parallel rank, and what fills them. Weights in 8 bits are made of
    these after loading, if `quantized`. The `given` ones stay as they are."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = vllm_config.model_config.dtype
    # Not on the meta device, where layers could not compute their tables. Memory that is not touched is not allocated.
    with set_default_torch_dtype(dtype), torch.device("cpu"):
        model = _second_model(vllm_config)
    if quantized:
        _check_quantized(model)
    folder = {name: torch.empty(size, device="meta") for name, size in shape.folder_tensors().items()}
    with CopyRecorder() as recorder:
        model.load_weights(iter(folder.items()))  # type: ignore[operator]
    written = {target.storage for target, _ in recorder.writes}
    synced = {name: p for name, p in model.named_parameters() if name not in given}
    live = synced | {n: b for n, b in model.named_buffers() if storage_of(b) in written}
    sources = dict(_sources(folder, shape))
    pieces = list(explained(live, sources, recorder))
    layout = LiveLayout({name: tuple(tensor.shape) for name, tensor in live.items()}, pieces)
    halved = layout.halved(shape, str(dtype).removeprefix("torch."))
    for name, tensor in live.items():
        if tensor.dtype != dtype and halved.shapes[name] == layout.shapes[name]:
            raise ValueError(
                f"expected parameters in {dtype}, as a weight sync moves them, found {name} {tensor.dtype}"
            )
    return halved


def _check_quantized(model: nn.Module) -> None:
    """Raise unless vLLM's linear layers are the ones that a sync quantizes."""
    from vllm.model_executor.layers.linear import LinearBase

    linears = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, LinearBase)}
    if wrong := {name for name, _ in model.named_parameters() if is_quantized(name) != (name in linears)}:
        found = ", ".join(sorted(wrong))
        raise ValueError(f"generator.quantization: expected linear layers of vLLM that end in _proj, found {found}")


def _second_model(vllm_config: Any) -> nn.Module:
    """Build another model of an engine's config. Layers register in the compilation config, so it has its own."""
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copy(vllm_config)
    config.quant_config = None
    config.model_config = copy(config.model_config)
    config.model_config.hf_config = hf_config = copy(config.model_config.hf_config)
    if getattr(hf_config, "quantization_config", True) is None:  # an override (vllm_args.py) that no loader takes
        del hf_config.quantization_config
    config.compilation_config = copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    return initialize_model(config)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, slots=True)
class Region:
    """A view's elements in a storage."""

    storage: int
    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Region":
        return cls(storage_of(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


@cache
def _overwrites(func: Any) -> bool:
    return any(arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments)


class CopyRecorder(TorchDispatchMode):
    """Records what would be copied between the storages of tensors, and what would be filled with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[Region, Region | None]] = []  # target and source in order; None: a constant
        self._kept: list[Tensor] = []  # a freed storage would give its address to the next one

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in DUPLICATES:
            return args[0]
        if func is aten.copy_.default:
            source = args[1].expand(args[0].shape)
            self._record(args[0], Region.of(source), source)
        elif func in FILLS:
            self._record(args[0], None)
        elif _overwrites(func):
            raise ValueError(f"expected vLLM's loader to copy the folder's elements, found that it computes by {func}")
        else:
            return func(*args, **(kwargs or {}))
        return args[0]

    def _record(self, target: Tensor, source: Region | None, *kept: Tensor) -> None:
        self._kept += [target, *kept]
        self.writes.append((Region.of(target), source))


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """A folder's tensor, and the tensors of the weight plan in it: blocks of its storage, one after the other."""

    names: list[str]
    starts: list[int]
    rows: list[int]
    cols: int
    transposed: bool = False  # each block has the transpose of its tensor

    def block(self, offset: int) -> int:
        return bisect_right(self.starts, offset) - 1


def _sources(folder: Mapping[str, Tensor], shape: ModelShape) -> Iterator[tuple[int, FolderTensor]]:
    """Find the plan's tensors in fused and in stacked tensors, by the folder's layout."""
    sizes, stacked, fused = shape.hf_tensors(), shape.stacked(), shape.fused()
    for name, tensor in folder.items():
        parts = list(stacked.get(name) or fused.get(name) or (name,))
        tables = [(sizes[part][0], prod(sizes[part][1:])) for part in parts]
        starts = list(accumulate((rows * cols for rows, cols in tables[:-1]), initial=0))
        yield (
            storage_of(tensor),
            FolderTensor(parts, starts, [rows for rows, _ in tables], tables[0][1], name in stacked),
        )


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a parameter's table, and where it comes from; without a source, a constant."""

    row0: int
    col0: int
    rows: int
    cols: int
    name: str = ""
    from_row: int = 0
    from_col: int = 0

    def overlaps(self, other: "Box") -> bool:
        rows = self.row0 < other.row0 + other.rows and other.row0 < self.row0 + self.rows
        return rows and self.col0 < other.col0 + other.cols and other.col0 < self.col0 + self.cols


def explained(
    live: Mapping[str, Tensor], sources: Mapping[int, FolderTensor], recorder: CopyRecorder
) -> Iterator[Piece]:
    """Yield the pieces of each parameter. Raise if an element has no source, or two."""
    names = {storage_of(param): name for name, param in live.items()}
    boxes: dict[str, list[Box]] = {name: [] for name in live}
    wrong = list[str]()
    for target, source in recorder.writes:
        if not prod(target.sizes):
            continue
        if (name := names.get(target.storage)) is None:
            wrong.append("a tensor that is no parameter")
            continue
        try:
            found = _boxes(live[name].shape, target, source, sources)
        except ValueError as error:
            wrong.append(f"{name} ({error})")
            continue
        boxes[name] = [box for box in boxes[name] if box.name or not any(map(box.overlaps, found))] + found
    for name, param in live.items():
        wrong += [f"{name} ({problem})" for problem in _problems(boxes[name], tuple(param.shape))]
    if wrong:
        raise ValueError(
            "expected vLLM's loader to copy each element of each parameter from one element of the folder, found "
            f"otherwise for {', '.join(dict.fromkeys(wrong))}"
        )
    for name in live:
        for box in sorted(boxes[name], key=lambda box: (box.row0, box.col0)):
            if box.name:
                yield Piece(name, box.row0, box.col0, box.name, box.from_row, box.rows, box.from_col, box.cols)


def _boxes(
    size: tuple[int, ...], target: Region, source: Region | None, sources: Mapping[int, FolderTensor]
) -> list[Box]:
    """Return the rectangles of one write. Raise a ValueError that describes the write if it has none."""
    width = size[-1] if len(size) > 1 else 1
    if source is None:
        whole = FolderTensor([""], [0], [prod(size) // width], width)
        return _rectangles(width, target, target, whole)
    if (tensor := sources.get(source.storage)) is None:
        raise ValueError("computed, not copied")
    return _rectangles(width, target, source, tensor)


def _rectangles(width: int, target: Region, source: Region, tensor: FolderTensor) -> list[Box]:
    """Cut a copy into rectangles of the target's table, which has `width` columns, and of the source's tables."""
    rows = tensor.rows[tensor.block(source.start)]
    inner = rows if tensor.transposed else tensor.cols  # length of the axis whose elements are neighbours
    row_step, col_step = (1, rows) if tensor.transposed else (tensor.cols, 1)
    axes = [(n, t, s) for n, t, s in zip(target.sizes, target.strides, source.strides, strict=True) if n > 1]
    axes = [part for axis in axes for half in _split(axis, 1, width) for part in _split(half, 2, inner)]
    down = next((axis for axis in axes if axis[1:] == (width, row_step)), (1, 0, 0))
    along = next((axis for axis in axes if axis[1:] == (1, col_step) and axis is not down), (1, 0, 0))
    others = [axis for axis in axes if axis is not down and axis is not along]
    if prod(n for n, _, _ in others) > MOST_PIECES:
        raise ValueError("scattered by elements")

    found = list[Box]()
    for steps in product(*(range(n) for n, _, _ in others)):
        to = target.start + sum(i * t for i, (_, t, _) in zip(steps, others, strict=True))
        at = source.start + sum(i * s for i, (_, _, s) in zip(steps, others, strict=True))
        left = down[0]
        while left:  # a fused tensor is several tables, one below the other
            block = tensor.block(at)
            place = at - tensor.starts[block]
            row, col = divmod(place, inner)[::-1] if tensor.transposed else divmod(place, inner)
            take = min(left, tensor.rows[block] - row)
            if take < 1:
                raise ValueError("copied from outside of its tensor")
            box = Box(to // width, to % width, take, along[0], tensor.names[block], row, col)
            if box.col0 + box.cols > width or col + box.cols > tensor.cols:
                raise ValueError("copied across rows")
            found.append(box)
            left, to, at = left - take, to + take * width, at + take * row_step
    return found


def _split(axis: tuple[int, int, int], side: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Split an axis that runs over several rows of a table with rows of `length` elements."""
    n, step = axis[0], axis[side]
    if step < length < n * step and length % step == 0 and n % (length // step) == 0:
        inside = length // step
        yield n // inside, axis[1] * inside, axis[2] * inside
        yield inside, axis[1], axis[2]
    else:
        yield axis


def _problems(boxes: list[Box], size: tuple[int, ...]) -> Iterator[str]:
    """Yield the faults of a parameter's rectangles. A constant may fill the rows below all others: they pad a
    vocabulary, and are never read."""
    open_ = list[Box]()  # boxes that reach the current row
    for box in sorted(boxes, key=lambda box: box.row0):
        open_ = [other for other in open_ if other.row0 + other.rows > box.row0]
        if any(map(box.overlaps, open_)):
            yield "an element has two sources"
            return
        open_.append(box)
    if missing := prod(size) - sum(box.rows * box.cols for box in boxes):
        yield f"{missing} elements have no source"
    end = max((box.row0 + box.rows for box in boxes if box.name), default=0)
    if any(box.row0 < end for box in boxes if not box.name) or not end:
        yield "filled with a constant"
