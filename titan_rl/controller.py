"""The controller: one asyncio program that drives every mesh.

    prompts --scatter--> generators --gather--> groups --judge--> samples --pack, scatter--> trainers
                            ^                  reference, teacher, critic                        |
                            +------------- weights: publish, one-sided reads --------------------+

Each line of the loop in `reinforce` is one collective over a mesh. Staleness is bounded by admission: at most `lag + 1`
steps' worth of groups are in flight, and a step's worth is replaced only once the generators hold the weights that step
made. `lag = 0` is exact on-policy training; with any other the generators sample, and take weights, while the trainers
step. `fit` is the loop of what learns from given data: supervised
examples, preference pairs, and the cold start before RL.
"""

import json
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from titan_rl.batch.experience import minibatches, samples_of, with_advantages
from titan_rl.preflight.setup import Setup
from titan_rl.record.ledger import Ledger
from titan_rl.record.report import Report
from titan_rl.rollout.judges import accuracy, by_model, by_rule, scores_of
from titan_rl.rollout.sampling import StreamSettings
from titan_rl.rollout.stream import RolloutStream
from titan_rl.tasks.prompts import SAMPLES, PromptSource
from titan_rl.tasks.rewards import reward_for
from titan_rl.train.health import Health, Rewind
from titan_rl.train.launch import Meshes
from titan_rl.train.learner import Roles
from titan_rl.train.stop import Stop
from titan_rl.train.weight_sync import WeightSync
from titan_rl.wire.clock import Clock
from titan_rl.wire.errors import RunError
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Group, PhaseName, Sample, StepStats

BEFORE_RL = -1  # the version of weights that a cold start has yet to shape; RL begins with version 0


