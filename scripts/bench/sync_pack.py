"""Packing in one process: a rank's shards into its readers' runs, compared with a plain copy of as many elements."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.rows import Row, in_turn
from bench.sync_plan import SMALL, shards
from titan_rl.actors.sync.staging import Staging
from titan_rl.kernels.pack_weights import pack
from titan_rl.wire.vllm_params import pieces
from titan_rl.wire.weight_plan import Run, Shard, plan

FLAT = "copy_ to the run's dtype"
WARM_UP = 2  # rounds


def packing(repeats: int) -> Iterator[Row]:
    threads = torch.get_num_threads()
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
    torch.set_num_threads(threads)


def random_params(held: Sequence[Shard]) -> dict[str, Tensor]:
    """Return float32 tensors of these shards' sizes, small enough that an engine can run on them."""
    return {s.name: torch.randn((s.rows, s.cols) if s.cols > 1 else (s.rows,)) / 64 for s in held}


def ways_to_pack(
    held: Mapping[str, Tensor], outgoing: Mapping[int, Run], source: Tensor, sent: torch.dtype
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
