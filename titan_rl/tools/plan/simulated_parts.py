"""Ranks, environments and judges in virtual time: what a simulated run has in the place of processes.

Ranks answer the calls of Replica and ModelMesh, by the verbs of actors/vllm/generator.py and actors/model_rank.py. One
rank stands for all of a replica, and one for all of a dp row.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from titan_rl.actors.vllm.engine import Done, EngineSettings
from titan_rl.actors.vllm.generator import drain
from titan_rl.actors.vllm.vllm_params import LiveLayout, pieces, planned_layout
from titan_rl.batch.experience import Estimate
from titan_rl.batch.packing import Weighting, fitted
from titan_rl.config.sections import Config
from titan_rl.meshes import deaths
from titan_rl.meshes.faults import label
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.meshes.replica import GeneratorPolicy, Replica
from titan_rl.tasks.examples import Example
from titan_rl.tasks.task import Task
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.plan.engine_model import EngineModel
from titan_rl.tools.plan.rates import Rates, Work
from titan_rl.tools.plan.virtual_time import Cores
from titan_rl.train.learner import Learner, Packer
from titan_rl.train.run_parts import RunParts
from titan_rl.train.verbs import Verbs
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.reports import EngineStats, ReaderCost, StepStats
from titan_rl.wire.sessions import Outcome, Session
from titan_rl.wire.types import ENTRY, Batch, Branch, Group, Prompt, Request, RoleName, Rollout, Rows, Sample
from titan_rl.wire.weight_plan import Shard
from titan_rl.wire.weight_source import Connection

OBSERVATION = -(2**40)  # the token that environments add; prompts are of their id, answers of a negative number


class SimulatedCall(NamedTuple):
    """A call to a rank, as Monarch's future."""

    verb: Callable[..., Awaitable[Any]]
    arguments: Sequence[Any]

    def as_asyncio(self) -> Awaitable[Any]:
        return self.verb(*self.arguments)


class SimulatedEndpoint(NamedTuple):
    verb: Callable[..., Awaitable[Any]]

    def call(self, *arguments: Any) -> SimulatedCall:
        return SimulatedCall(self.verb, arguments)


