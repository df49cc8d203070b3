"""Weight sync without a second process: planning the copies of a large model on paper, and packing a rank's shards."""

import gc
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.rows import Row, in_turn
from bench.sharded import shards
from titan_rl.actors.sync.staging import Staging
from titan_rl.actors.vllm.vllm_params import pieces
from titan_rl.kernels.pack_weights import pack
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import RunOfCopies, Shard, plan

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
FLAT = "copy_ to the run's dtype"
WARM_UP = 2  # rounds of packing


def shape_of_size(megabytes: int) -> ModelShape:
    """SMALL with the number of layers that makes about `megabytes` in bfloat16."""
    layer = replace(SMALL, n_layers=2).parameters - SMALL.parameters
    return replace(SMALL, n_layers=max(1, round((megabytes * 5e5 - SMALL.vocab_size * 2048) / layer)))


def planning() -> Iterator[Row]:
    for name, fsdp, readers in (("FSDP 64", 64, 8), ("HSDP 8x8", 8, 8), ("FSDP 64", 64, 64)):
        case = f"70B shapes, {LLAMA_70B.n_layers} layers: {name} x TP 8 to TP {readers} x {64 // readers} replicas"
        trainer = [shards(LLAMA_70B, rank, fsdp=fsdp, tp=8) for rank in range(512)]
        wanted = [pieces(LLAMA_70B, tp=readers, rank=rank) for rank in range(readers)]
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


def packing(repeats: int) -> Iterator[Row]:
    """Compare packing with a plain copy of equal size, on one thread."""
    torch.set_num_threads(1)
    for family in ("llama3", "qwen3"):
        shape = replace(SMALL, family=family, vocab_size=32000, n_layers=8)
        for name, fsdp, tp, readers in (("FSDP 1", 1, 1, 1), ("FSDP 3", 3, 1, 2), ("FSDP 2 x TP 2", 2, 2, 2)):
            trainer = [shards(shape, rank, fsdp=fsdp, tp=tp) for rank in range(fsdp * tp)]
            made = plan(trainer, [pieces(shape, tp=readers, rank=rank) for rank in range(readers)])
            held, source = random_params(trainer[0]), torch.randn(made.sent(0))
            for sent in (torch.float32, torch.bfloat16):
                case = f"{family}, {name} to TP {readers}, float32 to {str(sent).removeprefix('torch.')}"
                ways = ways_to_pack(held, made.outgoing(0), source, sent)
                seconds: dict[str, list[float]] = {way: [] for way in ways}
                for turn, way in in_turn(ways, WARM_UP + repeats):
                    began = time.process_time()
                    ways[way]()
                    if turn >= WARM_UP:
                        seconds[way].append(time.process_time() - began)
                least = {way: min(values) for way, values in seconds.items()}
                for way, values in seconds.items():
                    note = f"{source.nbytes / 1e6:.0f} MB read; over {FLAT}: {least[way] / least[FLAT]:.2f}"
                    yield Row("pack", case, "CPU s", values, way, least[way] / least["copy"], note)


def random_params(held: Sequence[Shard]) -> dict[str, Tensor]:
    """Return float32 tensors of these shards' sizes, small enough that an engine can run on them."""
    return {s.name: torch.randn((s.rows, s.cols) if s.cols > 1 else (s.rows,)) / 64 for s in held}


def ways_to_pack(
    held: Mapping[str, Tensor], outgoing: Mapping[int, RunOfCopies], source: Tensor, sent: torch.dtype
) -> dict[str, Callable[[], Any]]:
    same, flat = torch.zeros_like(source), torch.zeros_like(source, dtype=sent)
    buffers = {r: torch.zeros(sum(c.elements for c in run), dtype=sent) for r, run in outgoing.items()}

    def pack_all() -> None:
        for reader, run in outgoing.items():
            pack(held, run, buffers[reader])

    ways: dict[str, Callable[[], Any]] = {
        "copy": lambda: same.copy_(source),
        FLAT: lambda: flat.copy_(source),
        "pack": pack_all,
    }
    for checksums in (False, True):
        staging = Staging(held, outgoing, sent, slice_bytes=8 << 20, block_bytes=1 << 20, checksums=checksums)
        ways[f"Staging.pack, {'with' if checksums else 'no'} checksums"] = partial(staging.pack, 1, 0, 1)
    return ways
