"""The controller: one asyncio program that drives every mesh.

    prompts --scatter--> generators --gather--> groups --pack, scatter--> trainers
                            ^                                                |
                            +---------- weights: publish, one-sided reads ---+

Each line of the loop in `reinforce` is one collective over a mesh. Staleness is bounded by admission alone: at most
`lag + 1` steps' worth of groups are in flight, and a step's worth is replaced only once the generators hold the weights
that step made. `lag = 0` is exact on-policy training.
"""

import json
from collections.abc import Sequence
from contextlib import aclosing

from titan_rl.advantages import with_advantages
from titan_rl.clock import Clock
from titan_rl.data import PromptSource, supervised
from titan_rl.meshes.generators import GeneratorMesh
from titan_rl.meshes.trainers import TrainerMesh
from titan_rl.packing import pack, samples_of
from titan_rl.report import Report
from titan_rl.rollouts import RolloutStream
from titan_rl.seeds import derive
from titan_rl.setup import Setup
from titan_rl.stop import Stop
from titan_rl.types import Batch, Group, Sample
from titan_rl.weights import WeightSync

BEFORE_RL = -1  # the version of weights that a cold start has yet to shape; RL begins with version 0


class Controller:
    """Wires the parts of a run and drives them; no part holds the controller."""

    def __init__(
        self,
        setup: Setup,
        trainers: TrainerMesh,
        generators: GeneratorMesh,
        weights: WeightSync,
        report: Report,
        stop: Stop,
        clock: Clock,
    ) -> None:
        self.setup, self.config = setup, setup.config
        self.trainers, self.generators, self.weights = trainers, generators, weights
        self.report, self.stop, self.clock = report, stop, clock

    async def reinforce(self) -> None:
        """RL, from its beginning or from the checkpoint in the dump folder."""
        last, lag = self.config.training.steps, self.config.rollout.lag
        groups_per_step = self.config.rollout.groups_per_step

        start, cursor = await self.trainers.begin("rl")
        prompts = self.prompts("rl", cursor if start else None)
        await self.weights.sync(start)
        if start in (0, last) and (score := await self.evaluate()) is not None:
            self.report.eval(start, score)

        stream = self.stream(prompts, groups=(last - start) * groups_per_step)
        async with aclosing(stream):
            stream.admit(groups_per_step * (lag + 1))

            for step in self.stop.steps(start + 1, last):
                groups = self.advantages(await stream.take(groups_per_step))  # gather
                stats = await self.trainers.step(self.batches(samples_of(groups)))  # scatter, reduce
                sync = await self.weights.sync(step)  # publish, broadcast, read
                score = await self.evaluate() if self.evaluates(step) else None
                stream.admit(groups_per_step)
                self.report.step(step, groups, stats, sync, score)
                if self.stop.here() or step % self.config.checkpoint.interval == 0 or step == last:
                    await self.save(step, stream.cursor)

    async def supervise(self) -> None:
        """The cold start: supervised steps on the task's own answers, for sampling needs something to find."""
        cold = self.config.cold_start
        start, cursor = await self.trainers.begin("cold_start")
        if json.loads(cursor).get("enough"):
            return
        examples = self.prompts("cold_start", cursor if start else None)
        if start == 0:
            await self.weights.sync(BEFORE_RL)
            if (score := await self.evaluate()) is not None:
                self.report.before_cold_start(score)

        with self.report.supervised(start, cold.steps):
            for step in self.stop.steps(start + 1, cold.steps):
                batch = [supervised(examples.next(), self.setup.tokenizer) for _ in range(cold.batch_size)]
                self.report.cold_start(step, await self.trainers.step(self.batches(batch)))
                enough = False
                if cold.stop_at and step % cold.stop_interval == 0:
                    await self.weights.sync(BEFORE_RL)
                    enough = await self.setup.practice.score(self.generators) >= cold.stop_at
                if self.stop.here() or enough or step % cold.interval == 0 or step == cold.steps:
                    await self.save(step, {**examples.state_dict(), "enough": enough})
                if enough:
                    break

    def prompts(self, phase: str, cursor: str | None) -> PromptSource:
        seed = derive(self.config.debug.seed, "prompts", phase)
        source = PromptSource(self.setup.task, self.setup.tokenizer, seed=seed)
        if cursor is not None:
            source.load_state_dict(json.loads(cursor))
        return source

    def stream(self, prompts: PromptSource, *, groups: int) -> RolloutStream:
        return RolloutStream(
            self.generators,
            prompts,
            self.setup.reward,
            self.setup.tokenizer.decode,
            sampling=self.setup.sampling,
            group_size=self.config.rollout.group_size,
            groups=groups,
            seed=self.config.debug.seed,
            clock=self.clock,
        )

    def advantages(self, groups: Sequence[Group]) -> list[Group]:
        return [with_advantages(group, normalize_std=self.config.algorithm.normalize_std) for group in groups]

    def batches(self, samples: Sequence[Sample]) -> list[Batch]:
        training = self.config.training
        return pack(
            samples,
            shards=self.trainers.dp,
            seq_len=training.seq_len,
            rows_per_microbatch=training.local_batch_size,
            pad_id=self.setup.tokenizer.pad,
        )

    def evaluates(self, step: int) -> bool:
        interval = self.config.eval.interval
        return step == self.config.training.steps or (interval > 0 and step % interval == 0)

    async def evaluate(self) -> float | None:
        """The held-out score of the weights that the generators serve; None without held-out problems."""
        if not self.setup.heldout.prompts:
            return None
        with self.clock("eval"):
            return await self.setup.heldout.score(self.generators)

    async def save(self, step: int, cursor: dict[str, object]) -> None:
        with self.clock("save"):
            await self.trainers.save(step, json.dumps(cursor))