class verb:
    """Makes a method an endpoint."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self._method = method

    def __get__(self, rank: Any, owner: Any) -> SimulatedEndpoint:
        return SimulatedEndpoint(partial(self._method, rank))


class Rank:
    """A rank, its actors and the processes of its mesh, in one."""

    def spawn(self, *_: Any) -> "Rank":
        return self

    def slice(self, **_: int) -> "Rank":
        return self

    @verb
    async def close(self) -> None: ...

    def stop(self) -> SimulatedCall:
        return self.close.call()


class GeneratorRank(Rank):
    def __init__(self, index: int, run: "SimulatedRun", start_seconds: float) -> None:
        self.index, self._run, self._start_seconds = index, run, start_seconds
        self.again = 0  # samples that another replica began
        self._done: asyncio.Queue[Done] = asyncio.Queue()
        self._reported = EngineStats()
        batch = run.config.generator.max_num_seqs
        self.engine = EngineModel(run.rates.engine, run.cores, batch, run.length, self._done.put_nowait)
        name = label(f"generator{index}", {"tp": 0})
        life = deaths.follow([name], report="simulated")[name]["TITAN_RL_RANK"]
        self._launcher = deaths.Launcher()
        self._launcher.receive(f"name {life}\n".encode())

    def die(self) -> None:
        """End its process, as its launcher reports it."""
        self.engine.stop()
        self._launcher.receive(b"end 9\n")

    async def _until(self, begin: Callable[[Callable[[], None]], None]) -> None:
        """Return when the engine has called the function that `begin` gives it."""
        done = asyncio.get_running_loop().create_future()
        begin(lambda: None if done.done() else done.set_result(None))
        await done

    @verb
    async def start(self) -> None:
        await asyncio.sleep(self._start_seconds)

    @verb
    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()

    @verb
    async def layout(self) -> LiveLayout:
        return planned_layout(self._run.shape, tp=1, rank=0)

    @verb
    async def place(self) -> str:
        return "simulated"

    @verb
    async def connect(self, sources: Any, sync: Any, siblings: Any, slot: int) -> Connection:
        self.engine.in_flight = sync.in_flight
        return Connection(["simulated"], None)

    @verb
    async def submit(self, requests: Sequence[Request], withdrawn: Sequence[str]) -> None:
        self.engine.submit(requests)
        self.again += sum(len(request.seeds) for request in requests if "~" in request.id)

    @verb
    async def take(self, within: float) -> list[Done]:
        return await drain(self._done, within)

    @verb
    async def fetch_weights(self, manifests: Any, timeout: float, note: Any, slot: int) -> ReaderCost:
        await asyncio.sleep(self._run.rates.sync.fetch_s)
        return ReaderCost(read=self._run.rates.sync.fetch_s, blocks=1)

    @verb
    async def switch(self, version: int, timeout: float, slot: int) -> ReaderCost:
        seconds = self._run.rates.sync.switch_s
        await self._until(partial(self.engine.switch, version, seconds))
        now = self.engine.counted()
        since, self._reported = now.since(self._reported), now
        return ReaderCost(write=seconds, pause=seconds, engine=since)

    @verb
    async def sleep(self) -> tuple[int, int]:
        await self._until(self.engine.sleep)
        return 0, 0


class SimulatedModelRank(Rank):
    """A dp row of trainers, or of another role's mesh."""

    def __init__(self, run: "SimulatedRun", first: bool) -> None:
        self._run, self._first = run, first
        self._turn = asyncio.Lock()
        self.busy = 0.0  # seconds

    async def _work(self, seconds: float) -> float:
        """Work for `seconds`, after all earlier calls. Return the seconds that it took."""
        async with self._turn:
            began = self._run.cores.loop.now
            await self._run.cores.work(seconds, self._run.rates.trainer.cores)
            took = self._run.cores.loop.now - began
        self.busy += took
        return took

    def _of_batch(self, batch: Batch) -> float:
        """Return the seconds of forward and backward."""
        rates = self._run.rates.trainer
        return sum(rates.microbatch_s + rows.tokens.size * rates.place_s for rows in batch.microbatches)

    @verb
    async def start(self, met_at: str) -> int:
        return 0

    @verb
    async def load_weights(self, folder: str, frozen_role: str) -> None: ...

    @verb
    async def begin_phase(self, at: int, phase: str) -> tuple[int, str]:
        return at, "{}"

    @verb
    async def step(self, batches: Sequence[Batch]) -> StepStats:
        took = await self._work(sum(self._of_batch(batch) + self._run.rates.trainer.update_s for batch in batches))
        return StepStats(0.0, 0.0, 0.0, sum(batch.tokens for batch in batches), took, busy=took)

    @verb
    async def accumulate(self, part: Batch) -> None:
        await self._work(self._of_batch(part))

    @verb
    async def update(self, whole: Batch, divisor: float) -> StepStats:
        took = await self._work(self._run.rates.trainer.update_s)
        return StepStats(0.0, 0.0, 0.0, whole.tokens, took, busy=took)

    @verb
    async def scores(
        self, batch: Batch, temperature: float, frozen_role: str, top: int
    ) -> tuple[list[np.ndarray], int]:
        await self._work(sum(rows.tokens.size for rows in batch.microbatches) * self._run.rates.trainer.score_s)
        return [np.zeros(rows.targets.shape, np.float32) for rows in batch.microbatches], 0

    @verb
    async def save(self, step: int, controller: str, on_disk: bool) -> None: ...

    @verb
    async def wait_for_saving(self) -> None: ...

    @verb
    async def shards(self) -> list[Shard]:
        """Return whole tensors: the first rank holds all."""
        wanted = pieces(self._run.shape, tp=1, rank=0) if self._first else []
        return list({each.name: Shard(each.name, 0, each.rows, 0, each.cols) for each in wanted}.values())

    @verb
    async def stage(self, copies: Any, places: Any, sync: Any) -> dict[int, Any]:
        return dict.fromkeys(copies)

    @verb
    async def publish(self, version: int, slot: int, serial: int, again: bool, note: Any) -> tuple[Any, float]:
        return {}, await self._work(self._run.rates.sync.publish_s)


class SimulatedMesh(ModelMesh):
    """A model mesh of simulated ranks."""

    def __init__(self, run: "SimulatedRun", role: RoleName) -> None:
        super().__init__(list, role, run.config, run.shape, {})
        self.row_ranks = 1
        self.ranks = [SimulatedModelRank(run, first=dp == 0) for dp in range(self.dp)]
        self._ranks = {f"{role}[dp={dp}]": rank for dp, rank in enumerate(self.ranks)}


