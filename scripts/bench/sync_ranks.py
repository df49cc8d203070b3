"""The trainer ranks and readers between which weights move, one method for each half of each way to move them."""

import asyncio
import gc
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import xxhash
from monarch.actor import Actor, current_rank, endpoint
from monarch.rdma import RDMAAction, RDMABuffer
from torch import Tensor

from bench.ranks import TIMEOUT
from bench.sharded import shards
from bench.sync_plan import random_params
from titan_rl.actors.endpoint import quiet_rdma
from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.actors.sync.transport import How
from titan_rl.actors.vllm.vllm_params import param_shapes, pieces
from titan_rl.config.sections import WeightSyncSection
from titan_rl.ext.broadcast.rosters import Roster
from titan_rl.kernels.pack_weights import pack, window
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import Copy, Piece, RunOfCopies, Shard
from titan_rl.wire.weight_source import HostCopy, Offer, Source

READERS = "readers"  # their host's name in a roster
PLAIN = 64 << 20  # elements: a plain copy of more repeats over these, to save memory


def plain_pass(elements: int, held: torch.dtype) -> float:
    """Return CPU seconds to copy this many contiguous elements to bfloat16."""
    chunk = min(elements, PLAIN)
    source, target = torch.ones(chunk, dtype=held), torch.ones(chunk, dtype=torch.bfloat16)
    began = time.thread_time()
    for first in range(0, elements, chunk):
        last = min(chunk, elements - first)
        target[:last].copy_(source[:last])
    return time.thread_time() - began


class Rank(Actor):
    """What trainer ranks and readers have in common."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.rank = current_rank().rank

    @endpoint
    async def join(self, store: str, first: int, world: int, ranks: int) -> None:
        """Join a gloo group: trainer ranks first, then readers. `first` is the rank of this mesh's first process."""
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=first + self.rank, world_size=world)
        self.trainers = dist.new_group(list(range(ranks)))
        self.ranks = ranks

    @endpoint
    async def drop(self) -> None:
        """Free the buffers of one way."""
        if staging := getattr(self, "staging", None):
            await staging.drop()
        for buffer in getattr(self, "buffers", ()):
            await buffer.drop()
        if (memory := getattr(self, "memory", None)) is not None:
            os.close(memory)
        for name in ("staging", "buffers", "tensors", "reads", "landed", "mapped", "run", "memory"):
            vars(self).pop(name, None)
        self.landings = {}
        gc.collect()


