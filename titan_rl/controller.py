"""The controller: one asyncio program that drives every mesh.

    prompts --scatter--> generators --gather--> groups --judge--> samples --pack, scatter--> trainers
                            ^                  reference, teacher, critic                        |
                            +------------- weights: publish, one-sided reads --------------------+

`reinforce` is RL. `fit` learns from given data: supervised examples or preference pairs. `cold_start` makes supervised
steps before RL. All three make their steps in the same `loop`. The stages of an RL step, each a collective on a mesh:

    stage      consumes                   waits for                          unblocked by
    gather     the oldest groups          all of the step's groups           generators and reward functions
    judge      samples of the groups      reference, teacher, critic         their log-probs and values
    update     samples with advantages    trainers and critic                the optimizer's step
    publish    the trainers' weights      a slot without readers             generators that have read an older version
    serve      published weights          generators, unless `overlaps`      one-sided reads, verified in place
    admit      prompts                    generators at the new version      serve
    evaluate   held-out problems          serve                              greedy answers
    keep       the state of the step      snapshots, a checkpoint            trainers and the disk

Staleness is bounded by admission: at most rollout.steps_ahead + 1 steps' worth of groups are in flight, and the next
step's worth is admitted only once the generators hold the weights that the last step made. 0 is exact on-policy
training; above 0 generators sample and take weights while the trainers step.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, aclosing, closing
from functools import partial
from typing import Any

from titan_rl.batch.experience import samples_of, with_advantages
from titan_rl.record.evaluation import Evaluation
from titan_rl.record.ledger import Ledger, bounds_of
from titan_rl.record.run_folder import Resume
from titan_rl.rollout.judges import by_model
from titan_rl.rollout.sampling import StreamSettings
from titan_rl.rollout.session import SessionLimits
from titan_rl.rollout.stream import RolloutStream
from titan_rl.sandbox.local import configure
from titan_rl.tasks.judging import REWARD_ATTEMPTS, grader_rubric, training_rubric
from titan_rl.tasks.prompts import SAMPLES, PromptSource
from titan_rl.train import engine_proof
from titan_rl.train.health import Health
from titan_rl.train.held_out import HeldOut
from titan_rl.train.hf_folder import export_policy
from titan_rl.train.learner import Learner, rows_of
from titan_rl.train.run_parts import RunParts
from titan_rl.train.step_loop import UNMEASURED, StepDone, StepLoop
from titan_rl.wire.reports import SyncStats
from titan_rl.wire.seeds import derive
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
        self.held_out = HeldOut(run, learner)
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

    # -- RL -------------------------------------------------------------------------------------------------------

    async def reinforce(self) -> None:
        """Sample, judge, update, sync; step after step."""
        start, state = await self.learner.resume("rl", self.resume)
        prompts = await self.begin("rl", start, state)
        stream = self.stream(prompts, start, state)
        step, saved = partial(self.rl_step, stream), partial(self.record_save, stream)
        async with aclosing(stream):
            stream.admit(self.config.rollout.groups_per_step * (self.config.rollout.steps_ahead + 1))
            try:
                await self.loop.make_steps("rl", start, self.config.training.steps, step, StepDone(state, saved))
            finally:
                self.record_checksums(stream)  # another attempt may continue after this step
        if not self.stop.requested:
            await self.sync_settled()

    async def rl_step(self, stream: RolloutStream, n: int) -> StepDone | None:
        """Make step n. Return None if a stop gave it up."""
        gathered = await self.stop.in_time(self.gather(stream, n))  # generators -> controller
        if gathered is None:
            return None
        groups, samples = gathered
        if (stats := await self.loop.train(self.learner.update())) is None:  # -> trainers, critic
            return None
        self.record_checksums(stream)
        stream.trained(n, groups)
        served = await self.stop.in_time(self.serve(stream, n))  # trainers -> generators
        sync, evaluations = served or (SyncStats(n), [])
        if not self.overlaps:
            stream.admit(self.config.rollout.groups_per_step)
        self.report.step(n, groups, stats, sync, evaluations, dropped=stream.dropped, backlog=stream.backlog)
        hopeless = self.health.after(n, stats, groups, samples, sync.engines)
        unmeasured = {} if served else {UNMEASURED: self.held_out.due(n)}
        return StepDone(stream.cut() | unmeasured, partial(self.record_save, stream), hopeless)

    async def gather(self, stream: RolloutStream, n: int) -> tuple[list[Group], list[Sample]]:
        """Return the step's groups in the order of their prompts, and their samples, which the trainers have by then if
        the step is streamed."""
        groups, samples = list[Group](), list[Sample]()
        async for part in self.finished(stream, n):
            part, judged = await self.judge(part)  # -> reference, teacher, critic ->
            await self.learner.accumulate(judged)  # -> trainers, if the step is streamed
            groups, samples = [*groups, *part], [*samples, *judged]
        groups.sort(key=lambda group: group.prompt.id)  # parts come in the order in which they finish
        return groups, samples

    async def finished(self, stream: RolloutStream, n: int) -> AsyncIterator[list[Group]]:
        """Yield the step's rewarded groups: all at once, or training.stream_groups at a time as they finish."""
        assert self.weights is not None
        count, size = self.config.rollout.groups_per_step, self.config.training.stream_groups
        if not size:
            groups = await self.weights.beside(stream.take(count, n))
            await self.meshes.turn_of_trainers()
            yield groups
            return
        parts = stream.parts(count, n, size)

        async def next_part() -> list[Group] | None:
            return await anext(parts, None)

        while (part := await self.weights.beside(next_part())) is not None:
            yield part

    async def judge(self, groups: list[Group]) -> tuple[list[Group], list[Sample]]:
        """Return the groups, and their samples with the columns of every role and with advantages."""
        samples = await self.learner.judge(samples_of(groups, self.config.algorithm))
        return with_advantages(groups, samples, self.config.algorithm)

    @property
    def overlaps(self) -> bool:
        """True if generators take weights while the trainers make the next step."""
        return self.config.rollout.steps_ahead > 0 and not self.meshes.colocated

    async def serve(self, stream: RolloutStream, n: int) -> tuple[SyncStats, list[Evaluation]]:
        """Sync the weights of step n, and evaluate them if that is due. A sync that overlaps with the next step admits
        that step's groups when it is done."""
        assert self.weights is not None
        if self.overlaps:
            admit = partial(stream.admit, self.config.rollout.groups_per_step)
            sync = await self.weights.begin_sync(n, admit)
        else:
            sync = await self.weights.sync(n)
        return sync, await self.evaluate(n) if self.held_out.due(n) else []

    def record_checksums(self, stream: RolloutStream) -> None:
        """Write the checksums of the last step's log lines into the ledger."""
        if (written := self.report.written()) is not None:
            stream.logged(written[0], written[1:])

    def record_save(self, stream: RolloutStream, n: int) -> None:
        self.record_checksums(stream)
        stream.saved(n)

    # -- given data -----------------------------------------------------------------------------------------------

    async def fit(self) -> None:
        """Train on the data set's own answers: sft, dpo, ipo and reward_model."""
        last = self.config.training.steps
        start, state = await self.learner.resume("rl", self.resume)
        step = partial(self.fit_step, await self.begin("rl", start, state))
        with self.report.fitting(self.config.algorithm.name, start, last):
            await self.loop.make_steps("rl", start, last, step, StepDone(state))

    async def fit_step(self, examples: PromptSource, n: int) -> StepDone | None:
        await self.meshes.turn_of_trainers()
        batch = self.samples(examples, self.config.algorithm.kind, self.config.training.global_batch_size)
        samples = await self.stop.in_time(self.learner.judge(batch))
        if samples is None or (stats := await self.loop.train(self.learner.step([samples]))) is None:
            return None
        due = self.held_out.due(n)
        evaluations = await self.stop.in_time(self.sync_and_evaluate(n)) if due else []
        self.report.fitted(n, stats, evaluations or [])
        unmeasured = {UNMEASURED: due} if self.stop.given_up and evaluations is None else {}
        return StepDone(examples.state_dict() | unmeasured, hopeless=self.health.after(n, stats))

    async def sync_and_evaluate(self, n: int) -> list[Evaluation]:
        await self.sync(n)
        return await self.evaluate(n)

    async def cold_start(self) -> None:
        """Train on the task's own answers before RL: sampling needs something to find."""
        cold = self.config.cold_start
        start, state = await self.learner.resume("cold_start", self.resume)
        if state.get("enough"):
            return
        examples = await self.begin("cold_start", start, state)
        if state.get(UNMEASURED) and await self.practice() >= cold.stop_at:
            return
        step = partial(self.cold_start_step, examples)
        with self.report.fitting("cold start", start, cold.steps):
            await self.loop.make_steps("cold_start", start, cold.steps, step, StepDone(state))

    async def cold_start_step(self, examples: PromptSource, n: int) -> StepDone | None:
        cold = self.config.cold_start
        await self.meshes.turn_of_trainers()
        batch = self.samples(examples, "supervised", cold.batch_size)
        if (stats := await self.loop.train(self.learner.supervise(batch))) is None:
            return None
        self.report.cold_start(n, stats)
        measures = bool(cold.stop_at) and n % cold.stop_interval == 0
        score = await self.stop.in_time(self.practice()) if measures else 0.0
        enough = measures and score is not None and score >= cold.stop_at
        unmeasured = {UNMEASURED: True} if score is None else {}
        state = examples.state_dict() | {"enough": enough} | unmeasured
        return StepDone(state, hopeless=self.health.after(n, stats, phase="cold_start"), enough=enough)

    def samples(self, source: PromptSource, kind: str, count: int) -> list[Sample]:
        return [s for _ in range(count) for s in SAMPLES[kind](source.next(), self.setup.tokenizer)]

    # -- shared by the phases -------------------------------------------------------------------------------------

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

    async def sync(self, version: int) -> None:
        """Make the generators serve what the trainers hold, if there are generators."""
        if self.weights is not None:
            await self.weights.sync(version)

    async def sync_settled(self) -> None:
        if self.weights is not None:
            await self.weights.settle()

    async def evaluate(self, n: int | None) -> list[Evaluation]:
        """Measure the held-out problems, if there are any, once the generators serve the newest weights. `n`: the step
        that made them."""
        if not self.held_out.sets:
            return []
        await self.sync_settled()
        return await self.held_out.measure(n)

    async def practice(self) -> float:
        """Return the score on training problems."""
        await self.sync(BEFORE_RL)
        return await self.held_out.practice()

    def stream(self, prompts: PromptSource, start: int, cut: dict[str, Any]) -> RolloutStream:
        ledger, bounds = Ledger(self.setup.folder, self.run.terminal.warn), bounds_of(self.config)
        unfinished, bad_rows = cut.get("open", ()), self.setup.task.bad_rows
        ledger.begun(start, cut.get("next", 0), unfinished, attempt=self.attempt, bounds=bounds, bad_rows=bad_rows)
        assert self.meshes.generators is not None
        reward_model, config, tokenizer = self.meshes.reward_model, self.config, self.setup.tokenizer
        if reward_model is None:
            judge = self.setup.judges.judge(training_rubric(config.task), REWARD_ATTEMPTS)
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
            attempt=self.attempt,
            driver=self.meshes.environments,
            limits=SessionLimits.of(config, played=self.meshes.environments is not None),
            warn=self.run.terminal.warn,
            grade=grader and self.setup.judges.judge(grader),
        )
        return RolloutStream(settings, self.meshes.generators, prompts, judge, tokenizer.decode, self.clock, ledger)
