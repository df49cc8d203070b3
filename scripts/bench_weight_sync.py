#!/usr/bin/env python3
"""What a weight sync costs, part by part and beside what else could move the weights. Appends rows to a CSV.

    .venv/bin/python scripts/bench_weight_sync.py                    # all parts
    .venv/bin/python scripts/bench_weight_sync.py sync --quick       # 50 MB, about a minute
    .venv/bin/python scripts/bench_weight_sync.py sync --megabytes 1000 --layouts 2x2

plan   on paper: seconds to plan a 70B model from 512 trainer ranks to 64 generator ranks, and bytes on the wire
pack   one process: a rank's shards into its readers' runs, beside a plain copy of as many elements
sync   real processes: trainer ranks (FSDP, fp32) to readers (tensor parallelism, bf16), each way of moving in turn
load   the same to a vLLM engine that samples all the while: how long a sync stops it, and how much of the sync it hides

Parts that are one thread's work are in that thread's CPU seconds, so that a busy machine counts little: packing,
writing, and a plain copy of as many bytes just before each time, which they are compared with (`ratio`, shares: least
over least). What waits on other processes is in wall seconds, and comparable only within a run. The live parameters
must be equal whichever way they came. torchstore is another way, not measured: it is not installed here.
"""

import argparse
import asyncio
import csv
import gc
import json
import mmap
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import xxhash
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.config import configure
from monarch.rdma import RDMAAction, RDMABuffer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from titan_rl.actors.endpoint import quiet_rdma
from titan_rl.actors.sync.landing import Landing, Source
from titan_rl.actors.sync.staging import Staging
from titan_rl.actors.sync.transport import Offer, is_remote
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.config.sections import Config, GeneratorSection, WeightSyncSection
from titan_rl.environment import prepare_environment
from titan_rl.kernels.pack_weights import pack, window
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.record.provenance import git_commit, machine, versions
from titan_rl.train.weight_sync import WeightSync as WeightsInTransit
from titan_rl.wire.clock import Clock
from titan_rl.wire.errors import RunError
from titan_rl.wire.manifest import Manifest, Publication
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.types import Request, Sampling, SyncStats
from titan_rl.wire.vllm_params import param_shapes, pieces
from titan_rl.wire.weight_plan import Copy, Piece, Shard, WeightPlan, plan

CSV = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "weight_sync.csv"
TIMEOUT = 300.0
PLAIN = 64 << 20  # elements: plain copies go over so many again and again, for the memory's sake
LARGEST = 1000  # megabytes: ways that make several whole copies of the model are left out above
LARGEST_SERVED = 250  # megabytes: on two cores an engine step of a larger model takes longer than its sync
BARE_SHM, BARE_RDMA = "bare shared memory", "bare RDMABuffer reads"
OTHERS = ("gloo all-gather and broadcast", "RDMABuffer a tensor", "state dict in a message")

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


@dataclass
class Row:
    part: str
    case: str
    way: str
    measure: str
    values: list[float]
    ratio: float | None = None  # least over the least of a plain copy
    note: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["plan", "pack", "sync", "load", []], default=[])
    parser.add_argument("--quick", action="store_true", help="50 MB, two ranks to two readers, 8 layers on paper")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 250, 1000, 2000])
    parser.add_argument("--layouts", nargs="+", default=["1x1", "2x2", "4x1", "1x4", "4x4"], help="ranks x readers")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", type=Path, default=CSV)
    arguments = parser.parse_args()
    sizes, layouts = ([50], ["2x2"]) if arguments.quick else (arguments.megabytes, arguments.layouts)
    parts = arguments.parts or ["plan", "pack", "sync", "load"]
    if "plan" in parts:
        report(arguments.csv, planning(8 if arguments.quick else 80))
    if "pack" in parts:
        report(arguments.csv, packing(arguments.repeats))
    if "sync" in parts:
        configure(rdma_allow_tcp_fallback=True)
        for megabytes in sizes:
            for layout in layouts:
                ranks, readers = map(int, layout.split("x"))
                report(arguments.csv, asyncio.run(syncing(megabytes, ranks, readers, arguments.repeats)))
    if "load" in parts:
        prepare_environment()
        configure(rdma_allow_tcp_fallback=True)
        for megabytes in [size for size in sizes if size <= LARGEST_SERVED]:
            report(arguments.csv, asyncio.run(loading(megabytes, arguments.repeats)))


# ---------------------------------------------------------------------------------------------------------------- plan