class TrainerRank(Rank):
    @endpoint
    async def hold(self, copies: Mapping[int, RunOfCopies], shape: ModelShape, ranks: int) -> None:
        torch.manual_seed(self.rank)
        self.shape, self.copies = shape, copies
        self.shards = shards(shape, self.rank, fsdp=ranks)
        self.params = random_params(self.shards)

    @endpoint
    async def layout(self) -> list[Shard]:
        return self.shards

    @endpoint
    async def memcpy(self) -> float:
        """Return CPU seconds to cast contiguous elements, equal in number to those this rank packs."""
        return plain_pass(sum(c.elements for run in self.copies.values() for c in run), torch.float32)

    @endpoint
    async def negate(self, named: str) -> None:
        """Change the parameters whose names contain `named`."""
        for name, param in self.params.items():
            if named in name:
                param.neg_()

    # titan_rl: plan, pack, one run for each reader

    @endpoint
    async def stage(self, copies: Mapping[int, RunOfCopies], sync: WeightSyncSection, remote: bool) -> dict[int, Offer]:
        self.staging = Staging(
            self.params,
            copies,
            torch.bfloat16,
            block_bytes=sync.block_kb << 10,
            checksums=sync.verify != "off" or sync.delta,
        )
        with quiet_rdma():
            return self.staging.offer(remote=remote, how=sync.transport)

    @endpoint
    async def publish(
        self, version: int, slot: int, serial: int, roster: Roster | None = None
    ) -> tuple[dict[int, Manifest], float, float]:
        """Pack one slot and begin to broadcast it. Return its manifests, and the wall and CPU seconds."""
        began, began_cpu = time.perf_counter(), time.thread_time()
        manifests = self.staging.pack(version, slot, serial)
        if roster is not None:
            self.staging.announce(slot, serial, roster.of_trainer(self.rank), TIMEOUT)
        return manifests, time.perf_counter() - began, time.thread_time() - began_cpu

    # lower bound of shared memory: a mapped file without protocol and checksums

    @endpoint
    async def map(self) -> dict[int, tuple[str, int, int]]:
        """Return path, first byte and number of bytes of each reader's run."""
        sizes = {reader: sum(c.elements for c in run) for reader, run in self.copies.items()}
        nbytes = 2 * sum(sizes.values())
        self.memory = os.memfd_create("bench_weight_sync")
        os.ftruncate(self.memory, nbytes)
        whole = torch.frombuffer(mmap.mmap(self.memory, nbytes), dtype=torch.bfloat16)
        self.mapped = dict(zip(sizes, whole.split(list(sizes.values())), strict=True))
        path = f"/proc/{os.getpid()}/fd/{self.memory}"
        return {r: (path, 2 * int(part.storage_offset()), part.nbytes) for r, part in self.mapped.items()}

    @endpoint
    async def pack_mapped(self) -> float:
        began = time.thread_time()
        for reader, run in self.copies.items():
            pack(self.params, run, self.mapped[reader])
        return time.thread_time() - began

    # other ways

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
    async def hold(self, copies: Mapping[int, Sequence[Copy]], shape: ModelShape, tp: int) -> int:
        """Return the bytes of the parameters."""
        self.shape, self.copies = shape, copies
        self.pieces = pieces(shape, tp=tp, rank=self.rank % tp)
        sizes = param_shapes(shape, tp)
        self.params = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
        self.landings: dict[str, Landing] = {}
        return sum(p.nbytes for p in self.params.values())

    @endpoint
    async def zero(self) -> None:
        for p in self.params.values():
            p.zero_()

    @endpoint
    async def digest(self) -> str:
        """Return a checksum of the live parameters."""
        digest = xxhash.xxh3_64()
        for p in self.params.values():
            digest.update(p.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @endpoint
    async def memcpy(self) -> float:
        """Return CPU seconds to copy the size of this reader's parameters."""
        return plain_pass(sum(p.numel() for p in self.params.values()), torch.bfloat16)

    @endpoint
    async def connect(self, offered: dict[int, Offer], transport: How, verify: str) -> None:
        sync = replace(WeightSyncSection(), transport=transport, verify=verify)
        sources = [
            Source(t, offer, tuple(self.copies[t]), "bfloat16", sync.block_kb << 10) for t, offer in offered.items()
        ]
        self.landings[f"{transport} {verify}"] = Landing(self.params, sources, sync)

    @endpoint
    async def pull(self, manifests: dict[int, Manifest], way: str, roster: Roster | None) -> dict[str, float]:
        """Return wall seconds of the read and CPU seconds of the write, which verifies too if `way` verifies "live"."""
        began = time.perf_counter()
        note = roster and roster.of_reader(READERS, self.rank)
        read = await self.landings[way].fetch_weights(list(manifests.values()), TIMEOUT, note)
        if read.fell_back:
            raise RuntimeError(f"expected a broadcast, found one-sided reads: {read.fell_back}")
        pulled, began = time.perf_counter() - began - read.verify, time.thread_time()
        await self.landings[way].write_weights(TIMEOUT)
        return {"read, s": pulled, "write, CPU s": time.thread_time() - began, "verify the bytes, s": read.verify}

    @endpoint
    async def share(self, offered: dict[int, Offer], siblings: list[HostCopy], way: str) -> HostCopy | None:
        """Connect by remote reads, together with the siblings."""
        sync = replace(WeightSyncSection(), transport="rdma")
        block = sync.block_kb << 10
        sources = [Source(t, offer, tuple(self.copies[t]), "bfloat16", block) for t, offer in offered.items()]
        with quiet_rdma():
            self.landings[way] = Landing(self.params, sources, sync, f"reader {self.rank}", siblings)
        return self.landings[way].connection.copy

    @endpoint
    async def fetch(self, manifests: dict[int, Manifest], way: str) -> int:
        """Return the bytes that crossed the link."""
        return (await self.landings[way].fetch_weights(list(manifests.values()), TIMEOUT)).remote

    @endpoint
    async def write(self, way: str) -> None:
        await self.landings[way].write_weights(TIMEOUT)

    @endpoint
    async def prepare_bare(self, offered: dict[int, Offer]) -> None:
        buffers = [part for offer in offered.values() if offer.link for part in offer.link.slices[0]]
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
                target = window(self.params[c.param], c, c.dst_row0, c.dst_col0)
                target.copy_(part.view(target.shape))
        return time.thread_time() - began

    @endpoint
    async def prepare_tensors(self, offered: dict[int, dict[str, RDMABuffer]]) -> None:
        self.landed: dict[int, dict[str, Tensor]] = {}
        self.reads = RDMAAction()
        columns = {p.name: p.cols for p in pieces(self.shape, tp=1, rank=0)}
        for t, named in offered.items():
            self.landed[t] = {}
            for name in dict.fromkeys(c.name for c in self.copies[t]):
                flat = torch.empty(named[name].size() // 2, dtype=torch.bfloat16)
                self.reads.read_remote(flat.view(torch.uint8), named[name])
                self.landed[t][name] = flat.view(-1, columns[name])

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
                source = window(state[t][c.name], c, c.src_row0, c.src_col0)
                window(self.params[c.param], c, c.dst_row0, c.dst_col0).copy_(source)

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
                part = tensor[p.row0 : p.row0 + p.rows, p.col0 : p.col0 + p.cols]
                param = self.params[p.param]
                table = param if param.dim() == 2 else param[:, None]
                table[p.dst_row0 : p.dst_row0 + p.rows, p.dst_col0 : p.dst_col0 + p.cols] = part
