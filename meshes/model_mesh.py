"""A mesh of ranks that hold one TorchTitan model: axes (dp, tp), in TorchTitan's rank order; with context parallelism
(dp, cp, tp).

trainer                             the policy: every verb
critic                              begin_phase, scores, step, save, wait_for_saving, snapshot; first load_weights
reference, teacher, reward_model    load_weights and scores: a frozen role never begins a phase
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from monarch.actor import HostMesh, ProcMesh

from titan_rl.actors.model_rank import ModelRank
from titan_rl.config.auto import compiles
from titan_rl.config.sections import Config, ParallelismSection, WeightSyncSection
from titan_rl.meshes.faults import ask, ask_all, label
from titan_rl.meshes.hosts import Host, RankPlace
from titan_rl.meshes.spawn import end, meeting_file, process_group, spawn
from titan_rl.wire.errors import RunError
from titan_rl.wire.gpus import PLANNED
from titan_rl.wire.manifest import Publication
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.reports import StepStats
from titan_rl.wire.snapshot import Snapshot
from titan_rl.wire.spans import Recorded
from titan_rl.wire.types import Batch, PhaseName, RoleName
from titan_rl.wire.weight_plan import Copy, Shard
from titan_rl.wire.weight_source import NO_NOTES, Notes, Offer

MAX_NAMED = 3  # parameters in an error


class ModelMesh:
    """Each verb is one collective over the mesh."""

    policy = ""  # see PolicyTrainers

    def __init__(
        self,
        host: HostMesh | Callable[[], Sequence[RankPlace]],
        role: RoleName,
        config: Config,
        shape: ModelShape,
        env: Mapping[str, str],
        policies: Mapping[str, Config] | None = None,
    ) -> None:
        """`host`: one for all ranks, or a function that returns places, each with whole dp rows in rank order. It is
        called at each start, because a host may be lost: then the mesh may have fewer rows than the config.
        `policies`: the config of each, if there are several; `of` returns the mesh as one of them sees it."""
        parallelism: ParallelismSection = (config if role == "trainer" else getattr(config, role)).parallelism
        self.name = role
        self.dp, self.row_ranks = parallelism.dp, parallelism.row_ranks
        cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
        self._row = {"cp": cp, "tp": tp} if cp > 1 else {"tp": tp}  # axes of a dp row
        self._rank_places_of = host if callable(host) else lambda: [RankPlace(Host(host), self.dp * self.row_ranks)]
        self._rank_places: Sequence[RankPlace] = ()
        self._env, self._given, self._planned = env, (role, config, shape), parallelism
        self._policies, self._turn = policies, asyncio.Lock()
        self._procs: list[ProcMesh] = []  # one per rank place
        self._init_seconds = config.comm.init_timeout_seconds
        self._seconds = config.comm.train_timeout_seconds
        self._ranks: dict[str, Any] = {}  # by name, in rank order
        self._warm: set[str] = set()  # verbs already answered by these processes

    def of(self, policy: str) -> "ModelMesh":
        return PolicyTrainers(self, policy)

    async def start(self) -> list[int]:
        """Spawn the processes and build the model on every rank; return the parameter bytes that each holds."""
        self._warm.clear()
        compiled = compiles(self._given[1], self._env.get(PLANNED, "cpu"))
        kind = None if compiled else "model"  # its fork server has deferred TorchTitan's own compiling
        self._rank_places = self._rank_places_of()
        self.dp = sum(rank_place.ranks for rank_place in self._rank_places) // self.row_ranks
        parallelism = self._planned.of_rows(self.dp)
        members = process_group(*(rank_place.ranks for rank_place in self._rank_places))
        first_host = self._rank_places[0].host
        apart = len(self._rank_places) > 1 and first_host.facts is not None  # else a file of one machine
        meeting = {} if apart else meeting_file(first_host)
        self._procs, self._ranks = [], {}
        for rank_place in self._rank_places:
            first, rows = len(self._ranks) // self.row_ranks, rank_place.ranks // self.row_ranks
            procs = await spawn(
                rank_place.host,
                name=self.name,
                shape={"dp": rows, **self._row},
                first=first,
                kind=kind,
                env={**self._env, **rank_place.env, **meeting},
                members=members[len(self._ranks) :],
            )
            actors: Any = procs.spawn(self.name, ModelRank, *self._given, parallelism, self._policies)
            self._procs.append(procs)
            for dp, *others in product(range(rows), *map(range, self._row.values())):
                at = dict(zip(self._row, others, strict=True))
                self._ranks[label(self.name, {"dp": first + dp, **at})] = actors.slice(dp=dp, **at)
        address = ""
        if apart:
            name, rank = next(iter(self._ranks.items()))
            opened = rank.open_meeting.call()
            address = await ask(opened, actor=name, verb="open_meeting", seconds=self._init_seconds)
        return await self._all("start", address, seconds=self._init_seconds)

    @property
    def size(self) -> str:
        """Return the number of dp rows, or "" if all are there."""
        return f" with {self.dp} of {self._planned.dp} dp rows" if self.dp < self._planned.dp else ""

    @property
    def near(self) -> bool:
        """Return True if all ranks can open the files of this process."""
        return all(rank_place.host.near for rank_place in self._rank_places)

    @property
    def hosts(self) -> dict[str, Host]:
        """Return the host of each rank, by the rank's name, in rank order."""
        each = [rank_place.host for rank_place in self._rank_places for _ in range(rank_place.ranks)]
        return dict(zip(self._ranks, each, strict=True))

    async def kill(self) -> None:
        """End these processes, dead or alive; `respawn` starts others."""
        procs, self._procs = self._procs, []
        await end(list(self._ranks), *procs)

    async def respawn(self) -> None:
        """Replace these processes, dead or alive, by new ones in the state after `start`. Return once the ranks of a
        host that was cut off have ended: until then they may finish a checkpoint."""
        await self.kill()
        lost = [rank_place.host for rank_place in self._rank_places if rank_place.host.lost()]
        await self.start()
        await asyncio.gather(*(host.silenced() for host in lost))

    async def load_weights(self, folder: str, frozen_role: str = "") -> None:
        """Read a Hugging Face folder into the model; or into a second set of frozen weights, under a role's name."""
        await self._all("load_weights", folder, frozen_role, seconds=self._init_seconds)

    async def begin_phase(self, phase: PhaseName, at: int | Snapshot) -> tuple[int, str]:
        """Begin a phase from scratch (at=0), or resume it from the checkpoint of step `at`, or, scattered, from a
        snapshot. Return the step that all ranks agree on, and the controller's state saved with it."""
        if isinstance(at, Snapshot) and at.phase != phase:
            raise ValueError(f"expected a snapshot of phase {phase}, found one of {at.phase}")
        each = at.parts(self.name) if isinstance(at, Snapshot) else [at] * len(self._ranks)
        (state,) = set(await self._scatter("begin_phase", each, phase, seconds=self._init_seconds))
        return state

    async def step(self, updates: Sequence[Sequence[Batch]]) -> StepStats:
        """Scatter to each dp row its batch of every update, take those updates, return the reduced statistics."""
        return self._slowest(await self._scatter("step", self._rows([list(u) for u in zip(*updates, strict=True)])))

    async def accumulate(self, part: Sequence[Batch]) -> None:
        """Scatter a part of an update to the dp rows: gradients add up until `update`."""
        await self._scatter("accumulate", self._rows(part))

    async def update(self, whole: Batch, divisor: float) -> StepStats:
        """Take the update of the accumulated gradients; `whole` has the counts."""
        return self._slowest(await self._all("update", whole, divisor))

    async def scores(
        self, batches: Sequence[Batch], temperature: float = 1.0, frozen_role: str = "", top: int = 0
    ) -> tuple[list[list[np.ndarray]], list[int]]:
        """Return log-probs or values by dp row and microbatch, or entries of the `top` tokens, under the model's own
        weights or by the frozen ones of `frozen_role`; and the checksum of frozen weights by rank."""
        answers = await self._scatter("scores", self._rows(batches), temperature, frozen_role, top)
        return [values for values, _ in answers[:: self.row_ranks]], [checksum for _, checksum in answers]

    async def save(self, step: int, controller: str = "{}", *, on_disk: bool = False) -> None:
        """Write a checkpoint. Return when it has been begun, or, if asked, when it is on disk."""
        await self._all("save", step, controller, on_disk)

    async def wait_for_saving(self) -> None:
        """Return when the last checkpoint is on disk, or raise if it failed."""
        await self._all("wait_for_saving")

    async def snapshot(self, snapshot: Snapshot) -> list[int]:
        """Let every rank begin to copy its state into its part; return the bytes of each."""
        return await self._scatter("snapshot", snapshot.parts(self.name), snapshot.step, snapshot.controller)

    async def pixel_sums(self, images: Sequence[str]) -> list[list[str]]:
        """Return the hash of each image's pixels, by rank."""
        return await self._all("pixel_sums", images)

    async def export(self, folder: str) -> None:
        """Write the weights as Hugging Face safetensors; raise if some are not finite."""
        if names := sorted({name for found in await self._all("unsound") for name in found}):
            raise RunError(
                f"the {self.name}'s weights are not finite: {', '.join(names[:MAX_NAMED])}"
                f"{' ...' * (len(names) > MAX_NAMED)}",
                f"Nothing was written to {folder}. Resume from a checkpoint before they were ruined, with a smaller "
                "learning rate, or start from scratch with --job.fresh.",
            )
        await self._all("export", folder)

    async def export_added(self, folder: str) -> None:
        """Write the added parameters alone, such as adapters, into a folder that exists."""
        await self._all("export_added", folder)

    async def shards(self) -> list[list[Shard]]:
        """Gather the layout, by rank."""
        return await self._all("shards")

    async def stage(
        self, copies: Sequence[Mapping[int, tuple[Copy, ...]]], places: Collection[str], sync: WeightSyncSection
    ) -> list[dict[int, Offer]]:
        """Scatter the weight plan's parts and the readers' places; gather the offers for the readers."""
        return await self._scatter("stage", copies, places, sync)

    async def publish(
        self, version: int, slot: int, serial: int, again: bool = False, notes: Notes = NO_NOTES
    ) -> Publication | None:
        """Pack every rank's shards into a slot, and let each begin to send them if it has a note. Return None if the
        last publication is wanted `again` but the trainers have taken a step since."""
        own = notes.trainers or [None] * len(self._ranks)
        packed = await self._call("publish", [(version, slot, serial, again, note) for note in own])
        if None in packed:
            return None
        manifests = [manifests for manifests, _ in packed]
        return Publication(version, slot, manifests, max(seconds for _, seconds in packed), notes)

    async def served(self, call: str, *arguments: Any, batches: Sequence[Batch] | None = None) -> list[Any]:
        """Carry out a call of served_models.py on every rank. Batches are scattered to the dp rows. Return the answer
        of each row."""
        each = [None] * len(self._ranks) if batches is None else self._rows(batches)
        return (await self._scatter("served", each, call, *arguments))[:: self.row_ranks]

    def spans(self) -> dict[str, Awaitable[Recorded]]:
        """Return each rank's spans since the last call, by rank name. A rank answers between two verbs."""
        ranks = self._ranks.items()
        return {name: ask(rank.spans.call(), actor=name, verb="spans", seconds=None) for name, rank in ranks}

    async def close(self) -> None:
        await self._all("close", seconds=self._seconds)  # an asynchronous checkpoint ends first

    async def stop(self) -> None:
        await asyncio.gather(*(asyncio.wait_for(procs.stop().as_asyncio(), 10) for procs in self._procs))

    async def _all(self, verb: str, *arguments: Any, seconds: float | None = None) -> list[Any]:
        """Broadcast one verb, gather the answers in rank order."""
        return await self._call(verb, [arguments] * len(self._ranks), seconds)

    async def _scatter(
        self, verb: str, each: Sequence[Any], *arguments: Any, seconds: float | None = None
    ) -> list[Any]:
        """Call one verb with a different first argument on each rank; gather the answers in rank order."""
        return await self._call(verb, [(argument, *arguments) for argument in each], seconds)

    async def _call(self, verb: str, each: Sequence[Sequence[Any]], seconds: float | None = None) -> list[Any]:
        """Call one verb with each rank's arguments, gather the answers in rank order. The first call of a verb may
        import, compile and allocate: it has at least the start-up deadline. Of several policies, one calls at a time:
        no deadline runs while the ranks work for another."""
        limit = seconds or self._seconds
        named = {"policy": self.policy} if self.policy else {}
        async with self._turn if self.policy else nullcontext():
            ranks = zip(self._ranks.items(), each, strict=True)
            calls = {name: getattr(rank, verb).call(*arguments, **named) for (name, rank), arguments in ranks}
            answers = await ask_all(
                calls, verb=verb, seconds=limit if verb in self._warm else max(limit, self._init_seconds)
            )
        self._warm.add(verb)
        return answers

    def _rows(self, values: Sequence[Any]) -> list[Any]:
        """One value per dp row -> one per rank."""
        return [value for value in values for _ in range(self.row_ranks)]

    def _slowest(self, stats: Sequence[StepStats]) -> StepStats:
        """Return one of the ranks' statistics, which differ in their times only."""
        ranks = {name: each.busy for name, each in zip(self._ranks, stats, strict=True)}
        return replace(max(stats, key=lambda each: each.seconds), ranks=ranks)


class PolicyTrainers(ModelMesh):
    """The trainer mesh as one of several policies sees it: each of its verbs names the policy."""

    __slots__ = ("policy",)

    def __init__(self, mesh: ModelMesh, policy: str) -> None:
        self.__dict__ = mesh.__dict__  # all state is shared
        self.policy = policy
