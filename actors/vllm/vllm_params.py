"""The live parameters of vLLM's decoders (model_families.py), and the Hugging Face tensors that fill them.

vLLM fuses q, k and v, and gate and up, stacks experts, pads embeddings, and cuts parameters over its tensor-parallel
ranks. The adapters of a fused layer stay apart (titan_rl/ext/adapters).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from titan_rl.config.choices import Quantization
from titan_rl.config.sections import LoraSection
from titan_rl.wire.model_shape import ROUTE_BIAS, ModelShape, SpecShape, planned
from titan_rl.wire.parts import needed_part
from titan_rl.wire.weight_plan import Piece, is_adapter

W13, W2 = "routed_experts.w13_weight", "routed_experts.w2_weight"  # [E, 2F, D], [E, D, F]
W13_BIAS, W2_BIAS = "routed_experts.w13_bias", "routed_experts.w2_bias"  # [E, 2F], [E, D]
SCALE = "_scale"  # vLLM's suffix of the parameter with the scales of an fp8 weight's rows  # [rows, 1]
VOCAB_MULTIPLE = 64  # vLLM pads embeddings to a multiple of it; pad rows are never read, so they are never written


@dataclass(frozen=True, slots=True)
class LiveLayout:
    """The parameters of one tensor-parallel rank, by vLLM's names and in its order, and what fills them."""

    shapes: dict[str, tuple[int, ...]]
    pieces: list[Piece]

    def halved(self, shape: ModelShape, dtype: str) -> "LiveLayout":
        """Return the layout of an engine in `dtype`, which may have parameters of 32 bits as two numbers of 16."""
        if not (ends := shape.halves(dtype)):
            return self
        halves = {name: (size[0], 2 * prod(size[1:])) for name, size in self.shapes.items() if name.endswith(ends)}
        return LiveLayout(self.shapes | halves, planned(self.pieces, shape, dtype))

    def with_adapters(self, shape: ModelShape, lora: LoraSection | None) -> "LiveLayout":
        """Return the layout with a run's adapters after all else."""
        if lora is None:
            return self
        shapes, pieces = dict(self.shapes), list(self.pieces)
        make = needed_part("parameters of adapters", "lora.rank")
        for param, size, piece in make(self.pieces, lora, shape):
            shapes[param] = size
            pieces += [piece] if piece else []
        return LiveLayout(shapes, pieces)