def shards(shape: ModelShape, rank: int, *, fsdp: int, tp: int = 1) -> list[Shard]:
    """What FSDP2 leaves to a rank of what tensor parallelism leaves to its group; replicas repeat the ranks."""
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
    """torch.chunk's arithmetic."""
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
        yield Row(
            "plan", case, "plan", "planning, CPU s", [seconds], note=f"{len(runs)} runs, {sum(map(len, runs))} copies"
        )
        layout = sum(len(pickle.dumps(held)) for held in trainer)
        yield Row("plan", case, "plan", "layouts to the controller, MB", [layout / 1e6])
        yield Row("plan", case, "plan", "plan to 512 trainer ranks, MB", [once / 1e6])
        yield Row("plan", case, "plan", "plan to 64 generator ranks, MB", [once * (64 // readers) / 1e6])
        yield Row("plan", case, "plan", "most sent by a rank / least", [max(sent) / min(sent)])
        del trainer, wanted, made, runs
        gc.collect()


# ---------------------------------------------------------------------------------------------------------------- pack


def packing(repeats: int) -> Iterator[Row]:
    threads, flat = torch.get_num_threads(), "copy_ to the run's dtype"
    torch.set_num_threads(1)
    for family in ("llama3", "qwen3"):
        shape = replace(SMALL, family=family, vocab_size=32000, n_layers=8)
        for name, fsdp, tp, readers in (("FSDP 1", 1, 1, 1), ("FSDP 3", 3, 1, 2), ("FSDP 2 x TP 2", 2, 2, 2)):
            trainer = [shards(shape, rank, fsdp=fsdp, tp=tp) for rank in range(fsdp * tp)]
            made = plan(trainer, [pieces(shape, tp=readers, rank=rank) for rank in range(readers)])
            held = {s.name: torch.randn((s.rows, s.cols) if s.cols > 1 else (s.rows,)) for s in trainer[0]}
            source = torch.randn(made.sent(0))
            same, cast = torch.zeros_like(source), torch.zeros_like(source, dtype=torch.bfloat16)
            for sent in (torch.float32, torch.bfloat16):
                outgoing = made.outgoing(0)
                buffers = {r: torch.zeros(made.elements(0, r), dtype=sent) for r in outgoing}

                def pack_all(outgoing: Any = outgoing, buffers: Any = buffers, held: Any = held) -> None:
                    for reader, run in outgoing.items():
                        pack(held, run, buffers[reader])

                plain = same if sent == torch.float32 else cast
                ways: dict[str, Callable[[], Any]] = {
                    "copy": lambda same=same, source=source: same.copy_(source),
                    flat: lambda plain=plain, source=source: plain.copy_(source),
                    "pack": pack_all,
                }
                for checksums in (False, True):
                    staging = Staging(
                        held, outgoing, sent, slice_bytes=8 << 20, block_bytes=1 << 20, checksums=checksums
                    )
                    ways[f"Staging.pack, {'with' if checksums else 'no'} checksums"] = partial(staging.pack, 1, 0, 1)
                seconds: dict[str, list[float]] = {way: [] for way in ways}
                for _ in range(2 + repeats):
                    for way, run in ways.items():
                        began = time.process_time()
                        run()
                        seconds[way].append(time.process_time() - began)
                case = f"{family}, {name} to TP {readers}, float32 to {str(sent).removeprefix('torch.')}"
                least = {way: min(values[2:]) for way, values in seconds.items()}
                for way, values in seconds.items():
                    note = f"{source.nbytes / 1e6:.0f} MB read; over {flat}: {least[way] / least[flat]:.2f}"
                    yield Row("pack", case, way, "CPU s", values[2:], least[way] / least["copy"], note)
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------------------------- sync


def plain_pass(elements: int, held: torch.dtype) -> float:
    """Seconds to copy so many contiguous elements, to bfloat16."""
    chunk = min(elements, PLAIN)
    source, target = torch.ones(chunk, dtype=held), torch.ones(chunk, dtype=torch.bfloat16)
    began = time.thread_time()
    for first in range(0, elements, chunk):
        last = min(chunk, elements - first)
        target[:last].copy_(source[:last])
    return time.thread_time() - began


class Rank(Actor):
    """Half of every way of moving weights: what trainer ranks and readers have in common."""

    @endpoint
    async def join(self, store: str, rank: int, world: int, ranks: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        self.trainers = dist.new_group(list(range(ranks)))
        self.rank, self.ranks = rank, ranks

    @endpoint
    async def drop(self) -> None:
        """Let go of a way's buffers."""
        if staging := getattr(self, "staging", None):
            await staging.drop()
        for buffer in getattr(self, "buffers", ()):
            await buffer.drop()
        if (memory := getattr(self, "memory", None)) is not None:
            os.close(memory)
        for name in ("staging", "buffers", "tensors", "reads", "landed", "mapped", "run", "memory"):
            if hasattr(self, name):
                delattr(self, name)
        self.landings = {}
        gc.collect()


class TrainerRank(Rank):
    @endpoint
    async def hold(self, shape: ModelShape, ranks: int, copies: Mapping[int, Sequence[Copy]]) -> None:
        torch.manual_seed(self.rank)
        self.shape, self.copies = shape, copies
        self.shards = shards(shape, self.rank, fsdp=ranks)
        self.params = {s.name: torch.randn((s.rows, s.cols) if s.cols > 1 else (s.rows,)) for s in self.shards}

    @endpoint
    async def memcpy(self) -> float:
        """Seconds to cast as many contiguous elements as this rank packs."""
        return plain_pass(sum(c.elements for run in self.copies.values() for c in run), torch.float32)

    # ours: plan, pack, one run for each reader

    @endpoint
    async def stage(self, checksums: bool) -> dict[int, Offer]:
        runs, sync = {reader: tuple(copies) for reader, copies in self.copies.items()}, WeightSyncSection()
        self.staging = Staging(
            self.params,
            runs,
            torch.bfloat16,
            slice_bytes=sync.slice_mb << 20,
            block_bytes=sync.block_kb << 10,
            checksums=checksums,
        )
        return self.staging.offer(remote=True)

    @endpoint
    async def publish(self, serial: int) -> tuple[float, dict[int, Manifest]]:
        """Into slot 0, which nobody reads now: the other slot would cost memory here, and time nowhere."""
        began = time.thread_time()
        manifests = self.staging.pack(serial, 0, serial)
        return time.thread_time() - began, manifests

    # the floor of the way through shared memory: a mapped file, no protocol and no checksums

    @endpoint
    async def map(self) -> dict[int, tuple[str, int, int]]:
        """Path, first byte and bytes of each reader's run."""
        sizes = {reader: 2 * sum(c.elements for c in run) for reader, run in self.copies.items()}
        self.memory = os.memfd_create("bench_weight_sync")
        os.ftruncate(self.memory, sum(sizes.values()))
        memory = mmap.mmap(self.memory, sum(sizes.values()))
        bounds = dict(zip(sizes, torch.tensor([0, *sizes.values()]).cumsum(0).tolist(), strict=False))
        self.mapped = {
            r: torch.frombuffer(memory, dtype=torch.bfloat16, count=n // 2, offset=bounds[r]) for r, n in sizes.items()
        }
        path = f"/proc/{os.getpid()}/fd/{self.memory}"
        return {r: (path, bounds[r], n) for r, n in sizes.items()}

    @endpoint
    async def pack_mapped(self) -> float:
        began = time.thread_time()
        for reader, run in self.copies.items():
            pack(self.params, run, self.mapped[reader])
        return time.thread_time() - began

    # what others do

    @endpoint
    async def register_tensors(self) -> dict[str, RDMABuffer]:
        self.tensors = {name: torch.empty_like(p, dtype=torch.bfloat16) for name, p in self.params.items()}
        named = {name: RDMABuffer(w.view(-1)) for name, w in self.tensors.items() if w.numel()}
        self.buffers = list(named.values())
        return named

    @endpoint
    async def cast_tensors(self) -> float:
        began = time.thread_time()
        for name, p in self.params.items():
            self.tensors[name].copy_(p)
        return time.thread_time() - began

    @endpoint
    async def state_dict(self) -> dict[str, Tensor]:
        return {name: p.bfloat16() for name, p in self.params.items()}

    @endpoint
    async def gather_and_broadcast(self) -> None:
        await asyncio.to_thread(self._gather_and_broadcast)

    def _gather_and_broadcast(self) -> None:
        for p, mine in zip(pieces(self.shape, tp=1, rank=0), self.params.values(), strict=True):
            each = -(-p.rows // self.ranks)
            padded = torch.zeros(each * p.cols, dtype=torch.bfloat16)
            padded[: mine.numel()].copy_(mine.view(-1))
            whole = torch.empty(self.ranks * each * p.cols, dtype=torch.bfloat16)
            dist.all_gather_into_tensor(whole, padded, group=self.trainers)
            dist.broadcast(whole, 0)


class Reader(Rank):
    @endpoint
    async def hold(self, shape: ModelShape, tp: int, copies: Mapping[int, Sequence[Copy]]) -> None:
        self.shape, self.copies = shape, copies
        self.pieces = pieces(shape, tp=tp, rank=self.rank - self.ranks)
        sizes = param_shapes(shape, tp)
        self.params = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
        self.landings: dict[str, Landing] = {}

    @endpoint
    async def forget(self) -> None:
        for p in self.params.values():
            p.zero_()

    @endpoint
    async def digest(self) -> str:
        """Of what the live parameters hold."""
        digest = xxhash.xxh3_64()
        for p in self.params.values():
            digest.update(p.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @endpoint
    async def memcpy(self) -> float:
        """Seconds to copy as many bytes as this reader's parameters have."""
        return plain_pass(sum(p.numel() for p in self.params.values()), torch.bfloat16)

    @endpoint
    async def nbytes(self) -> int:
        return sum(p.nbytes for p in self.params.values())

    @endpoint
    async def connect(self, offered: dict[int, Offer], transport: Literal["shm", "rdma"], verify: str) -> None:
        sync = replace(WeightSyncSection(), transport=transport, verify=verify)
        sources = [
            Source(t, offer, tuple(self.copies[t]), "bfloat16", sync.block_kb << 10) for t, offer in offered.items()
        ]
        self.landings[f"{transport} {verify}"] = Landing(self.params, sources, sync)

    @endpoint
    async def pull(self, way: str, manifests: dict[int, Manifest]) -> dict[str, float]:
        """Seconds of the read, and of this thread's work: the write, with its verification if that is "live"."""
        began = time.perf_counter()
        read = await self.landings[way].fetch_weights(list(manifests.values()), TIMEOUT)
        pulled, began = time.perf_counter() - began - read.verify, time.thread_time()
        await self.landings[way].write_weights(TIMEOUT)
        return {"read, s": pulled, "write, CPU s": time.thread_time() - began, "verify what was read, s": read.verify}

    @endpoint
    async def prepare_bare(self, offered: dict[int, Offer]) -> None:
        buffers = [part for offer in offered.values() if offer.registered for part in offer.registered.slices[0]]
        self.run, self.reads = torch.empty(sum(b.size() for b in buffers), dtype=torch.uint8), RDMAAction()
        for part, buffer in zip(self.run.split([b.size() for b in buffers]), buffers, strict=True):
            self.reads.read_remote(part, buffer)

    @endpoint
    async def read_bare(self) -> None:
        await self.reads.submit(timeout=int(TIMEOUT))

    @endpoint
    async def map(self, offered: dict[int, tuple[str, int, int]]) -> None:
        self.mapped = {}
        for t, (path, start, size) in offered.items():
            with open(path, "r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
            self.mapped[t] = torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2, offset=start)

    @endpoint
    async def write_mapped(self) -> float:
        began = time.thread_time()
        for t, run in self.mapped.items():
            parts = run.split([c.elements for c in self.copies[t]])
            for part, c in zip(parts, self.copies[t], strict=True):
                target = window(self.params[c.param], c, c.dst_row0, c.dst_col0, 1)
                target.copy_(part.view(target.shape))
        return time.thread_time() - began

    @endpoint
    async def prepare_tensors(self, offered: dict[int, dict[str, RDMABuffer]]) -> None:
        self.landed: dict[int, dict[str, Tensor]] = {}
        self.reads = RDMAAction()
        for t, named in offered.items():
            wanted = {c.name for c in self.copies[t]}
            self.landed[t] = {}
            for name, buffer in named.items():
                if name in wanted:
                    flat = torch.empty(buffer.size() // 2, dtype=torch.bfloat16)
                    self.reads.read_remote(flat.view(torch.uint8), buffer)
                    cols = self._cols[name]
                    self.landed[t][name] = flat.view(-1, cols) if cols > 1 else flat

    @property
    def _cols(self) -> dict[str, int]:
        return {p.name: p.cols for p in pieces(self.shape, tp=1, rank=0)}

    @endpoint
    async def read_tensors(self) -> None:
        await self.reads.submit(timeout=int(TIMEOUT))
        self._write(self.landed)

    @endpoint
    async def receive(self, state: dict[int, dict[str, Tensor]]) -> None:
        self._write(state)

    def _write(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        for t, copies in self.copies.items():
            for c in copies:
                source = window(state[t][c.name], c, c.src_row0, c.src_col0, c.src_step)
                window(self.params[c.param], c, c.dst_row0, c.dst_col0, 1).copy_(source)

    @endpoint
    async def take_broadcast(self) -> None:
        await asyncio.to_thread(self._take_broadcast)

    def _take_broadcast(self) -> None:
        wanted: dict[str, list[Piece]] = {}
        for p in self.pieces:
            wanted.setdefault(p.name, []).append(p)
        for whole in pieces(self.shape, tp=1, rank=0):
            padded = torch.empty(self.ranks * -(-whole.rows // self.ranks) * whole.cols, dtype=torch.bfloat16)
            dist.broadcast(padded, 0)
            tensor = padded[: whole.rows * whole.cols].view(whole.rows, whole.cols)
            for p in wanted.get(whole.name, ()):
                part = hf_rows(tensor, whole.name, self.shape)[p.row0 : p.row0 + p.rows, p.col0 : p.col0 + p.cols]
                param = self.params[p.param]
                table = param if param.dim() == 2 else param[:, None]
                table[p.dst_row0 : p.dst_row0 + p.rows, p.dst_col0 : p.dst_col0 + p.cols] = part


def hf_rows(tensor: Tensor, name: str, shape: ModelShape) -> Tensor:
    if shape.family == "llama3" and any(part in name for part in ("q_proj", "k_proj")):
        return tensor.view(-1, shape.head_dim // 2, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return tensor


@dataclass
class Meshes:
    made: WeightPlan
    trainers: Any
    readers: Any
    serial: int = 0  # of the last publication

    async def each(self, mesh: str, verb: str, arguments: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        """A verb on every rank at once, each with its own arguments."""
        actors = self.trainers if mesh == "trainer" else self.readers
        count = self.made.ranks if mesh == "trainer" else self.made.readers
        calls = [
            getattr(actors.slice(**{mesh: i}), verb).call_one(*(arguments[i] if arguments else ())).as_asyncio()
            for i in range(count)
        ]
        return list(await asyncio.wait_for(asyncio.gather(*calls), TIMEOUT))

    def to_readers(self, offered: Sequence[Mapping[int, Any]]) -> list[tuple[dict[int, Any]]]:
        """What each trainer rank has for each reader, turned about."""
        return [({t: offered[t][r] for t in self.made.incoming(r)},) for r in range(self.made.readers)]

    # each way: prepare, then move() as often as it is timed; move() returns seconds of its parts

    async def prepare_ours(self, verify: Sequence[str], bare: bool) -> None:
        staged = await self.each("trainer", "stage", [(list(verify) != ["off"],)] * self.made.ranks)
        offered = self.to_readers(staged)
        for transport in ("shm", "rdma"):
            for how in verify:
                await self.each("reader", "connect", [(offer, transport, how) for (offer,) in offered])
        if bare:
            await self.each("reader", "prepare_bare", offered)

    async def ours(self, way: str) -> dict[str, float]:
        self.serial += 1
        published = await self.each("trainer", "publish", [(self.serial,)] * self.made.ranks)
        manifests = self.to_readers([runs for _, runs in published])
        pulled = await self.each("reader", "pull", [(way, runs) for (runs,) in manifests])
        parts = {"publish, CPU s": max(seconds for seconds, _ in published)}
        return parts | {part: max(parts[part] for parts in pulled) for part in pulled[0]}

    async def bare(self) -> dict[str, float]:
        await self.each("reader", "read_bare")
        return {}

    async def prepare_shm(self) -> None:
        await self.each("reader", "map", self.to_readers(await self.each("trainer", "map")))

    async def shm(self) -> dict[str, float]:
        publish = max(await self.each("trainer", "pack_mapped"))
        return {"publish, CPU s": publish, "write, CPU s": max(await self.each("reader", "write_mapped"))}

    async def prepare_tensors(self) -> None:
        offered = dict(enumerate(await self.each("trainer", "register_tensors")))
        await self.each(
            "reader",
            "prepare_tensors",
            [({t: offered[t] for t in self.made.incoming(r)},) for r in range(self.made.readers)],
        )

    async def tensors(self) -> dict[str, float]:
        publish = max(await self.each("trainer", "cast_tensors"))
        await self.each("reader", "read_tensors")
        return {"publish, CPU s": publish}

    async def prepare_nothing(self) -> None:
        pass

    async def message(self) -> dict[str, float]:
        state = dict(enumerate(await self.each("trainer", "state_dict")))
        await self.each("reader", "receive", [(state,)] * self.made.readers)
        return {}

    async def gloo(self) -> dict[str, float]:
        await asyncio.gather(self.each("trainer", "gather_and_broadcast"), self.each("reader", "take_broadcast"))
        return {}


async def syncing(megabytes: int, ranks: int, readers: int, repeats: int) -> list[Row]:
    shape = shape_of(megabytes)
    trainer = [shards(shape, rank, fsdp=ranks) for rank in range(ranks)]
    made = plan(trainer, [pieces(shape, tp=readers, rank=rank) for rank in range(readers)])
    environment = {"OMP_NUM_THREADS": "1"}
    os.environ.update(environment)
    procs = [
        this_host().spawn_procs(per_host={"trainer": ranks}, name="trainer"),
        this_host().spawn_procs(per_host={"reader": readers}, name="reader"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            meshes = Meshes(made, procs[0].spawn("rank", TrainerRank), procs[1].spawn("rank", Reader))
            world, store = ranks + readers, str(Path(folder) / "store")
            await asyncio.gather(
                meshes.each("trainer", "join", [(store, t, world, ranks) for t in range(ranks)]),
                meshes.each("reader", "join", [(store, ranks + r, world, ranks) for r in range(readers)]),
            )
            await meshes.each("trainer", "hold", [(shape, ranks, made.outgoing(t)) for t in range(ranks)])
            await meshes.each("reader", "hold", [(shape, readers, made.incoming(r)) for r in range(readers)])
            return await measured(meshes, megabytes, f"{megabytes} MB, {ranks} ranks to {readers} readers", repeats)
        finally:
            for proc in procs:
                await asyncio.wait_for(proc.stop().as_asyncio(), 60)


def shape_of(megabytes: int) -> ModelShape:
    """So many in bfloat16, about."""
    layer = replace(SMALL, n_layers=2).parameters - SMALL.parameters
    return replace(SMALL, n_layers=max(1, round((megabytes * 5e5 - SMALL.vocab_size * 2048) / layer)))


async def measured(meshes: Meshes, megabytes: int, case: str, repeats: int) -> list[Row]:
    def ours(*verify: str) -> dict[str, Callable[[], Any]]:
        return {
            f"titan_rl, {how}, verify {v}": partial(meshes.ours, f"{how} {v}")
            for v in verify
            for how in ("shm", "rdma")
        }

    # What is prepared together is timed in turn; all at once would need ten times the model's memory.
    groups: list[tuple[Callable[[], Any], dict[str, Callable[[], Any]]]] = [
        (partial(meshes.prepare_ours, ["off"], True), ours("off") | {BARE_RDMA: meshes.bare}),
        (partial(meshes.prepare_ours, ["transfer", "live"], False), ours("transfer", "live")),
        (meshes.prepare_shm, {BARE_SHM: meshes.shm}),
        (meshes.prepare_tensors, {"RDMABuffer a tensor": meshes.tensors}),
        (meshes.prepare_nothing, {"gloo all-gather and broadcast": meshes.gloo}),
    ]
    if megabytes <= LARGEST:
        groups.append((meshes.prepare_nothing, {"state dict in a message": meshes.message}))
    held = await meshes.each("reader", "nbytes")
    rows: list[Row] = []
    digests: dict[str, list[str]] = {}
    copied: list[float] = []
    cast: list[float] = []
    seconds: dict[str, list[float]] = {}
    for prepare, ways in groups:
        await prepare()
        seconds |= {way: [] for way in ways}
        parts: dict[tuple[str, str], list[float]] = {}
        for i in range(1 + repeats):  # the first touches pages and opens connections
            for way, move in ways.items():
                await meshes.each("reader", "forget")
                cast.append(max(await meshes.each("trainer", "memcpy")))
                copied.append(max(await meshes.each("reader", "memcpy")))
                began = time.perf_counter()
                inside = await move()
                took = time.perf_counter() - began
                if i:
                    seconds[way].append(took)
                    for part, value in inside.items():
                        parts.setdefault((way, part), []).append(value)
                elif way != BARE_RDMA:
                    digests[way] = await meshes.each("reader", "digest")
        await asyncio.gather(meshes.each("trainer", "drop"), meshes.each("reader", "drop"))
        rows += [Row("sync", case, way, f"slowest rank: {part}", v) for (way, part), v in parts.items()]
    if len({tuple(digest) for digest in digests.values()}) != 1:
        raise RuntimeError(f"expected equal live parameters whichever way they came, found {digests}")

    least = {way: min(values) for way, values in seconds.items()}
    best = min(least.keys() & set(OTHERS), key=least.__getitem__)
    plain = "plain passes"
    rows.append(Row("sync", case, plain, "slowest rank: copy of as many bytes, CPU s", copied))
    rows.append(Row("sync", case, plain, "slowest rank: cast of what is packed, CPU s", cast))
    for way, values in seconds.items():
        rate = sum(held) / least[way] / 1e9
        rows.append(Row("sync", case, way, "all, s", values, note=f"{rate:.2f} GB/s at best"))
        if way.startswith("titan_rl") or way == BARE_SHM:
            work = sum(min(row.values) for row in rows if row.way == way and row.measure.endswith(", CPU s"))
            for measure, floor in (
                ("publish and write: share of the memcpy rate", min(copied)),
                ("publish and write: share of the rate of both plain passes", min(copied) + min(cast)),
            ):
                rows.append(Row("sync", case, way, measure, [floor / work]))
            rows.append(
                Row("sync", case, way, "times faster than the best other", [least[best] / least[way]], note=best)
            )
    rows += [
        replace(row, measure=f"rate of the read / {BARE_RDMA}", values=[least[BARE_RDMA] / min(row.values)])
        for row in rows
        if row.way == "titan_rl, rdma, verify off" and row.measure.endswith(": read, s")
    ]
    read = [2 * meshes.made.received(r) / n for r, n in enumerate(held)]
    rows.append(Row("sync", case, "titan_rl", "bytes read / bytes of the parameters", read))
    return sorted(rows, key=lambda row: row.way)


# ---------------------------------------------------------------------------------------------------------------- load

WAYS = {
    f"{transport}, verify {verify}{', delta' if delta else ''}": WeightSyncSection(
        transport=transport, verify=verify, delta=delta
    )
    for delta in (False, True)
    for verify in ("live", "transfer")
    for transport in ("shm", "rdma")
}
CHANGED = "layers.0.self_attn"  # where only what changed is brought over
SAMPLES = 8  # that the engine advances in each step


class PackingTrainer(Actor):
    """One of the FSDP ranks that a sync's weights come from, which does nothing but pack them."""

    def __init__(self, shape: ModelShape, ranks: int) -> None:
        torch.set_num_threads(1)
        self.shards = shards(shape, current_rank().rank, fsdp=ranks)
        self.params = {s.name: torch.randn((s.rows, s.cols) if s.cols > 1 else (s.rows,)) / 64 for s in self.shards}

    @endpoint
    async def layout(self) -> list[Shard]:
        return self.shards

    @endpoint
    async def stage(
        self, copies: Mapping[int, tuple[Copy, ...]], places: Sequence[str], sync: WeightSyncSection
    ) -> dict[int, Offer]:
        self.staging = Staging(
            self.params,
            copies,
            torch.bfloat16,
            slice_bytes=sync.slice_mb << 20,
            block_bytes=sync.block_kb << 10,
            checksums=sync.verify != "off" or sync.delta,
        )
        with quiet_rdma():
            return self.staging.offer(remote=any(is_remote(place, sync.transport) for place in places))

    @endpoint
    async def change(self, named: str) -> None:
        """Parameters with this in their names."""
        for name, param in self.params.items():
            if named in name:
                param.neg_()

    @endpoint
    async def publish(self, version: int, slot: int, serial: int) -> tuple[dict[int, Manifest], float]:
        began = time.perf_counter()
        manifests = self.staging.pack(version, slot, serial)
        return manifests, time.perf_counter() - began

    @endpoint
    async def drop(self) -> None:
        await self.staging.drop()


class PackingTrainers:
    """As much of a trainer mesh as a weight sync sees."""

    def __init__(self, procs: Any, shape: ModelShape, ranks: int) -> None:
        actors = procs.spawn("trainer", PackingTrainer, shape, ranks)
        self._ranks = [actors.slice(trainer=rank) for rank in range(ranks)]

    async def each(self, verb: str, *arguments: Any, own: Sequence[Any] | None = None) -> list[Any]:
        """A verb on every rank at once, each with its own first argument where there is one."""
        firsts = [() for _ in self._ranks] if own is None else [(value,) for value in own]
        pairs = zip(self._ranks, firsts, strict=True)
        calls = [getattr(rank, verb).call_one(*first, *arguments).as_asyncio() for rank, first in pairs]
        return list(await asyncio.wait_for(asyncio.gather(*calls), TIMEOUT))

    async def shards(self) -> list[list[Shard]]:
        return await self.each("layout")

    async def stage(
        self, copies: Sequence[Mapping[int, tuple[Copy, ...]]], places: Sequence[str], sync: WeightSyncSection
    ) -> list[dict[int, Offer]]:
        return await self.each("stage", places, sync, own=copies)

    async def publish(self, version: int, slot: int, serial: int, again: bool = False) -> Publication:
        packed = await self.each("publish", version, slot, serial)
        return Publication(version, slot, [manifests for manifests, _ in packed], max(took for _, took in packed))


async def loading(megabytes: int, repeats: int) -> list[Row]:
    shape, ranks = shape_of(megabytes), 2
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
        settings = EngineSettings(
            model_dir=folder, max_model_len=512, dtype="bfloat16", max_num_seqs=SAMPLES, kv_cache_memory_mb=256
        )
        os.environ["OMP_NUM_THREADS"] = "1"
        procs = this_host().spawn_procs(per_host={"trainer": ranks}, name="trainer")
        generators = await GeneratorMesh.spawn(this_host(), settings, replicas=1, env=vllm_cpu.ENV)
        try:
            await generators.start()
            trainers = PackingTrainers(procs, shape, ranks)
            case = f"{megabytes} MB, {ranks} ranks to an engine that samples"
            return [row async for row in loaded(trainers, generators, shape, case, repeats)]
        finally:
            await asyncio.gather(generators.close(), return_exceptions=True)
            await asyncio.gather(
                generators.stop(), asyncio.wait_for(procs.stop().as_asyncio(), 60), return_exceptions=True
            )


async def loaded(
    trainers: PackingTrainers, generators: GeneratorMesh, shape: ModelShape, case: str, repeats: int
) -> AsyncIterator[Row]:
    version, load = 0, list[asyncio.Task[None]]()
    for way, sync in WAYS.items():
        mesh: Any = trainers
        weights = WeightsInTransit(mesh, generators, Clock())
        await weights.connect(Config(generator=GeneratorSection(dtype="bfloat16"), weight_sync=sync), shape)
        await weights.sync(version := version + 1)
        load = load or [asyncio.create_task(sampling(generators, i)) for i in range(SAMPLES)]
        stats: list[SyncStats] = []
        beside, alone = [], []  # seconds, and the tokens sampled in them
        for i in range(1 + repeats):
            await trainers.each("change", CHANGED if sync.delta else "")
            marks = [await mark(generators)]
            synced = await weights.sync(version := version + 1)
            marks.append(await mark(generators))  # once the keys and values of what is open are computed anew
            await asyncio.sleep(0.5)
            marks.append(await mark(generators))
            if i:  # the first touches the second slot's pages
                stats.append(synced)
                for spans, ((then, before), (now, after)) in zip((beside, alone), pairwise(marks), strict=True):
                    spans.append((now - then, after - before))
        await trainers.each("drop")
        for row in served(case, way, stats, beside, statistics.median(tokens / took for took, tokens in alone)):
            yield row


def served(
    case: str, way: str, stats: Sequence[SyncStats], beside: Sequence[tuple[float, int]], alone: float
) -> Iterator[Row]:
    """`alone` is the engine's tokens a second without a sync. What a sync costs beyond its pause is above all the step
    that computes the keys and values of unfinished samples anew."""
    for part in ("seconds", "publish", "read", "pause"):
        yield Row("load", case, way, f"{part}, s", [getattr(s, part) for s in stats])
    work = [1 - s.pause / (s.publish + s.read + s.pause) for s in stats]
    yield Row("load", case, way, "hidden: share of publish, read and pause", work)
    yield Row("load", case, way, "hidden: share of the sync's wall time", [1 - s.pause / s.seconds for s in stats])
    yield Row("load", case, way, "pause / an engine step", [s.pause * alone / SAMPLES for s in stats])
    lost, note = [took - tokens / alone for took, tokens in beside], f"{alone:.0f} tokens/s without"
    yield Row("load", case, way, "sampling lost, s", lost, note=note)
    yield Row("load", case, way, "pause / sampling lost", [s.pause / most for s, most in zip(stats, lost, strict=True)])
    if changed := [s.changed for s in stats if s.changed is not None]:
        yield Row("load", case, way, "changed: share of the blocks", changed)


async def mark(generators: GeneratorMesh) -> tuple[float, int]:
    """Now, and the tokens sampled so far."""
    (stats,) = await generators.stats()
    return time.perf_counter(), stats.tokens


async def sampling(generators: GeneratorMesh, seed: int) -> None:
    """One sample after the other, until the engine is closed."""
    with suppress(RunError):
        for i in count():
            await generators.generate(Request(f"{seed}.{i}", [1, 5, 6, 7], [seed], Sampling(400)))


# -------------------------------------------------------------------------------------------------------------- report


def report(path: Path, rows: Iterator[Row] | list[Row]) -> None:
    """A table, and one CSV row a measure: median, least and most over the repeats, and what it ran on."""
    engines, host = versions(), machine()
    common = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit()[:12],
        "machine": f"{host['cores']} x {host['cpu']}",
        "engines": f"torch {engines['torch']}, torchmonarch {engines['torchmonarch']}",
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new, table, title = not path.exists(), None, ""
    console = Console(width=None if sys.stdout.isatty() else 160)
    with path.open("a", newline="") as file:
        names = ["part", "case", "way", "measure", "median", "min", "max", "runs", "ratio", "note"]
        writer = csv.DictWriter(file, [*names, *common])
        if new:
            writer.writeheader()
        for row in rows:
            middle, least, most = statistics.median(row.values), min(row.values), max(row.values)
            ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
            values = (
                row.way,
                row.measure,
                f"{middle:.4g}",
                f"{least:.4g}",
                f"{most:.4g}",
                str(len(row.values)),
                ratio,
                row.note,
            )
            writer.writerow(dict(zip(names, (row.part, row.case, *values), strict=True)) | common)
            if table is None or title != row.case:
                if table is not None:
                    console.print(table)
                table, title = Table(title=row.case, title_justify="left"), row.case
                for name in names[2:]:
                    table.add_column(name, justify="left" if name in ("way", "measure", "note") else "right")
            table.add_row(*values)
    if table is not None:
        console.print(table)


if __name__ == "__main__":
    main()
