"""Started generator meshes of a tiny model, and a trainer rank that publishes weights to them."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import monarch.actor
from monarch.actor import this_host

from support.lora_weights import adapters
from support.weight_layouts import NO_LORA
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.actors.vllm.engine_adapters import engine_adapters
from titan_rl.config import sections as c
from titan_rl.config.auto import on_device
from titan_rl.meshes.generator_mesh import POLICY, GeneratorMesh
from titan_rl.meshes.replica import GeneratorPolicy
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.manifest import Publication
from titan_rl.wire.model_shape import shape_of_folder
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Completion, Request, Sampling
from titan_rl.wire.weight_plan import Shard


class Running:
    """A started mesh and the event loop that its tasks live on."""

    def __init__(
        self, runner: asyncio.Runner, mesh: GeneratorMesh, pids: list[int], folder: Path, lora: c.LoraSection
    ) -> None:
        self.runner, self.mesh, self.pids, self.folder, self.lora = runner, mesh, pids, folder, lora
        self.shape = shape_of_folder(str(folder), "model")

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, 120))

    def generate(self, *requests: Request) -> list[list[Completion]]:
        """Sample all requests, submitted in one event-loop tick."""

        async def work() -> list[list[Completion]]:
            return await asyncio.gather(*map(self.mesh.generate, requests))

        return self(work())


@contextmanager
def started(
    model: Any,
    folder: Path,
    *,
    replicas: int,
    tp: int,
    longest: int,
    policy: GeneratorPolicy = POLICY,
    lora: c.LoraSection = NO_LORA,
    asynchronous: bool = False,
) -> Iterator[Running]:
    model.save_pretrained(folder)
    shape = shape_of_folder(str(folder), "model")
    settings = EngineSettings(
        shape=shape,
        model_dir=str(folder),
        max_model_len=longest,
        max_num_seqs=256,
        kv_cache_memory_mb=32,
        tensor_parallel_degree=tp,
        load_format="auto",
        async_scheduling=asynchronous,
        adapters=engine_adapters(lora.in_vllm, shape, 1),
    )

    async def start() -> tuple[GeneratorMesh, list[int]]:
        mesh = await GeneratorMesh.spawn(this_host(), settings, replicas=replicas, env=vllm_cpu.ENV, policy=policy)
        pids = [info.pid for info in await mesh.start()]
        await mesh.connect([[] for _ in range(tp)])
        await mesh.pull(0)
        return mesh, pids

    # Monarch's own hook interrupts the main thread when a rank dies, which a test below brings about; it may be called
    # later than that.
    monarch.actor.unhandled_fault_hook = lambda _: None
    with asyncio.Runner() as runner:
        mesh, pids = runner.run(start())
        yield Running(runner, mesh, pids, folder, lora)
        runner.run(mesh.close())
        runner.run(mesh.stop())


async def begun(mesh: GeneratorMesh) -> None:
    """Return once every replica that has requests has sampled tokens of them."""
    while not (busy := [replica for replica in mesh.replicas.values() if replica.busy]):
        await asyncio.sleep(0)

    async def sampled() -> list[int]:
        return [(await replica.head("stats", seconds=60)).tokens for replica in busy]

    before = await sampled()
    while not all(now > was + 1 for was, now in zip(before, await sampled(), strict=True)):
        await asyncio.sleep(0.002)


def requests(n: int, sampling: Sampling, samples: int = 2) -> list[Request]:
    return [Request(f"r{i}", [1, 4 + i % 60, *range(i % 7)], list(range(samples)), sampling) for i in range(n)]


def greedy(model: Any, context: Sequence[int], completion: Completion) -> list[int]:
    """Return the model's argmax at each position of a completion."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*context, *completion.tokens]])).logits[0, len(context) - 1 : -1]
    return logits.argmax(-1).tolist()


class OneTrainer:
    """A trainer mesh of one rank in this process, which holds the model as Hugging Face stores it, times `scale`; or
    the model as it is, and adapters, which the test changes."""

    def __init__(self, model: Any, lora: c.LoraSection = NO_LORA, adapters: Any = None) -> None:
        self.scale, self._lora = 1.0, lora
        self.adapters: dict[str, Any] = adapters or {}
        self._given = {name: tensor.clone() for name, tensor in (model.state_dict() | self.adapters).items()}
        self._held = {name: tensor.clone() for name, tensor in self._given.items()}

    async def shards(self) -> list[list[Shard]]:
        return [[Shard(name, 0, len(w), 0, w[0].numel()) for name, w in self._held.items()]]

    async def stage(self, copies: Any, places: Any, sync: c.WeightSyncSection) -> list[Any]:
        import torch

        from titan_rl.actors.sync.held_shards import local_tensors
        from titan_rl.actors.sync.staging import Staging
        from titan_rl.ext.adapters.ranks.merged import applied

        self.staging = Staging(
            self._held,
            copies[0],
            torch.float32,
            slice_bytes=1 << 20,
            block_bytes=sync.block_kb << 10,
            view=partial(applied, scale=self._lora.scale) if self._lora.on else local_tensors,
        )
        return [self.staging.offer(remote=False)]

    async def publish(
        self, version: int, slot: int, serial: int, again: bool = False, notes: Any = None
    ) -> Publication:
        for name, held in self._held.items():
            held.copy_(self.adapters.get(name, self._given[name] * self.scale))
        if again:
            self.staging.forget_frozen()
        return Publication(version, slot, [self.staging.pack(version, slot, serial)], 0.0)

    def corrupt(self, slot: int) -> None:
        run = self.staging.runs[slot][max(self.staging.runs[slot])]
        run[1000] += 1


async def connected(running: Running, model: Any, seconds: int = 60, **sync: Any) -> tuple[OneTrainer, WeightSync]:
    made = adapters(model, running.shape, running.lora, 0) if running.lora.on else {}
    trainer: Any = OneTrainer(model, running.lora, made)
    tp = len(running.pids) // len(running.mesh.replicas)
    config = on_device(
        c.Config(
            lora=running.lora,
            generator=c.GeneratorSection(tensor_parallel_degree=tp),
            weight_sync=c.WeightSyncSection(block_kb=1, **sync),
            comm=c.CommSection(train_timeout_seconds=seconds),
        ),
        "cpu",
    )
    weights = WeightSync(trainer, running.mesh, Clock())
    await weights.connect(config, running.shape)
    assert weights.transports == "shared memory"
    return trainer, weights


def versions(done: Sequence[Sequence[Completion]]) -> list[set[int]]:
    return [set(completion.versions) for completions in done for completion in completions]