def planned_layout(
    shape: ModelShape, *, tp: int, rank: int, lora: LoraSection | None = None, dtype: str = "float32"
) -> LiveLayout:
    """Return the layout of a rank of an engine in `dtype` as a plan assumes it, without vLLM. A run learns it
    (learned_plan.py)."""
    if isinstance(shape, SpecShape):
        return _cut_by_rows(shape, tp, rank).halved(shape, dtype).with_adapters(shape, lora)
    shapes, found = dict[str, tuple[int, ...]](), list[Piece]()
    for param, parts in _parameters(shape, tp):
        rows = sum(part.height for part in parts)
        if param.endswith((W13, W2)):  # rows of one expert after the other
            shapes[param] = shape.experts, rows // shape.experts, parts[0].width
        else:
            shapes[param] = (rows,) if parts[0].cols == 1 else (rows, parts[0].width)
        dst_row0 = 0
        for part in parts:
            row0 = part.height * (rank * part.row_cuts // tp)
            col0 = part.width * (rank * part.col_cuts // tp)
            rows = min(part.height, part.rows - row0)  # the rest of the height is vocabulary padding
            if rows > 0:
                found.append(Piece(param, dst_row0, 0, part.name, row0, rows, col0, part.width))
            dst_row0 += part.height
    return LiveLayout(shapes, found).halved(shape, dtype).with_adapters(shape, lora)


def _cut_by_rows(shape: SpecShape, tp: int, rank: int) -> LiveLayout:
    """Return a layout with the bytes of a model whose vLLM is not described here: each matrix is cut by rows."""
    shapes, found = dict[str, tuple[int, ...]](), list[Piece]()
    for name, (rows, *cols) in shape.hf_tensors().items():
        cuts = tp if cols and rows % tp == 0 else 1
        shapes[name] = rows // cuts, *cols
        found.append(Piece(name, 0, 0, name, rank % cuts * (rows // cuts), rows // cuts, 0, prod(cols)))
    return LiveLayout(shapes, found)


def pieces(
    shape: ModelShape, *, tp: int, rank: int, lora: LoraSection | None = None, dtype: str = "float32"
) -> list[Piece]:
    """Return what fills the parameters of one tensor-parallel rank of an engine in `dtype`; with `lora` also its
    adapters, after all else."""
    return planned_layout(shape, tp=tp, rank=rank, lora=lora, dtype=dtype).pieces


def adapters_in(slot: int, pieces: Iterable[Piece]) -> list[Piece]:
    """Return the adapters among the pieces, for a further policy's slot. Their names have the slot, so that a
    reader refuses what another policy's trainers have packed."""
    return [replace(piece, param=in_slot(slot, piece.param)) for piece in pieces if is_adapter(piece.name)]


def in_slot(slot: int, param: str) -> str:
    return f"{param}@{slot}" if slot else param


def is_quantized(param: str) -> bool:
    """Return whether generator.quantization applies to a parameter: the weights of the blocks' linear layers."""
    return param.endswith("_proj.weight")


def live_shapes(shapes: Mapping[str, tuple[int, ...]], quantization: Quantization) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a live model. vLLM transposes fp8 weights, and keeps a scale of each row."""
    if quantization != "fp8":
        return dict(shapes)
    quantized = {name: size for name, size in shapes.items() if is_quantized(name)}
    codes = {name: (cols, rows) for name, (rows, cols) in quantized.items()}
    return {**shapes, **codes, **{name + SCALE: (rows, 1) for name, (rows, _) in quantized.items()}}


def param_shapes(
    shape: ModelShape, tp: int, lora: LoraSection | None = None, dtype: str = "float32"
) -> dict[str, tuple[int, ...]]:
    """Return the parameter shapes of one tensor-parallel rank, by vLLM's names; all ranks have the same shapes."""
    return planned_layout(shape, tp=tp, rank=0, lora=lora, dtype=dtype).shapes


def verify_complete(
    live: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], quantization: Quantization = "none"
) -> None:
    """Raise unless a live model has exactly the parameters of a layout, in their shapes."""
    expected = live_shapes(shapes, quantization)
    wrong = [f"{name} (not in the plan)" for name in live if name not in expected]
    for name, size in expected.items():
        if name not in live:
            wrong.append(f"{name} (not in the model)")
        elif tuple(live[name]) != size:
            wrong.append(f"{name} (expected shape {size}, found {tuple(live[name])})")
    if wrong:
        raise ValueError(
            f"the generator's parameters differ from what its loader fills: {', '.join(wrong)}. "
            "A shape of (0,) means that vLLM repacked the weight after loading."
        )


@dataclass(frozen=True, slots=True)
class LivePart:
    """A Hugging Face tensor in a live parameter, cut into equal parts by rows or columns. Each rank has one part; if
    there are fewer cuts than ranks, neighbouring ranks share one."""

    name: str
    rows: int
    cols: int
    row_cuts: int = 1
    col_cuts: int = 1
    padded: int = 0  # rows to cut instead of `rows`; 0: no padding

    @property
    def height(self) -> int:
        return (self.padded or self.rows) // self.row_cuts

    @property
    def width(self) -> int:
        return self.cols // self.col_cuts


def _parameters(shape: ModelShape, tp: int) -> Iterator[tuple[str, list[LivePart]]]:
    """Yield vLLM's parameters in its own order, each with its Hugging Face tensors from top to bottom."""
    vocab = -(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    kv_cuts = min(shape.n_kv_heads, tp)
    sizes = {"attention heads": shape.n_heads, "feed-forward rows": shape.hidden_dim, "padded vocabulary rows": vocab}
    sizes["rows of the first layers' feed-forward"] = shape.dense_hidden_dim
    for what, size in sizes.items():
        if size % tp:
            raise ValueError(f"[generator] tensor_parallel_degree: expected a divisor of {size} {what}, found {tp}")
    if shape.n_kv_heads % kv_cuts or tp % kv_cuts:
        raise ValueError(
            f"[generator] tensor_parallel_degree: expected a divisor or a multiple of {shape.n_kv_heads} key/value "
            f"heads, found {tp}"
        )

    dim, q, kv = shape.dim, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim

    def vector(name: str, size: int) -> tuple[str, list[LivePart]]:
        return name, [LivePart(name, size, 1)]

    def embedding(name: str) -> tuple[str, list[LivePart]]:
        return name, [LivePart(name, shape.vocab_size, dim, row_cuts=tp, padded=vocab)]

    embed, attn = ("embedding", "attn") if shape.parts.sinks else ("embed_tokens", "self_attn")  # vLLM's names
    yield f"model.{embed}.weight", embedding("model.embed_tokens.weight")[1]
    for layer in range(shape.n_layers):
        at = f"model.layers.{layer}"
        yield (
            f"{at}.{attn}.qkv_proj.weight",
            [
                LivePart(f"{at}.self_attn.q_proj.weight", q, dim, row_cuts=tp),
                LivePart(f"{at}.self_attn.k_proj.weight", kv, dim, row_cuts=kv_cuts),
                LivePart(f"{at}.self_attn.v_proj.weight", kv, dim, row_cuts=kv_cuts),
            ],
        )
        if shape.qkv_bias:
            yield (
                f"{at}.{attn}.qkv_proj.bias",
                [
                    LivePart(f"{at}.self_attn.q_proj.bias", q, 1, row_cuts=tp),
                    LivePart(f"{at}.self_attn.k_proj.bias", kv, 1, row_cuts=kv_cuts),
                    LivePart(f"{at}.self_attn.v_proj.bias", kv, 1, row_cuts=kv_cuts),
                ],
            )
        yield f"{at}.{attn}.o_proj.weight", [LivePart(f"{at}.self_attn.o_proj.weight", dim, q, col_cuts=tp)]
        if shape.parts.sinks:
            yield f"{at}.{attn}.o_proj.bias", [LivePart(f"{at}.self_attn.o_proj.bias", dim, 1)]
            yield f"{at}.{attn}.sinks", [LivePart(f"{at}.self_attn.sinks", shape.n_heads, 1, row_cuts=tp)]
        for x, size in shape.qk_norms.items():
            yield vector(f"{at}.self_attn.{x}_norm.weight", size)
        yield from _feed_forward(shape, layer, f"{at}.mlp", tp)
        for norm in shape.parts.norms:
            yield vector(f"{at}.{norm}.weight", dim)
    yield vector("model.norm.weight", dim)
    if not shape.tied:
        yield embedding("lm_head.weight")


def _feed_forward(shape: ModelShape, layer: int, at: str, tp: int) -> Iterator[tuple[str, list[LivePart]]]:
    """Yield the parameters of a layer's feed-forward, or of its router and experts. Each rank has a part of each."""
    if shape.parts.clamped_experts:
        yield from _clamped_experts(shape, at, tp)
        return

    def two(names: list[str], rows: int) -> tuple[list[LivePart], list[LivePart]]:
        halves = [f"{name}.{half}_proj.weight" for name in names for half in ("gate", "up")]
        into = [LivePart(half, rows, shape.dim, row_cuts=tp) for half in halves]
        return into, [LivePart(f"{name}.down_proj.weight", shape.dim, rows, col_cuts=tp) for name in names]

    rows, routes = shape.dense_rows(layer), shape.routes(layer)
    if routes:
        yield f"{at}.gate.weight", [LivePart(f"{at}.gate.weight", shape.experts, shape.dim)]
        if shape.parts.biased_routes:
            yield f"{at}.gate.{ROUTE_BIAS}", [LivePart(f"{at}.gate.{ROUTE_BIAS}", shape.experts, 1)]
        each = two([f"{at}.experts.{expert}" for expert in range(shape.experts)], shape.hidden_dim)
        yield from zip((f"{at}.experts.{W13}", f"{at}.experts.{W2}"), each, strict=True)
    if rows:
        at = f"{at}.shared_experts" if routes else at
        yield from zip((f"{at}.gate_up_proj.weight", f"{at}.down_proj.weight"), two([at], rows), strict=True)


def _clamped_experts(shape: ModelShape, at: str, tp: int) -> Iterator[tuple[str, list[LivePart]]]:
    """Yield the parameters of gpt-oss's router and experts, whose rows of gate and up alternate on both sides."""
    if tp > 1:
        raise ValueError(f"[generator] tensor_parallel_degree: expected 1 for {shape.family}, found {tp}")
    experts, wide, dim = shape.experts, 2 * shape.hidden_dim, shape.dim
    yield f"{at}.router.weight", [LivePart(f"{at}.router.weight", experts, dim)]
    yield f"{at}.router.bias", [LivePart(f"{at}.router.bias", experts, 1)]
    each = [f"{at}.experts.{i}" for i in range(experts)]
    yield f"{at}.experts.{W13}", [LivePart(f"{name}.gate_up_proj", wide, dim) for name in each]
    yield f"{at}.experts.{W13_BIAS}", [LivePart(f"{at}.experts.gate_up_proj_bias", experts, wide)]
    yield f"{at}.experts.{W2}", [LivePart(f"{name}.down_proj", dim, shape.hidden_dim) for name in each]
    yield f"{at}.experts.{W2_BIAS}", [LivePart(f"{at}.experts.down_proj_bias", experts, dim)]
