"""The trainer mesh: axes (dp, tp), in TorchTitan's rank order. Each method is one collective over the mesh."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from monarch.actor import HostMesh, ProcMesh
from monarch.spmd import setup_torch_elastic_env_async

from titan_rl.actors.trainer import Trainer
from titan_rl.clock import Clock
from titan_rl.config import Config
from titan_rl.meshes.faults import ask_all, label
from titan_rl.meshes.procs import spawn
from titan_rl.model_shape import ModelShape
from titan_rl.types import Batch, PhaseName, StepStats
from titan_rl.weight_plan import Copy, Shard

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer


class TrainerMesh:
    def __init__(self, procs: ProcMesh, config: Config, shape: ModelShape, clock: Clock) -> None:
        self.dp = config.parallelism.dp
        self.tp = config.parallelism.tensor_parallel_degree
        self._procs = procs
        self._comm = config.comm
        self._clock = clock
        actors: Any = procs.spawn("trainer", Trainer, config, shape)
        self._ranks: list[Any] = [actors.slice(dp=i, tp=j) for i in range(self.dp) for j in range(self.tp)]

    @classmethod
    async def spawn(
        cls, host: HostMesh, config: Config, shape: ModelShape, env: Mapping[str, str], clock: Clock
    ) -> "TrainerMesh":
        p = config.parallelism
        procs = spawn(host, name="trainer", shape={"dp": p.dp, "tp": p.tensor_parallel_degree}, env=env)
        await asyncio.wait_for(setup_torch_elastic_env_async(procs), config.comm.init_timeout_seconds)
        return cls(procs, config, shape, clock)

    async def start(self) -> list[int]:
        """Build the model on every rank; answers with the parameter bytes that each holds."""
        return await self._all("start", seconds=self._comm.init_timeout_seconds)

    async def begin(self, phase: PhaseName) -> tuple[int, str]:
        """Broadcast; every rank agrees on the step it resumed from."""
        states = await self._all("begin", phase, seconds=self._comm.init_timeout_seconds)
        (state,) = set(states)
        return state

    async def step(self, batches: list[Batch]) -> StepStats:
        """Scatter one batch to each dp row, take one optimizer step, answer with the reduced statistics."""
        each = [batches[rank // self.tp] for rank in range(len(self._ranks))]
        with self._clock("train"):
            stats: list[StepStats] = await self._scatter("step", each)
        return max(stats, key=lambda s: s.seconds)

    async def shards(self) -> list[list[Shard]]:
        """Gather the layout, by rank."""
        return await self._all("shards", seconds=self._comm.train_timeout_seconds)

    async def stage(self, copies: list[dict[int, tuple[Copy, ...]]]) -> "list[dict[int, list[RDMABuffer]]]":
        """Scatter each rank's part of the weight plan; gather the handles of its registered buffers."""
        return await self._scatter("stage", copies)

    async def publish(self) -> float:
        """Every rank packs its shards; the seconds of the slowest."""
        return max(await self._all("publish", seconds=self._comm.train_timeout_seconds))

    async def save(self, step: int, controller: str) -> None:
        await self._all("save", step, controller, seconds=self._comm.train_timeout_seconds)

    async def export(self, folder: str) -> None:
        await self._all("export", folder, seconds=self._comm.train_timeout_seconds)

    async def close(self) -> None:
        await self._all("close", seconds=30)

    async def stop(self) -> None:
        await asyncio.wait_for(self._procs.stop().as_asyncio(), 10)

    async def _all(self, verb: str, *arguments: Any, seconds: float) -> list[Any]:
        """Broadcast one verb, gather the answers in rank order."""
        calls = {self._name(i): getattr(rank, verb).call_one(*arguments) for i, rank in enumerate(self._ranks)}
        return await ask_all(calls, verb=verb, seconds=seconds)

    async def _scatter(self, verb: str, arguments: Sequence[Any]) -> list[Any]:
        """One verb, each rank with its own argument; gather the answers in rank order."""
        ranks = enumerate(zip(self._ranks, arguments, strict=True))
        calls = {self._name(i): getattr(rank, verb).call_one(argument) for i, (rank, argument) in ranks}
        return await ask_all(calls, verb=verb, seconds=self._comm.train_timeout_seconds)

    def _name(self, rank: int) -> str:
        dp, tp = divmod(rank, self.tp)
        return label("trainer", {"dp": dp, "tp": tp})
