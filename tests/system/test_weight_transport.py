"""Trainer ranks and generator readers in Monarch processes: staged weights arrive bit for bit by either transport."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint, this_host
from monarch.config import configure
from monarch.spmd import setup_torch_elastic_env_async
from torch import Tensor
from torch.distributed.tensor import DTensor

from support.staged_weights import READERS, SHAPE, Weights, generator_parameters
from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.actors.sync.transport import How
from titan_rl.actors.vllm.vllm_params import param_shapes
from titan_rl.config.sections import WeightSyncSection
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.weight_plan import Copy, Shard, plan
from titan_rl.wire.weight_source import Offer, Source


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
        sync = WeightSyncSection(transport=how)
        self.landings = [Landing(p, offered, sync) for p, offered in zip(self.params, sources, strict=True)]
        return [name for landing in self.landings for name in landing.connection.transports]

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
        await self.landings[0].fetch_weights(self.manifests[0], 2)  # the bytes fetched before are still on this host
        later = [Manifest.of(m.version, m.serial + 1, m.slot, m.layout, m.checksums) for m in self.manifests[0]]
        with pytest.raises(Exception, match=r"."):
            await self.landings[0].fetch_weights(later, 2)
        with pytest.raises(RuntimeError, match="expected a completed fetch_weights"):
            await self.landings[0].write_weights(2)


def test_two_versions_arrive_bit_for_bit_by_either_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)  # the ranks import support
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
                slices = [s for offer in staged.values() if offer.link for s in offer.link.slices[0]]
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
