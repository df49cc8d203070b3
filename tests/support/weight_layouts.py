"""Model shapes, the shards of TorchTitan's layouts, and the execution of weight plans in numpy."""

import re

import numpy as np

from titan_rl.config.sections import LoraSection
from titan_rl.ext.adapters.layers import adapter_sizes
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import Shard, WeightPlan

TINY = ModelShape(
    family="llama3",
    vocab_size=100,
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=1,
    head_dim=32,
    hidden_dim=48,
    max_seq_len=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
)

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")  # the trainer's TP
BY_COLS = ("o_proj", "down_proj")


NO_LORA = LoraSection()


def hf_sizes(shape: ModelShape, lora: LoraSection = NO_LORA) -> dict[str, tuple[int, int]]:
    """Return the size of every tensor of a Hugging Face checkpoint, and of adapters; vectors have one column."""
    q, kv, dim = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim, shape.dim
    sizes = {"model.embed_tokens.weight": (shape.vocab_size, dim), "model.norm.weight": (dim, 1)}
    for i in range(shape.n_layers):
        layer = {
            "self_attn.q_proj": (q, dim),
            "self_attn.k_proj": (kv, dim),
            "self_attn.v_proj": (kv, dim),
            "self_attn.o_proj": (dim, q),
            "input_layernorm": (dim, 1),
            "post_attention_layernorm": (dim, 1),
        }
        if shape.experts:
            layer["mlp.gate"] = (shape.experts, dim)
        for mlp in [f"mlp.experts.{expert}" for expert in range(shape.experts)] or ["mlp"]:
            layer |= {f"{mlp}.{half}_proj": (shape.hidden_dim, dim) for half in ("gate", "up")}
            layer[f"{mlp}.down_proj"] = (dim, shape.hidden_dim)
        if shape.family.startswith("qwen3"):
            layer |= {"self_attn.q_norm": (shape.head_dim, 1), "self_attn.k_norm": (shape.head_dim, 1)}
        sizes |= {f"model.layers.{i}.{name}.weight": size for name, size in layer.items()}
        if shape.family == "qwen2":
            biases = {"q": q, "k": kv, "v": kv}
            sizes |= {f"model.layers.{i}.self_attn.{x}_proj.bias": (rows, 1) for x, rows in biases.items()}
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab_size, dim)
    return sizes | adapter_sizes(lora, shape)


def numbered(sizes: dict[str, tuple[int, int]]) -> dict[str, np.ndarray]:
    """Return tensors in which no two elements are equal."""
    tensors, start = {}, 0
    for name, (rows, cols) in sizes.items():
        tensors[name] = np.arange(start, start + rows * cols).reshape(rows, cols)
        start += rows * cols
    return tensors


def chunk(start: int, size: int, parts: int, index: int) -> tuple[int, int]:
    """Return (first, size) of a torch.chunk: all chunks but the last non-empty one have the same size."""
    each = -(-size // parts)
    skip = min(index * each, size)
    return start + skip, min(each, size - skip)


def layout(
    shape: ModelShape, *, replicate: int = 1, fsdp: int = 1, tp: int = 1, ep: int = 1, lora: LoraSection = NO_LORA
) -> list[list[Shard]]:
    """Return TorchTitan's shards by rank: tensor parallelism first, then FSDP2 on the rows of its shards.

    FSDP2 cuts a stack of experts by experts, if there is one for each rank, and else their rows. Expert parallelism
    deals the experts to consecutive ranks first, and leaves their matrices to FSDP2 over the others. Tensor parallelism
    cuts the matrix of an adapter that has the cut dimension."""
    ranks = []
    for _ in range(replicate):
        for f in range(fsdp):
            for t in range(tp):
                shards = []
                for name, (rows, cols) in hf_sizes(shape, lora).items():
                    row, col = (0, rows), (0, cols)
                    if found := re.search(r"experts\.(\d+)", name):
                        if shard := expert_shard(shape, name, int(found[1]), (f, t), (fsdp, tp, ep)):
                            shards.append(shard)
                        continue
                    if any(part in name for part in BY_ROWS) and "lora_A" not in name:
                        row = chunk(*row, tp, t)
                    if any(part in name for part in BY_COLS) and "lora_B" not in name:
                        col = chunk(*col, tp, t)
                    row = chunk(*row, fsdp, f)
                    shards.append(Shard(name, *row, *col))
                ranks.append(shards)
    return ranks


def expert_shard(
    shape: ModelShape, name: str, expert: int, place: tuple[int, int], mesh: tuple[int, int, int]
) -> Shard | None:
    """Return what the rank at `place` (of FSDP2, of tensor parallelism) holds of an expert's matrix."""
    (f, t), (fsdp, tp, ep) = place, mesh
    rows, cols = hf_sizes(shape)[name]
    row, col, own = (0, rows), (0, cols), (0, shape.experts)
    parts, part = fsdp, f
    if ep > 1:
        rank = f * tp + t
        own = chunk(*own, ep, rank % ep)
        parts, part = fsdp * tp // ep, rank // ep
    elif "down" in name:
        col = chunk(*col, tp, t)
    else:
        row = chunk(*row, tp, t)
    if parts * ep > shape.experts:
        row = chunk(*row, parts, part)
    else:
        own = chunk(*own, parts, part)
    return Shard(name, *row, *col) if own[0] <= expert < sum(own) else None


def execute(plan: WeightPlan, held: list[dict[str, np.ndarray]], live: list[dict[str, np.ndarray]]) -> None:
    """Pack every pair's run and add it to the live parameters, element by element."""
    for (rank, reader), copies in plan.copies.items():
        run = []
        for c in copies:
            rows = slice(c.src_row0, c.src_row0 + c.rows)
            run.append(held[rank][c.name][rows, c.src_col0 : c.src_col0 + c.cols])
        for c, values in zip(copies, run, strict=True):
            rows = slice(c.dst_row0, c.dst_row0 + c.rows)
            live[reader][c.param][rows, c.dst_col0 : c.dst_col0 + c.cols] += values
