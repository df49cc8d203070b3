"""Trainer to generator: real FSDP2 and tensor-parallel shards, real packing, real Monarch RDMA buffers."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")  # before monarch is imported

import pytest
import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint, this_host
from monarch.config import configure
from monarch.spmd import setup_torch_elastic_env_async
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging, shards_of
from titan_rl.actors.sync.transport import How, here, octets
from titan_rl.config.sections import WeightSyncSection
from titan_rl.kernels.pack_weights import reference_pack, window
from titan_rl.wire.manifest import Manifest, blocks, checksum, layout
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.vllm_params import param_shapes, pieces, verify_complete
from titan_rl.wire.weight_plan import Copy, Shard, plan
from titan_rl.wire.weight_source import Offer, Source

# Rows that neither tensor parallelism nor FSDP divides evenly: 13 vocabulary rows, vectors of 7.
SHAPE = ModelShape(
    family="llama3",
    vocab_size=13,
    dim=7,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    head_dim=6,
    hidden_dim=10,
    max_seq_len=8,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
)
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
BY_COLS = ("o_proj", "down_proj")
READERS = [pieces(SHAPE, tp=2, rank=rank) for rank in range(2)]


def hf_tensors() -> dict[str, Tensor]:
    """Every tensor as Hugging Face stores it, no two elements equal, not even in bfloat16's 8 bits per tensor."""
    generator = torch.Generator().manual_seed(0)
    sizes: dict[str, tuple[int, ...]] = {}
    for piece in pieces(SHAPE, tp=1, rank=0):
        sizes[piece.name] = (piece.rows,) if piece.cols == 1 else (piece.rows, piece.cols)
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def rotary(name: str) -> bool:
    return name.endswith(("q_proj.weight", "k_proj.weight"))