@dataclass(frozen=True, slots=True)
class SizedPacker(Packer):
    """Finds the microbatches of samples, as Packer does, and leaves them empty: filling them takes most of its time."""

    def _packed(self, samples: Sequence[Sample], dp: int, together: int, weighting: Weighting) -> list[Batch]:
        fit, plain = fitted(samples, dp, self.config.training.seq_len, self.rows, together=together, share=self.share)
        n = np.broadcast_to(np.int64(0), (fit.rows, fit.length))  # nothing
        rows = Rows(n, n, n, n, n, n, n, n, {}, n)
        tokens = sum(int(np.asarray(sample.mask).sum()) for sample in samples)
        batch = Batch([rows] * (fit.slots // dp // fit.rows), tokens, len(samples), plain.places // dp)
        return [batch] * dp


class SizedVerbs(Verbs):
    """Verbs without numbers: samples have tokens and a mask, and any advantage."""

    async def learn_from(
        self, groups: Sequence[Group], estimate: Estimate | None = None
    ) -> tuple[list[Group], list[Sample]]:
        kept = slice(1, None, -1) if self.config.algorithm.online_pairs else slice(None)  # the best and the worst
        samples = [
            _sample(branch, group.prompt.id * len(group.rollouts) + k)
            for group in groups
            for k, rollout in list(enumerate(group.rollouts))[kept]
            for branch in rollout.branches
        ]
        return list(groups), await self.learner.judge(samples)


def _sample(branch: Branch, sequence: int) -> Sample:
    """Return a branch as a sample. Each of its parts is one token, many times."""
    parts = [part for turn in branch.turns for part in (turn.context, turn.completion.tokens)]
    sizes = [len(part) for part in parts]
    tokens = np.repeat([part[0] if part else 0 for part in parts], sizes)
    mask = np.repeat(np.arange(len(parts), dtype=np.int8) % 2, sizes)
    numbers = np.broadcast_to(1.0, len(tokens))
    return Sample(tokens, mask, {"behaviour": numbers, "advantage": numbers}, sizes[0], sequence)


class SizedLearner(Learner):
    """A Learner without numbers: scores are zeros."""

    def __init__(self, run: RunParts) -> None:
        super().__init__(run)
        self.packer = SizedPacker(*(getattr(self.packer, key.name) for key in fields(self.packer)))

    async def scores(
        self,
        samples: Sequence[Sample],
        mesh: ModelMesh | None = None,
        frozen_role: str = "",
        *,
        sharpness: int = 1,
        top: int = 0,
    ) -> list[np.ndarray]:
        mesh = mesh or self._meshes.trainers
        await mesh.scores(self.batches(samples, mesh, replay=not frozen_role), 1.0, frozen_role, top)
        if top:
            return [np.zeros((int(np.sum(sample.mask)), 1 + top), ENTRY) for sample in samples]
        return [np.zeros(len(sample.tokens)) for sample in samples]


class SimulatedEnvironments:
    """Drives rollouts, as the environment mesh: the turns that the work draws, each after a context that continues."""

    def __init__(self, run: "SimulatedRun") -> None:
        section = run.config.environment
        self._run, self._room = run, asyncio.Semaphore(section.processes * section.concurrency)

    async def drive(self, session: Session) -> Outcome:
        work, tokens = self._run.work, list(session.prompt.tokens)
        async with self._room:
            for turn in range(max(1, round(work.turns.draw("turns", session.seed)))):
                if turn:
                    tokens += [OBSERVATION] * round(work.observation.draw("observation", session.seed, turn))
                tokens += (await session.sample(tokens)).tokens
                await asyncio.sleep(self._run.rates.environment.draw("environment", session.seed, turn))
        return Outcome()


@dataclass(frozen=True, slots=True)
class Prompts(Task):
    """A task whose prompts have the lengths that the work draws."""

    work: Work = field(kw_only=True)
    most: int = field(kw_only=True)

    def prompt(self, example: Example, id: int, tokenizer: TextTokenizer) -> Prompt:
        return Prompt(id, "", [id] * max(1, min(self.most, round(self.work.prompt.draw("prompt", id)))), "")


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What all simulated parts share."""

    config: Config
    shape: ModelShape  # its weights are synced in name only
    rates: Rates
    work: Work
    cores: Cores
    ranks: list[GeneratorRank] = field(default_factory=list)  # also of lost replicas

    def length(self, request: Request, sample: int) -> int:
        """Return the tokens of a sample: a function of its prompt and its seed."""
        room = min(request.sampling.max_new_tokens, self.config.longest_rollout - len(request.tokens))
        drawn = self.work.answer.draw("answer", request.tokens[0], request.seeds[sample])
        return max(0, min(room, max(1, round(drawn))))

    async def judge(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
        """Return rewards that differ within a group, in the seconds of the rates."""
        await asyncio.sleep(self.rates.judge.draw("judge", prompt.id))
        return [float(k % 2) for k in range(len(rollouts))]

    async def make(self, index: int, policy: GeneratorPolicy, seconds: float) -> Replica:
        """Return a replica which starts in `seconds`."""
        rank: Any = GeneratorRank(index, self, seconds)
        self.ranks.append(rank)
        return Replica(index, f"generator{index}", rank, EngineSettings(model_dir=""), policy)

    def kill(self, replica: int) -> None:
        next(rank for rank in reversed(self.ranks) if rank.index == replica).die()
