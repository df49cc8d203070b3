"""A mesh of ranks that hold one TorchTitan model: axes (dp, tp), in TorchTitan's rank order."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from monarch.actor import HostMesh
from monarch.spmd import setup_torch_elastic_env_async

from titan_rl.config.sections import CommSection, ParallelismSection
from titan_rl.meshes.faults import ask, ask_all, label
from titan_rl.meshes.spawn import end, spawn
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.spans import Recorded
from titan_rl.wire.types import Batch, StepStats


class ModelMesh:
    """Each verb is one collective over the mesh. Subclasses add the verbs of their actor."""

    def __init__(
        self,
        host: HostMesh,
        name: str,
        parallelism: ParallelismSection,
        comm: CommSection,
        env: Mapping[str, str],
        actor: type,
        *given: Any,
    ) -> None:
        self.name = name
        self.dp = parallelism.dp
        self.tp = parallelism.tensor_parallel_degree
        self._host, self._env, self._actor, self._given = host, env, actor, given
        self._comm = comm
        self._ranks: list[Any] = []

    @classmethod
    async def place(
        cls,
        host: HostMesh,
        name: str,
        parallelism: ParallelismSection,
        comm: CommSection,
        env: Mapping[str, str],
        actor: type,
        *given: Any,
    ) -> Self:
        """Spawn the processes, and the actor on each with what it is `given`."""
        mesh = cls(host, name, parallelism, comm, env, actor, *given)
        await mesh._spawn()
        return mesh

    async def _spawn(self) -> None:
        self._procs = spawn(self._host, name=self.name, shape={"dp": self.dp, "tp": self.tp}, env=self._env)
        await asyncio.wait_for(setup_torch_elastic_env_async(self._procs), self._comm.init_timeout_seconds)
        actors: Any = self._procs.spawn(self.name, self._actor, *self._given)
        self._ranks = [actors.slice(dp=i, tp=j) for i in range(self.dp) for j in range(self.tp)]

    async def respawn(self) -> None:
        """New processes in the place of these, dead or alive, as they were after `start`."""
        await end([self._name(rank) for rank in range(self.dp * self.tp)], self._procs)
        await self._spawn()
        await self.start()

    async def start(self) -> list[int]:
        """Build the model on every rank; answers with the parameter bytes that each holds."""
        return await self._all("start", seconds=self._comm.init_timeout_seconds)

    def spans(self) -> dict[str, Awaitable[Recorded]]:
        """Asks each rank, by name, what it recorded since it was asked before. It answers between two verbs."""
        calls = {self._name(i): rank.spans.call_one() for i, rank in enumerate(self._ranks)}
        return {name: ask(call, actor=name, verb="spans", seconds=None) for name, call in calls.items()}

    async def close(self) -> None:
        await self._all("close", seconds=self._comm.train_timeout_seconds)  # an asynchronous checkpoint ends first

    async def stop(self) -> None:
        await asyncio.wait_for(self._procs.stop().as_asyncio(), 10)

    def rows(self, values: Sequence[Any]) -> list[Any]:
        """One value a dp row -> one a rank."""
        return [values[rank // self.tp] for rank in range(len(self._ranks))]

    def heads(self, answers: Sequence[Any]) -> list[Any]:
        """One answer a rank -> one a dp row: tensor-parallel peers answer alike."""
        return list(answers[:: self.tp])

    async def _all(self, verb: str, *arguments: Any, seconds: float) -> list[Any]:
        """Broadcast one verb, gather the answers in rank order."""
        calls = {self._name(i): getattr(rank, verb).call_one(*arguments) for i, rank in enumerate(self._ranks)}
        return await ask_all(calls, verb=verb, seconds=seconds)

    async def _scatter(self, verb: str, each: Sequence[Any], *arguments: Any) -> list[Any]:
        """One verb, each rank with its own first argument; gather the answers in rank order."""
        ranks = enumerate(zip(self._ranks, each, strict=True))
        calls = {self._name(i): getattr(rank, verb).call_one(own, *arguments) for i, (rank, own) in ranks}
        return await ask_all(calls, verb=verb, seconds=self._comm.train_timeout_seconds)

    def _name(self, rank: int) -> str:
        dp, tp = divmod(rank, self.tp)
        return label(self.name, {"dp": dp, "tp": tp})


class TrainedMesh(ModelMesh):
    """One whose model has an optimizer: the policy's, the critic's."""

    async def step(self, updates: Sequence[Sequence[Batch]]) -> StepStats:
        """Scatter to each dp row its batch of every update, take those updates, answer with the reduced statistics."""
        each = [list(batches) for batches in zip(*updates, strict=True)]
        return self._slowest(await self._scatter("step", self.rows(each)))

    def _slowest(self, stats: Sequence[StepStats]) -> StepStats:
        """All say the same but for their times."""
        ranks = {self._name(rank): each.busy for rank, each in enumerate(stats)}
        return replace(max(stats, key=lambda each: each.seconds), ranks=ranks)

    async def snapshot(self, snapshot: Snapshot) -> list[int]:
        """Every rank begins to copy its state into its part; answers with the bytes of each."""
        return await self._scatter("snapshot", snapshot.parts(self.name), snapshot.step, snapshot.controller)

    async def _begin(self, snapshot: Snapshot | None, *arguments: Any) -> list[Any]:
        """Each rank with its part of the snapshot to go on from, if there is one."""
        parts = [None] * len(self._ranks) if snapshot is None else snapshot.parts(self.name)
        ranks = enumerate(zip(self._ranks, parts, strict=True))
        calls = {self._name(i): rank.begin.call_one(part, *arguments) for i, (rank, part) in ranks}
        return await ask_all(calls, verb="begin", seconds=self._comm.init_timeout_seconds)