def titan_tensors() -> dict[str, Tensor]:
    def interleave(w: Tensor) -> Tensor:
        return w.view(-1, 2, SHAPE.head_dim // 2, SHAPE.dim).transpose(1, 2).reshape(w.shape)

    return {name: interleave(w) if rotary(name) else w for name, w in hf_tensors().items()}


def generator_parameters(reader: int, dtype: torch.dtype, scale: float = 1.0) -> dict[str, Tensor]:
    """Return what a reader must hold after a sync of the weights times `scale`."""
    params = {name: torch.zeros(size, dtype=dtype) for name, size in param_shapes(SHAPE, 2).items()}
    tensors = hf_tensors()
    for p in READERS[reader]:
        whole = (tensors[p.name] * scale).to(dtype)
        if whole.dim() == 1:
            params[p.param][p.dst_row0 : p.dst_row0 + p.rows] = whole[p.row0 : p.row0 + p.rows]
        else:
            part = whole[p.row0 : p.row0 + p.rows, p.col0 : p.col0 + p.cols]
            params[p.param][p.dst_row0 : p.dst_row0 + p.rows, p.dst_col0 : p.dst_col0 + p.cols] = part
    return params


class Weights(nn.Module):
    """The parameters as TorchTitan shards them: tensor parallelism first, then FSDP2 or HSDP."""

    def __init__(self, replicate: int, fsdp: int, tp: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (replicate, fsdp, tp), mesh_dim_names=("replicate", "fsdp", "tp"))
        for name, w in titan_tensors().items():
            if tp > 1:
                rows, cols = any(part in name for part in BY_ROWS), any(part in name for part in BY_COLS)
                placement = ShardPlacement(0) if rows else ShardPlacement(1) if cols else Replicate()
                w = distribute_tensor(w, mesh["tp"], [placement], src_data_rank=None)
            self.register_parameter(name.replace(".", "/"), nn.Parameter(w))
        fully_shard(self, mesh=mesh["replicate", "fsdp"] if replicate > 1 else mesh["fsdp"])
        self.hf_names = {name: name.replace("/", ".") for name, _ in self.named_parameters()}
        self.rope = {name: SHAPE.head_dim for name, hf in self.hf_names.items() if rotary(hf)}

    def shards(self) -> list[Shard]:
        return shards_of(self.named_parameters(), self.hf_names, self.rope)

    def by_hf_name(self) -> dict[str, nn.Parameter]:
        return {self.hf_names[name]: param for name, param in self.named_parameters()}


def as_each_rank(replicate: int, fsdp: int, tp: int) -> Iterator[Weights]:
    """Build the model as each rank of a mesh in turn would, without the other ranks: sharding moves no data."""
    for rank in range(replicate * fsdp * tp):
        dist.init_process_group("fake", rank=rank, world_size=replicate * fsdp * tp, store=FakeStore())
        try:
            yield Weights(replicate, fsdp, tp)
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it remembers the last rank's mesh


@pytest.mark.parametrize(
    "mesh", [(1, 1, 1), (1, 2, 1), (1, 5, 1), (1, 1, 2), (1, 2, 2), (1, 3, 2), (2, 2, 1), (2, 1, 2), (2, 3, 2)]
)
def test_every_layout_is_described_exactly_and_packs_into_the_generators_parameters(mesh: tuple[int, int, int]) -> None:
    whole, layouts, held = titan_tensors(), [], []
    for weights in as_each_rank(*mesh):
        layouts.append(weights.shards())
        held.append({})
        for shard, param in zip(layouts[-1], weights.parameters(), strict=True):
            local = param.to_local().detach().clone() if isinstance(param, DTensor) else param.detach()
            table = whole[shard.name].view(len(whole[shard.name]), -1)
            claimed = table[shard.row0 : shard.row0 + shard.rows, shard.col0 : shard.col0 + shard.cols]
            assert torch.equal(local.view(len(local), shard.cols), claimed), shard
            held[-1][shard.name] = local
    made = plan(layouts, READERS)

    live = [{name: torch.zeros(size) for name, size in param_shapes(SHAPE, 2).items()} for _ in READERS]
    for rank, shards in enumerate(held):
        runs = {reader: made.copies[rank, reader] for reader in range(2)}  # some are empty
        staging = Staging(shards, runs, torch.float32, slice_bytes=64, block_bytes=48)
        manifests = staging.pack(version=5, slot=1, serial=1)
        assert sum(run.nbytes for run in staging.runs[1].values()) == 4 * made.sent(rank)
        for reader, copies in runs.items():
            assert manifests[reader].checksums == tuple(
                checksum(octets(staging.runs[1][reader], block)) for block in blocks(copies, 12)
            )
            for part, c in zip(staging.runs[1][reader].split([c.elements for c in copies]), copies, strict=True):
                window(live[reader][c.param], c, c.dst_row0, c.dst_col0, step=1).copy_(
                    part.view(c.blocks, c.rows, c.cols)
                )
    for reader in range(2):
        torch.testing.assert_close(live[reader], generator_parameters(reader, torch.float32), rtol=0, atol=0)


class TrainerRank(Actor):
    @endpoint
    async def start(self, mesh: tuple[int, int, int]) -> list[Shard]:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.weights = Weights(*mesh)
        for shard, param in zip(self.weights.shards(), self.weights.parameters(), strict=True):
            assert isinstance(param, DTensor)
            whole, local = param.full_tensor(), param.to_local()
            table = whole.view(len(whole), -1)[shard.row0 : shard.row0 + shard.rows]
            assert torch.equal(local.view(len(local), -1), table[:, shard.col0 : shard.col0 + shard.cols]), shard
        return self.weights.shards()

    @endpoint
    async def stage(self, copies: Mapping[int, tuple[Copy, ...]]) -> dict[int, Offer]:
        self.staging = Staging(self.weights.by_hf_name(), copies, torch.bfloat16, slice_bytes=100, block_bytes=64)
        return self.staging.offer(remote=True)

    @endpoint
    async def publish(self, slot: int, serial: int) -> dict[int, Manifest]:
        return self.staging.pack(7, slot, serial)

    @endpoint
    async def scale(self, factor: float) -> None:
        with torch.no_grad():
            for param in self.weights.parameters():
                param.mul_(factor)

    @endpoint
    async def drop(self) -> None:
        await self.staging.drop()


class GeneratorRank(Actor):
    """Both readers in one process, which makes no difference to them."""

    @endpoint
    async def connect(self, sources: list[list[Source]], how: How) -> list[str]:
        sizes = param_shapes(SHAPE, 2)
        self.params = [{name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()} for _ in READERS]
        verify_complete(sizes, SHAPE, 2)
        sync = WeightSyncSection(transport=how)
        self.landings = [Landing(p, offered, sync) for p, offered in zip(self.params, sources, strict=True)]
        return [name for landing in self.landings for name in landing.transports]

    @endpoint
    async def pull(self, manifests: list[list[Manifest]], timeout: float) -> tuple[int, list[dict[str, Tensor]]]:
        self.manifests = manifests
        landings = list(zip(self.landings, manifests, strict=True))
        read = await asyncio.gather(*(landing.fetch_weights(announced, timeout) for landing, announced in landings))
        for landing in self.landings:
            await landing.write_weights(timeout)
        return sum(each.bytes for each in read), self.params

    @endpoint
    async def write_after_a_failed_read(self) -> None:
        with pytest.raises(Exception, match=r"."):
            await self.landings[0].fetch_weights(self.manifests[0], 2)
        with pytest.raises(RuntimeError, match="expected a completed fetch_weights"):
            await self.landings[0].write_weights(2)


def test_two_versions_arrive_bit_for_bit_by_either_transport() -> None:
    configure(rdma_allow_tcp_fallback=True)
    asyncio.run(asyncio.wait_for(sync_twice(), 110))


async def sync_twice() -> None:
    trainer_procs = this_host().spawn_procs(per_host={"trainer": 2}, name="trainer")
    generator_procs = this_host().spawn_procs(per_host={"generator": 1}, name="generator")
    try:
        await setup_torch_elastic_env_async(trainer_procs)
        trainers, generator = trainer_procs.spawn("rank", TrainerRank), generator_procs.spawn("rank", GeneratorRank)
        for mesh in [(1, 2, 1), (1, 1, 2)]:
            layouts = list((await done(trainers.start.call(mesh), 60)).values())
            made = plan(layouts, READERS)
            sources: list[list[Source]] = [[] for _ in READERS]
            for rank in range(2):
                staged = await done(trainers.slice(trainer=rank).stage.call_one(made.outgoing(rank)))
                slices = [s for offer in staged.values() if offer.registered for s in offer.registered.slices[0]]
                assert len(slices) > len(staged), "runs of several slices"
                assert all(slice.size() <= 100 for slice in slices)
                for reader, offer in staged.items():
                    sources[reader].append(Source(rank, offer, made.copies[rank, reader], "bfloat16", 64))
            total = 2 * sum(made.received(reader) for reader in range(2))
            ways: list[tuple[How, str]] = [("auto", "shared memory"), ("rdma", "RDMABuffer (TCP fallback)")]
            for serial, ((how, name), scale) in enumerate(zip(ways, (1.0, -0.375), strict=True), start=1):
                assert set(await done(generator.connect.call_one(sources, how))) == {name}
                packed = list((await done(trainers.publish.call(serial % 2, serial))).values())
                manifests = [[runs[reader] for runs in packed if reader in runs] for reader in range(2)]
                nbytes, params = await done(generator.pull.call_one(manifests, 20.0))
                assert nbytes == total
                for reader in range(2):
                    expected = generator_parameters(reader, torch.bfloat16, scale)
                    torch.testing.assert_close(params[reader], expected, rtol=0, atol=0)
                await done(trainers.scale.call(-0.375))
        await done(trainers.drop.call())
        await done(generator.write_after_a_failed_read.call_one())
    finally:
        for procs in (generator_procs, trainer_procs):
            await done(procs.stop())


async def done(future: Any, seconds: float = 30) -> Any:
    return await asyncio.wait_for(future.as_asyncio(), seconds)


def test_readers_that_want_parameters_in_different_orders_get_their_own() -> None:
    params = {name: torch.randn(16, 8) for name in "abc"}
    halves = {name: [Copy(name, 0, col, 16, 4, "p", 0, 0) for col in (0, 4)] for name in params}
    runs = {reader: tuple(halves[name][reader] for name in names) for reader, names in enumerate(("abc", "cab"))}
    staging = Staging(params, runs, torch.bfloat16, slice_bytes=64, block_bytes=96)
    for serial, scale in enumerate((1.0, -0.375), start=1):
        for param in params.values():
            param.mul_(scale)
        manifests = staging.pack(version=serial, slot=serial % 2, serial=serial)
        for reader, copies in runs.items():
            run, expected = staging.runs[serial % 2][reader], torch.empty(3 * 64, dtype=torch.bfloat16)
            reference_pack(params, copies, expected)
            assert torch.equal(run, expected)
            assert manifests[reader].checksums == tuple(checksum(octets(run, block)) for block in blocks(copies, 48))


def test_what_does_not_fit_is_refused_by_name() -> None:
    copy = Copy("a", 0, 0, 4, 2, "p", 1, 0)
    elsewhere = Offer("another host", 1, 1, 1 << 20, (4096, 8192), 32, layout((copy,), "float32", 8), None)
    source = Source(3, elsewhere, (copy,), "float32", 8)
    for params, message in [
        ({}, "p: expected in the live model"),
        ({"p": torch.zeros(4, 2)}, r"p: expected at least 5 x 2, found shape \(4, 2\)"),
        ({"p": torch.zeros(5, 1)}, r"p: expected at least 5 x 2, found shape \(5, 1\)"),
        ({"p": torch.zeros(5, 2).bfloat16()}, "p: expected float32 as staged by the trainer, found torch.bfloat16"),
    ]:
        with pytest.raises(ValueError, match=message):
            Landing(params, [source])
    fits = {"p": torch.zeros(5, 2)}
    with pytest.raises(ValueError, match=r"trainer rank 3: expected 64 bytes .* found 32"):
        Landing({}, [replace(source, copies=(copy, copy))])
    with pytest.raises(ValueError, match=r"trainer rank 3: expected layout .*, as planned"):
        Landing(fits, [replace(source, copies=(replace(copy, src_row0=1),))])
    with pytest.raises(ValueError, match=r'weight_sync\.transport: expected "auto" or "rdma"'):
        Landing(fits, [source], WeightSyncSection(transport="shm"))
    with pytest.raises(RuntimeError, match="expected registered slices from the trainer process 1, found none"):
        Landing(fits, [source])
    with pytest.raises(RuntimeError, match=r"at /proc/\d+/fd/9999, found No such file"):
        Landing(fits, [replace(source, offer=replace(elsewhere, place=here(), pid=os.getpid(), fd=9999))])
    with pytest.raises(ValueError, match="found none for a"):
        Staging({}, {0: (copy,)}, torch.float32, slice_bytes=64, block_bytes=64)
    with pytest.raises(ValueError, match="slice_bytes: expected at least one element"):
        Staging({}, {}, torch.float32, slice_bytes=3, block_bytes=64)


def test_parameters_that_cannot_be_described_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^w: expected a Hugging Face name"):
        shards_of([("w", torch.zeros(2))], {}, {})
    with pytest.raises(ValueError, match=r"^w: expected a vector or a matrix, found shape \(1, 2, 3\)"):
        shards_of([("w", torch.zeros(1, 2, 3))], {"w": "w"}, {})
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match=r"^w: expected sharded or replicated values"):
            shards_of([("w", partial)], {"w": "w"}, {})
    finally:
        dist.destroy_process_group()
