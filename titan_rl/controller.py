"""The controller: one asyncio program that drives every mesh.

    prompts --scatter--> generators --gather--> groups --judge--> samples --pack, scatter--> trainers
                            ^                  reference, teacher, critic                        |
                            +------------- weights: publish, one-sided reads --------------------+

`reinforce` is RL: each call in its `step` is one collective over a mesh. `fit` learns from given data: supervised
examples or preference pairs. `cold_start` makes supervised steps before RL. All three run in the same `loop`.

Staleness is bounded by admission: at most `lag + 1` steps' worth of groups are in flight, and the next step's worth is
admitted only once the generators hold the weights that the last step made. `lag = 0` is exact on-policy training; with
a lag, generators sample and take weights while the trainers step.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, closing
from functools import partial
from typing import Any

from titan_rl.batch.experience import samples_of, with_advantages
from titan_rl.record.evaluation import Answer, Evaluation
from titan_rl.record.ledger import Ledger, bounds_of
from titan_rl.record.run_folder import Resume
from titan_rl.rollout.judges import by_model, ranks_right, scores_of
from titan_rl.rollout.player import Player
from titan_rl.rollout.sampling import StreamSettings
from titan_rl.rollout.session import SessionLimits
from titan_rl.rollout.stream import RolloutStream
from titan_rl.sandbox.local import configure
from titan_rl.tasks.judging import grader_rubric, training_rubric
from titan_rl.tasks.problems import Problems
from titan_rl.tasks.prompts import SAMPLES, PromptSource
from titan_rl.train import engine_proof
from titan_rl.train.best_weights import BestWeights
from titan_rl.train.health import Health
from titan_rl.train.hf_folder import export_policy
from titan_rl.train.learner import Learner, rows_of
from titan_rl.train.run_parts import RunParts
from titan_rl.train.step_loop import UNMEASURED, StepDone, StepLoop
from titan_rl.wire.reports import SyncStats
from titan_rl.wire.seeds import derive
from titan_rl.wire.sessions import Driver, Plays
from titan_rl.wire.types import Group, PhaseName, Sample

BEFORE_RL = -1  # the version of weights during a cold start; RL starts with version 0


class Controller:
    """Drives one attempt at a run, from where it resumes to its end or to a stop. No part holds the controller."""

    def __init__(
        self,
        run: RunParts,
        learner: Learner,
        resume: Resume,
        *,
        attempt: int = 1,
        began: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`attempt` counts the attempts of this process; `began` is called with the step it resumed at."""
        self.run, self.setup, self.config = run, run.setup, run.config
        configure(run.config.sandbox)
        self.meshes, self.weights, self.learner = run.meshes, run.weights, learner
        self.report, self.stop, self.clock = run.report, run.stop, run.clock
        self.health = Health(run.config, run.terminal.warn)
        self.resume, self.attempt, self.began = resume, attempt, began
        self.loop = StepLoop(run, learner, resume)
        self.best = BestWeights(run)
        self.proven = False  # the engines compute what the trainers do
        self.sources = ExitStack()  # closes the sources of prompts

    async def drive(self) -> None:
        """Run the cold start if there is one to run, then the algorithm, then export the policy."""
        with self.sources:
            if self.resume.rl is None and self.config.cold_start.steps > 0:
                await self.cold_start()
            if not self.stop.requested:
                await (self.reinforce() if self.config.algorithm.kind == "rl" else self.fit())
        if not self.stop.requested:
            if (unsound := self.health.at_the_end()) is not None:
                raise unsound
            with self.run.terminal.phase("export to hf/"):
                await export_policy(self.setup, self.meshes.trainers, self.setup.folder / "hf")

    async def judged(self, groups: list[Group]) -> tuple[list[Group], list[Sample]]:
        """Return the groups, and their samples with the columns of every role and with advantages."""
        samples = await self.learner.judge(samples_of(groups, self.config.algorithm))
        return with_advantages(groups, samples, self.config.algorithm)

    async def reinforce(self) -> None:
        """Sample, judge, update, sync; step after step."""
        last, learner = self.config.training.steps, self.learner
        start, kept = await learner.resume("rl", self.resume)
        prompts = await self.begin("rl", start, kept)
        stream = self.stream(prompts, start, kept)

        async def gather(n: int) -> tuple[list[Group], list[Sample]]:
            groups, samples = list[Group](), list[Sample]()
            async for part in self.finished(stream, n):  # generators -> controller
                part, judged = await self.judged(part)  # -> reference, teacher, critic ->
                await learner.accumulate(judged)  # -> trainers, if the step is streamed
                groups, samples = [*groups, *part], [*samples, *judged]
            groups.sort(key=lambda group: group.prompt.id)  # parts come in the order in which they finish
            return groups, samples

        async def serve(n: int) -> tuple[SyncStats, list[Evaluation]]:
            sync = await self.publish(n, stream)  # trainers -> generators
            return sync, await self.evaluate(n) if self.evaluates(n) else []

        async def step(n: int) -> StepDone | None:
            gathered = await self.stop.in_time(gather(n))
            if gathered is None:
                return None
            if (stats := await self.loop.train(learner.update())) is None:  # -> trainers, critic
                return None
            groups, samples = gathered
            log()
            stream.trained(n, groups)
            served = await self.stop.in_time(serve(n))
            sync, found = served or (SyncStats(n), [])
            if not self.overlaps:
                stream.admit(self.config.rollout.groups_per_step)
            dropped, backlog = stream.dropped, stream.backlog
            self.report.step(n, groups, stats, sync, found, dropped=dropped, backlog=backlog)
            hopeless = self.health.after(n, stats, groups, samples, sync.engines)
            unmeasured = {} if served else {UNMEASURED: self.evaluates(n)}
            return StepDone(stream.cut() | unmeasured, partial(saved, n), hopeless)

        def log() -> None:
            if (written := self.report.written()) is not None:
                stream.logged(written[0], written[1:])

        def saved(n: int) -> None:
            log()
            stream.saved(n)

        async with aclosing(stream):
            stream.admit(self.config.rollout.groups_per_step * (self.config.rollout.lag + 1))
            try:
                await self.loop.make_steps("rl", start, last, step, StepDone(kept, partial(saved, start)))
            finally:
                log()  # another attempt may continue after this step
        if not self.stop.requested:
            await self.sync_settled()

    async def fit(self) -> None:
        """Train on the data set's own answers: sft, dpo, ipo and reward_model."""
        kind, training = self.config.algorithm.kind, self.config.training
        start, kept = await self.learner.resume("rl", self.resume)
        examples = await self.begin("rl", start, kept)

        async def measure(n: int) -> list[Evaluation]:
            await self.sync(n)
            return await self.evaluate(n)

        async def step(n: int) -> StepDone | None:
            await self.meshes.turn_of_trainers()
            batch = self.examples(examples, kind, training.global_batch_size)
            samples = await self.stop.in_time(self.learner.judge(batch))
            if samples is None or (stats := await self.loop.train(self.learner.step([samples]))) is None:
                return None
            found = await self.stop.in_time(measure(n)) if self.evaluates(n) else []
            self.report.fitted(n, stats, found or [])
            unmeasured = {UNMEASURED: self.evaluates(n)} if self.stop.given_up and found is None else {}
            return StepDone(examples.state_dict() | unmeasured, hopeless=self.health.after(n, stats))

        with self.report.fitting(self.config.algorithm.name, start, training.steps):
            await self.loop.make_steps("rl", start, training.steps, step, StepDone(kept))

    async def cold_start(self) -> None:
        """Train on the task's own answers before RL: sampling needs something to find."""
        cold = self.config.cold_start
        start, kept = await self.learner.resume("cold_start", self.resume)
        if kept.get("enough"):
            return
        examples = await self.begin("cold_start", start, kept)
        if kept.get(UNMEASURED) and await self.practice() >= cold.stop_at:
            return

        async def step(n: int) -> StepDone | None:
            await self.meshes.turn_of_trainers()
            batch = self.examples(examples, "supervised", cold.batch_size)
            if (stats := await self.loop.train(self.learner.supervise(batch))) is None:
                return None
            self.report.cold_start(n, stats)
            measures = bool(cold.stop_at) and n % cold.stop_interval == 0
            score = await self.stop.in_time(self.practice()) if measures else 0.0
            enough = measures and score is not None and score >= cold.stop_at
            unmeasured = {UNMEASURED: True} if score is None else {}
            state = examples.state_dict() | {"enough": enough} | unmeasured
            return StepDone(state, hopeless=self.health.after(n, stats, phase="cold_start"), enough=enough)

        with self.report.fitting("cold start", start, cold.steps):
            await self.loop.make_steps("cold_start", start, cold.steps, step, StepDone(kept))

    # -- the skeleton of all three --------------------------------------------------------------------------------

    async def begin(self, phase: PhaseName, start: int, kept: dict[str, Any]) -> PromptSource:
        """Give every mesh its weights and evaluate them if this is the first step; return the phase's data."""
        if phase == "rl":
            await self.learner.begin(start)
        seed = derive(self.config.debug.seed, "prompts", phase)
        source = self.sources.enter_context(closing(PromptSource(self.setup.task, self.setup.tokenizer, seed=seed)))
        if start:
            source.load_state_dict(kept)
        version = start if phase == "rl" else BEFORE_RL
        await self.sync(version)
        await self.prove_engines(version)
        self.began(start)
        at_an_end = start == 0 or (phase == "rl" and start == self.config.training.steps)
        if (at_an_end or (phase == "rl" and kept.get(UNMEASURED))) and (
            found := await self.evaluate(start if phase == "rl" else None)
        ):
            if phase == "rl":
                self.report.eval(start, found)
            else:
                self.report.before_cold_start(found)
        await source.warm_up()
        return source

    async def prove_engines(self, version: int) -> None:
        """Raise unless the engines compute what the trainers do, after the first sync of this attempt."""
        generators = self.meshes.generators
        if generators is None or self.proven:
            return
        found = await engine_proof.continuations(self.setup, generators, len(generators.replicas))
        await self.meshes.turn_of_trainers()
        scores = await self.learner.scores([each.sample for each in found])
        gap = engine_proof.gap_of(found, scores, self.config)
        self.proven = True
        self.run.terminal.note(f"generators and trainers agree: log-prob gap {gap:.1e} on one prompt")
        if self.meshes.colocated:
            await self.sync(version)  # wakes the engines

    # -- verbs of the steps ---------------------------------------------------------------------------------------

    async def finished(self, stream: RolloutStream, step: int) -> AsyncIterator[list[Group]]:
        """Gather the step's judged groups: all at once, or training.stream_groups at a time as they finish."""
        assert self.weights is not None
        count, size = self.config.rollout.groups_per_step, self.config.training.stream_groups
        if not size:
            groups = await self.weights.beside(stream.take(count, step))
            await self.meshes.turn_of_trainers()
            yield groups
            return
        parts = stream.parts(count, step, size)

        async def next_part() -> list[Group] | None:
            return await anext(parts, None)

        while (part := await self.weights.beside(next_part())) is not None:
            yield part

    @property
    def overlaps(self) -> bool:
        """True if generators take weights while the trainers make the next step."""
        return self.config.rollout.lag > 0 and not self.meshes.colocated

    async def publish(self, version: int, stream: RolloutStream) -> SyncStats:
        """Sync the weights; if that overlaps with the next step, it also admits that step's groups when it is done."""
        assert self.weights is not None
        if self.overlaps:
            return await self.weights.begin_sync(version, partial(stream.admit, self.config.rollout.groups_per_step))
        return await self.weights.sync(version)

    async def sync(self, version: int) -> None:
        """Make the generators serve what the trainers hold, if there are generators."""
        if self.weights is not None:
            await self.weights.sync(version)

    async def sync_settled(self) -> None:
        if self.weights is not None:
            await self.weights.settle()

    def evaluates(self, step: int) -> bool:
        interval = self.config.eval.interval
        return step == self.config.training.steps or (interval > 0 and step % interval == 0)

    async def evaluate(self, step: int | None) -> list[Evaluation]:
        """Measure the held-out problems (greedy answers, or the pairs that a reward model ranks), then the sets of
        [eval.sets]; nothing if there are none. Keep the weights if they are the best that a `step` made."""
        sets = [problems for problems in (self.setup.heldout, *self.setup.eval_sets) if problems.prompts]
        if not sets:
            return []
        await self.sync_settled()
        with self.clock("eval"):
            found = await self.measured(sets)
        if step is not None:
            await self.best.offer(step, found)
        return found

    async def measured(self, sets: Sequence[Problems]) -> list[Evaluation]:
        if self.config.algorithm.kind == "reward":
            tokenizer = self.setup.tokenizer
            pairs = [s for prompt in self.setup.heldout.prompts for s in SAMPLES["reward"](prompt, tokenizer)]
            ranked = ranks_right(scores_of(pairs, await self.learner.scores(pairs)))
            return [Evaluation("", {i: [Answer(float(right))] for i, right in enumerate(ranked)})]
        return [await problems.measure(self.plays(), self.run.terminal.warn) for problems in sets]

    async def practice(self) -> float:
        """Return the score on training problems."""
        await self.sync(BEFORE_RL)
        temperature = self.config.cold_start.stop_temperature
        return await self.setup.practice.score(self.plays(), self.run.terminal.warn, temperature)

    def driver(self) -> Driver | None:
        """Return what drives rollouts of several turns, in training and in evaluations."""
        return self.meshes.environments

    def session_limits(self) -> SessionLimits:
        return SessionLimits.of(self.config, played=self.meshes.environments is not None)

    def plays(self) -> Plays:
        assert self.meshes.generators is not None
        return Player(
            self.driver(),
            self.meshes.generators,
            self.setup.tokenizer.decode,
            limits=self.session_limits(),
            attempts=self.config.fault.environment_attempts,
        ).alone

    def examples(self, source: PromptSource, kind: str, count: int) -> list[Sample]:
        return [s for _ in range(count) for s in SAMPLES[kind](source.next(), self.setup.tokenizer)]

    def stream(self, prompts: PromptSource, start: int, cut: dict[str, Any]) -> RolloutStream:
        ledger, bounds = Ledger(self.setup.folder, self.run.terminal.warn), bounds_of(self.config)
        unfinished, bad_rows = cut.get("open", ()), self.setup.task.bad_rows
        ledger.begun(start, cut.get("next", 0), unfinished, attempt=self.attempt, bounds=bounds, bad_rows=bad_rows)
        assert self.meshes.generators is not None
        reward_model, config, tokenizer = self.meshes.reward_model, self.config, self.setup.tokenizer
        if reward_model is None:
            judge = self.setup.judges.judge(training_rubric(config.task), config.fault.reward_attempts)
        else:
            judge = by_model(reward_model, config, tokenizer.pad, rows_of(self.setup))
        grader = grader_rubric(config.task)
        settings = StreamSettings(
            algorithm=config.algorithm,
            rollout=config.rollout,
            sampling=self.setup.sampling,
            seed=config.debug.seed,
            first=start + 1,
            groups=(config.training.steps - start) * config.rollout.groups_per_step,
            reward_attempts=config.fault.reward_attempts,
            attempt=self.attempt,
            driver=self.driver(),
            driver_attempts=config.fault.environment_attempts,
            limits=self.session_limits(),
            warn=self.run.terminal.warn,
            grade=grader and self.setup.judges.judge(grader),
        )
        return RolloutStream(settings, self.meshes.generators, prompts, judge, tokenizer.decode, self.clock, ledger)
