"""Weight sync on paper: shards of large models, seconds to plan their copies, and bytes on the wire."""

import gc
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from bench.rows import Row
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.vllm_params import pieces
from titan_rl.wire.weight_plan import Shard, plan

LLAMA_70B = ModelShape(
    family="llama3",
    vocab_size=128256,
    dim=8192,
    n_layers=80,
    n_heads=64,
    n_kv_heads=8,
    head_dim=128,
    hidden_dim=28672,
    max_seq_len=8192,
    rope_theta=5e5,
    norm_eps=1e-5,
    tied=False,
)
SMALL = replace(LLAMA_70B, vocab_size=8192, dim=1024, n_heads=16, head_dim=64, hidden_dim=2816, n_layers=1)


def shape_of_size(megabytes: int) -> ModelShape:
    """SMALL with as many layers as make about `megabytes` in bfloat16."""
    layer = replace(SMALL, n_layers=2).parameters - SMALL.parameters
    return replace(SMALL, n_layers=max(1, round((megabytes * 5e5 - SMALL.vocab_size * 2048) / layer)))


def shards(shape: ModelShape, rank: int, *, fsdp: int, tp: int = 1) -> list[Shard]:
    """The shards that FSDP2 over tensor parallelism leaves on a rank. HSDP replicas hold the same shards."""
    held = []
    for p in pieces(shape, tp=1, rank=0):
        row, col = (0, p.rows), (0, p.cols)
        if any(name in p.name for name in ("o_proj", "down_proj")):
            col = chunk(*col, tp, rank % tp)
        elif p.cols > 1:
            row = chunk(*row, tp, rank % tp)
        row = chunk(*row, fsdp, rank // tp % fsdp)
        rotary = shape.family == "llama3" and any(name in p.name for name in ("q_proj", "k_proj"))
        held.append(Shard(p.name, *row, *col, shape.head_dim if rotary else 0))
    return held


def chunk(start: int, size: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and size of one of torch.chunk's parts."""
    each = -(-size // parts)
    skip = min(index * each, size)
    return start + skip, min(each, size - skip)


def planning(layers: int) -> Iterator[Row]:
    shape = replace(LLAMA_70B, n_layers=layers)
    for name, replicate, fsdp, readers in (("FSDP 64", 1, 64, 8), ("HSDP 8x8", 8, 8, 8), ("FSDP 64", 1, 64, 64)):
        case = f"70B shapes, {layers} layers: {name} x TP 8 to TP {readers} x {64 // readers} replicas"
        trainer = [shards(shape, rank, fsdp=fsdp, tp=8) for rank in range(replicate * fsdp * 8)]
        wanted = [pieces(shape, tp=readers, rank=rank) for rank in range(readers)]
        began = time.process_time()
        made = plan(trainer, wanted)
        seconds = time.process_time() - began
        runs = [run for run in made.copies.values() if run]
        once = sum(len(pickle.dumps(run)) for run in runs)
        sent = [made.sent(rank) for rank in range(len(trainer))]
        layout = sum(len(pickle.dumps(held)) for held in trainer)
        row = partial(Row, "plan", case, way="plan")
        yield row("planning, CPU s", [seconds], note=f"{len(runs)} runs, {sum(map(len, runs))} copies")
        yield row("layouts to the controller, MB", [layout / 1e6])
        yield row("plan to 512 trainer ranks, MB", [once / 1e6])
        yield row("plan to 64 generator ranks, MB", [once * (64 // readers) / 1e6])
        yield row("most sent by a rank / least", [max(sent) / min(sent)])
        del trainer, wanted, made, runs
        gc.collect()