class Controller:
    """Wires the parts of a run and drives them; no part holds the controller."""

    def __init__(
        self,
        setup: Setup,
        meshes: Meshes,
        weights: WeightSync | None,
        roles: Roles,
        report: Report,
        stop: Stop,
        clock: Clock,
        *,
        attempt: int = 1,
        began: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`began` is told after which step it goes on, once everything is up. `attempt`: see Recovery."""
        self.setup, self.config = setup, setup.config
        self.meshes, self.weights, self.roles = meshes, weights, roles
        self.report, self.stop, self.clock, self.health = report, stop, clock, Health(setup.config, report.warn)
        self.attempt, self.began = attempt, began

    async def train(self) -> None:
        """The algorithm, from its beginning or from the checkpoint in the dump folder."""
        await (self.reinforce() if self.config.algorithm.kind == "rl" else self.fit())

    async def reinforce(self) -> None:
        assert self.weights is not None
        algorithm, weights, last = self.config.algorithm, self.weights, self.config.training.steps
        groups_per_step, lag = self.config.rollout.groups_per_step, self.config.rollout.lag
        overlaps = lag > 0 and not self.meshes.colocated

        start, cursor = await self.roles.resume("rl")
        await self.roles.begin(start)
        prompts = self.prompts("rl", cursor if start else None)
        await weights.sync(start)
        self.began(start)
        if start in (0, last) and (score := await self.evaluate()) is not None:
            self.report.eval(start, score)

        stream = self.stream(prompts, self.ledger(start, cursor), start + 1, last)
        async with aclosing(stream):
            stream.admit(groups_per_step * (lag + 1))

            for step in self.stop.steps(start + 1, last):
                if self.config.training.stream_groups:
                    groups, samples, stats = await weights.beside(self.streamed(stream, step))
                else:
                    groups = await weights.beside(stream.take(groups_per_step, step))  # gather
                    await self.meshes.turn_of_trainers()
                    samples = await self.roles.judge(samples_of(groups, algorithm))  # scatter, gather
                    groups, samples = with_advantages(groups, samples, algorithm)
                    stats = await self.roles.step(minibatches(samples, algorithm))  # scatter, reduce
                stream.trained(step, groups)
                admit = partial(stream.admit, groups_per_step)
                sync = await (weights.begin(step, admit) if overlaps else weights.sync(step))  # publish, read
                score = await self.evaluate() if self.evaluates(step) else None
                if not overlaps:
                    admit()
                self.report.step(step, groups, stats, sync, score, dropped=stream.dropped, backlog=stream.backlog)
                hopeless = self.health.after(step, stats, groups, samples, sync.engines)
                await self.keep(step, last, stream.cut, partial(stream.saved, step), hopeless)
        await weights.settle()

    async def fit(self) -> None:
        """sft, dpo, ipo and reward_model: steps over the data set's own answers."""
        kind, last = self.config.algorithm.kind, self.config.training.steps
        start, cursor = await self.roles.resume("rl")
        await self.roles.begin(start)
        examples = self.prompts("rl", cursor if start else None)
        self.began(start)
        if start in (0, last):
            await self.sync(start)
            if (score := await self.evaluate()) is not None:
                self.report.eval(start, score)

        with self.report.fitting(self.config.algorithm.name, start, last):
            for step in self.stop.steps(start + 1, last):
                samples = await self.roles.judge(self.examples(examples, kind, self.config.training.global_batch_size))
                stats = await self.roles.step([samples])
                score = None
                if self.evaluates(step):
                    await self.sync(step)
                    score = await self.evaluate()
                self.report.fitted(step, stats, score)
                await self.keep(step, last, examples.state_dict, hopeless=self.health.after(step, stats))

    async def cold_start(self) -> None:
        """Supervised steps on the task's own answers before RL, for sampling needs something to find."""
        cold = self.config.cold_start
        start, cursor = await self.roles.resume("cold_start")
        if json.loads(cursor).get("enough"):
            return
        self.began(start)
        examples = self.prompts("cold_start", cursor if start else None)
        if start == 0:
            await self.sync(BEFORE_RL)
            if (score := await self.evaluate()) is not None:
                self.report.before_cold_start(score)

        with self.report.fitting("cold start", start, cold.steps):
            for step in self.stop.steps(start + 1, cold.steps, "cold_start"):
                samples = self.examples(examples, "supervised", cold.batch_size)
                self.report.cold_start(step, await self.roles.supervise(samples))
                enough = False
                if cold.stop_at and step % cold.stop_interval == 0:
                    await self.sync(BEFORE_RL)
                    assert self.meshes.generators is not None
                    enough = await self.setup.practice.score(self.meshes.generators) >= cold.stop_at
                state, last = examples.state_dict() | {"enough": enough}, step if enough else cold.steps
                await self.keep(step, last, partial(dict, state), interval=cold.interval)
                if enough:
                    break

    async def keep(
        self,
        step: int,
        last: int,
        state: Callable[[], dict[str, Any]],
        saved: Callable[[], dict[str, Any]] | None = None,
        hopeless: RunError | None = None,
        interval: int = 0,
    ) -> None:
        """A step is over: keep it in memory, on disk, or neither, with this part's `state`. `saved` is asked instead
        before it goes to disk. A pause lasts here, and here a hopeless run ends."""
        await self.roles.snapshot(step, lambda: json.dumps(state()))
        due = step % (interval or self.config.checkpoint.interval) == 0 or self.roles.owes_a_checkpoint
        ends = hopeless is not None and not isinstance(hopeless, Rewind)
        saves = self.stop.saves() or step == last or due or ends
        if saves and await self.roles.save(step, json.dumps((saved or state)()), last=step == last or ends):
            await self.stop.saved(step)
        if hopeless is not None:
            raise hopeless

    async def streamed(self, stream: RolloutStream, step: int) -> tuple[list[Group], list[Sample], StepStats]:
        """A step's update, part by part while the rest of its groups is still sampled."""
        algorithm, training, count = self.config.algorithm, self.config.training, self.config.rollout.groups_per_step
        groups: list[Group] = []
        samples: list[Sample] = []
        async for part in stream.parts(count, step, training.stream_groups):
            judged = await self.roles.judge(samples_of(part, algorithm))
            part, judged = with_advantages(part, judged, algorithm)
            await self.roles.accumulate(judged)
            groups, samples = [*groups, *part], [*samples, *judged]
        return sorted(groups, key=lambda group: group.prompt.id), samples, await self.roles.update()

    # -- parts ------------------------------------------------------------------------------------------------

    def prompts(self, phase: PhaseName, cursor: str | None) -> PromptSource:
        seed = derive(self.config.debug.seed, "prompts", phase)
        source = PromptSource(self.setup.task, self.setup.tokenizer, seed=seed)
        if cursor is not None:
            source.load_state_dict(json.loads(cursor))
        return source

    def examples(self, source: PromptSource, kind: str, count: int) -> list[Sample]:
        return [s for _ in range(count) for s in SAMPLES[kind](source.next(), self.setup.tokenizer)]

    def ledger(self, start: int, cursor: str) -> Ledger:
        ledger, cut = Ledger(self.setup.folder), json.loads(cursor) if start else {}
        ledger.begun(start, cut.get("next", 0), cut.get("open", ()))
        return ledger

    def stream(self, prompts: PromptSource, ledger: Ledger, first: int, last: int) -> RolloutStream:
        assert self.meshes.generators is not None
        reward_model, config, tokenizer = self.meshes.reward_model, self.config, self.setup.tokenizer
        if reward_model is None:
            judge = by_rule(reward_for(config.task.reward), config.rollout.timeout_seconds)
        else:
            judge = by_model(reward_model, config, tokenizer.pad)
        settings = StreamSettings(
            algorithm=config.algorithm,
            rollout=config.rollout,
            sampling=self.setup.sampling,
            seed=config.debug.seed,
            first=first,
            groups=(last - first + 1) * config.rollout.groups_per_step,
            reward_attempts=config.fault.reward_attempts,
            attempt=self.attempt,
        )
        return RolloutStream(settings, self.meshes.generators, prompts, judge, tokenizer.decode, self.clock, ledger)

    async def sync(self, version: int) -> None:
        """To generators that only evaluate; there may be none."""
        if self.weights is not None:
            await self.weights.sync(version)

    def evaluates(self, step: int) -> bool:
        interval = self.config.eval.interval
        return step == self.config.training.steps or (interval > 0 and step % interval == 0)

    async def evaluate(self) -> float | None:
        """The held-out score: what the generators' weights answer greedily, or the share of pairs that a reward model
        orders rightly. None without held-out problems."""
        if not self.setup.heldout.prompts:
            return None
        if self.weights is not None:
            await self.weights.settle()
        with self.clock("eval"):
            if self.config.algorithm.kind == "reward":
                tokenizer = self.setup.tokenizer
                pairs = [s for prompt in self.setup.heldout.prompts for s in SAMPLES["reward"](prompt, tokenizer)]
                return accuracy(scores_of(pairs, await self.roles.scores(pairs)))
            assert self.meshes.generators is not None
            return await self.setup.heldout.score(self.meshes.generators)
