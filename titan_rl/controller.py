"""The controller: one asyncio program that drives every mesh.

    prompts --scatter--> generators --gather--> groups --judge--> samples --pack, scatter--> trainers
                            ^                  reference, teacher, critic                        |
                            +------------- weights: publish, one-sided reads --------------------+

`reinforce` is RL. `fit` learns from a data set: supervised examples or preference pairs. `cold_start` makes supervised
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

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import islice
from typing import Any

from titan_rl.preflight.memory import measured_trainer
from titan_rl.record.evaluation import Evaluation
from titan_rl.record.run_folder import Resume
from titan_rl.rollout.stream import RolloutStream
from titan_rl.tasks.prompts import SAMPLES, PromptSource, supervised
from titan_rl.train.health import Health
from titan_rl.train.hf_folder import card_of, export_policy
from titan_rl.train.run_parts import RunParts
from titan_rl.train.step_loop import UNMEASURED, StepDone, StepLoop
from titan_rl.train.verbs import Verbs
from titan_rl.wire.reports import SyncStats
from titan_rl.wire.types import Group, PhaseName, Prompt, Sample

NO_PROMPTS: Mapping[PhaseName, Collection[int]] = {"cold_start": (), "rl": ()}


class Controller:
    """Drives one attempt at a run, from where it resumes to its end or to a stop. No part holds the controller."""

    def __init__(
        self,
        run: RunParts,
        verbs: Verbs,
        resume: Resume,
        *,
        attempt: int = 1,
        began: Callable[[int], None] = lambda step: None,
        bad_prompts: Mapping[PhaseName, Collection[int]] = NO_PROMPTS,
    ) -> None:
        """`attempt` counts the attempts of this process; `began` is called with the step it resumed at; steps with the
        ids in `bad_prompts` were undone."""
        self.run, self.setup, self.config = run, run.setup, run.config
        self.verbs, self.meshes, self.weights, self.learner = verbs, run.meshes, run.weights, verbs.learner
        self.report, self.stop, self.clock = run.report, run.stop, run.clock
        self.health = Health(run.config, run.terminal.warn, run.report.cause, self.note_memory)
        self.resume, self.attempt, self.began, self.bad_prompts = resume, attempt, began, bad_prompts
        self.loop = StepLoop(run, verbs.learner, resume)
        self.held_out = verbs.held_out

    async def drive(self) -> None:
        """Run the cold start if there is one to run, then the algorithm, then export the policy."""
        if self.resume.rl is None and self.config.cold_start.steps > 0:
            await self.cold_start()
        if not self.stop.requested:
            await (self.reinforce() if self.config.algorithm.kind == "rl" else self.fit())
        if not self.stop.requested:
            self.health.raise_if_last_step_unsound()
            with self.run.terminal.phase("export to hf/"):
                final = self.setup.folder / "hf"
                await export_policy(self.setup, self.meshes.trainers, final, card=card_of(self.setup))

    def note_memory(self, metrics: Mapping[str, float]) -> None:
        setup = self.setup
        self.run.terminal.note(measured_trainer(setup.resolved, setup.shape, metrics, setup.adapters))

    # -- RL -------------------------------------------------------------------------------------------------------

    async def reinforce(self) -> None:
        """Sample, judge, update, sync; step after step."""
        start, state = await self.learner.resume("rl", self.resume)
        prompts = await self.begin("rl", start, state)
        stream = self.stream(prompts, start, state)
        before = StepDone(state, on_save=partial(self.record_save, stream))
        step = partial(self.rl_step, stream)
        async with aclosing(stream):
            stream.admit(self.config.rollout.groups_per_step * (self.config.rollout.steps_ahead + 1))
            try:
                await self.loop.make_steps("rl", start, self.config.training.steps, step, before)
            finally:
                self.record_checksums(stream)  # another attempt may continue after this step
        if not self.stop.requested:
            await self.verbs.wait_for_sync()

    async def rl_step(self, stream: RolloutStream, n: int) -> StepDone | None:
        """Make step n. Return None if a stop interrupted it before its update was made."""
        gathered = await self.stop.in_time(self.gather(stream, n))  # generators -> controller
        if gathered is None:
            return None
        groups, samples = gathered
        stats = await self.loop.train(self.learner.update())  # -> trainers, critic
        if stats is None:
            return None
        self.record_checksums(stream)
        stream.trained(n, groups)
        served = await self.stop.in_time(self.serve(stream, n))  # trainers -> generators
        sync, evaluations = served or (SyncStats(n), [])
        if not self.overlaps:
            stream.admit(self.config.rollout.groups_per_step)
        stats = self.verbs.with_opponents(stats)
        self.report.step(n, groups, stats, sync, evaluations, dropped=stream.dropped, backlog=stream.backlog)
        prompts = [group.prompt.id for group in groups]
        hopeless = self.health.after(n, stats, groups, samples, sync.engines, prompts=prompts)
        unmeasured = {} if served else {UNMEASURED: self.held_out.due(n)}
        state = stream.cut() | self.verbs.state | unmeasured
        return StepDone(state, partial(self.record_save, stream), hopeless)

    async def gather(self, stream: RolloutStream, n: int) -> tuple[list[Group], list[Sample]]:
        """Return the step's groups in the order of their prompts, and their samples. Of a streamed step the trainers
        have accumulated the samples by then."""
        groups, samples = list[Group](), list[Sample]()
        async for part in self.rewarded_groups(stream, n):
            judged_groups, judged_samples = await self.verbs.learn_from(part)  # -> reference, teacher, critic ->
            await self.learner.accumulate(judged_samples)  # -> trainers, if the step is streamed
            groups += judged_groups
            samples += judged_samples
        groups.sort(key=lambda group: group.prompt.id)  # parts come in the order in which they finish
        return groups, samples

    async def rewarded_groups(self, stream: RolloutStream, n: int) -> AsyncIterator[list[Group]]:
        """Yield the step's groups: all at once, or training.stream_groups at a time as they finish. Raise at once if
        the weight sync that runs meanwhile fails."""
        assert self.weights is not None
        count, size = self.config.rollout.groups_per_step, self.config.training.stream_groups
        if not size:
            groups = await self.weights.or_sync_error(stream.take(count, n))
            await self.meshes.turn_of_trainers()
            yield groups
            return
        parts = stream.parts(count, n, size)
        while (part := await self.weights.or_sync_error(anext(parts, None))) is not None:
            yield part

    @property
    def overlaps(self) -> bool:
        """True if generators take weights while the trainers make the next step."""
        return self.config.rollout.steps_ahead > 0 and not self.meshes.colocated

    async def serve(self, stream: RolloutStream, n: int) -> tuple[SyncStats, list[Evaluation]]:
        """Sync the weights of step n, and evaluate them if that is due. A sync that overlaps with the next step admits
        that step's groups when it is done."""
        assert self.weights is not None
        await self.verbs.keep(n)
        if self.overlaps:
            admit = partial(stream.admit, self.config.rollout.groups_per_step)
            sync = await self.weights.begin_sync(n, admit)
        else:
            sync = await self.weights.sync(n)
        return sync, await self.verbs.evaluate(n) if self.held_out.due(n) else []

    def record_checksums(self, stream: RolloutStream) -> None:
        """Write the checksums of the last step's log lines into the ledger."""
        if (written := self.report.written()) is not None:
            stream.logged(written[0], written[1:])

    def record_save(self, stream: RolloutStream, n: int) -> None:
        self.record_checksums(stream)
        stream.saved(n)

    # -- data with answers ----------------------------------------------------------------------------------------

    async def fit(self) -> None:
        """Train on the data set's own answers: examples, or pairs."""
        last = self.config.training.steps
        start, state = await self.learner.resume("rl", self.resume)
        step = partial(self.fit_step, await self.begin("rl", start, state))
        with self.report.fitting(self.config.algorithm.name, start, last):
            await self.loop.make_steps("rl", start, last, step, StepDone(state))

    async def fit_step(self, examples: PromptSource, n: int) -> StepDone | None:
        await self.meshes.turn_of_trainers()
        prompts = self.next_examples(examples, "rl", self.config.training.global_batch_size)
        batch = self.samples(prompts, self.config.algorithm.kind)
        samples = await self.stop.in_time(self.learner.judge(batch))
        if samples is None:
            return None
        stats = await self.loop.train(self.learner.step([samples]))
        if stats is None:
            return None
        evaluations = await self.stop.in_time(self.sync_and_evaluate(n)) if self.held_out.due(n) else []
        self.report.fitted(n, stats, evaluations or [])
        unmeasured = {UNMEASURED: True} if evaluations is None else {}
        hopeless = self.health.after(n, stats, prompts=[prompt.id for prompt in prompts])
        return StepDone(examples.state_dict() | unmeasured, hopeless=hopeless)

    async def sync_and_evaluate(self, n: int) -> list[Evaluation]:
        await self.verbs.sync(n)
        return await self.verbs.evaluate(n)

    async def cold_start(self) -> None:
        """Train on the task's own answers before RL: sampling needs something to find."""
        cold = self.config.cold_start
        start, state = await self.learner.resume("cold_start", self.resume)
        if state.get("enough"):
            return
        examples = await self.begin("cold_start", start, state)
        if state.get(UNMEASURED) and await self.verbs.practice() >= cold.stop_at:
            return
        step = partial(self.cold_start_step, examples)
        with self.report.fitting("cold start", start, cold.steps):
            await self.loop.make_steps("cold_start", start, cold.steps, step, StepDone(state))

    async def cold_start_step(self, examples: PromptSource, n: int) -> StepDone | None:
        cold = self.config.cold_start
        await self.meshes.turn_of_trainers()
        prompts = self.next_examples(examples, "cold_start", cold.batch_size)
        batch = self.samples(prompts, "supervised")
        if (stats := await self.loop.train(self.learner.supervise(batch))) is None:
            return None
        self.report.cold_start(n, stats)
        measures = bool(cold.stop_at) and n % cold.stop_interval == 0
        score = await self.stop.in_time(self.verbs.practice()) if measures else 0.0
        enough = measures and score is not None and score >= cold.stop_at
        unmeasured = {UNMEASURED: True} if score is None else {}
        state = examples.state_dict() | {"enough": enough} | unmeasured
        hopeless = self.health.after(n, stats, phase="cold_start", prompts=[prompt.id for prompt in prompts])
        return StepDone(state, hopeless=hopeless, enough=enough)

    def next_examples(self, source: PromptSource, phase: PhaseName, count: int) -> list[Prompt]:
        """Return the next examples whose step was not undone."""
        good = (prompt for prompt in iter(source.next, None) if prompt.id not in self.bad_prompts[phase])
        return list(islice(good, count))

    def samples(self, prompts: Sequence[Prompt], kind: str) -> list[Sample]:
        tokenizer = self.setup.tokenizer
        if kind == "supervised":
            openings = self.setup.task.openings
            made = [(p, sample) for p in prompts for sample in supervised(p, tokenizer, openings.get(p.where))]
            samples = [sample for _, sample in made]
            if self.learner.teacher is not None and self.config.cold_start.teacher_prompts:
                samples += self.learner.teacher.supervised(made)
            return samples
        return [sample for prompt in prompts for sample in SAMPLES[kind](prompt, tokenizer)]

    # -- shared by the phases -------------------------------------------------------------------------------------

    async def begin(self, phase: PhaseName, start: int, state: dict[str, Any]) -> PromptSource:
        """Give every mesh its weights, and return the phase's prompts. Evaluate first if no training precedes or
        follows, or if a stop cut the evaluation of step `start` short."""
        rl = phase == "rl"
        prompts = await self.verbs.begin(phase, start, state)
        self.began(start)
        if rl and (start in (0, self.config.training.steps) or state.get(UNMEASURED)):
            if evaluations := await self.verbs.evaluate(start):
                self.report.eval(start, evaluations)
        elif start == 0 and (evaluations := await self.verbs.evaluate(None)):
            self.report.before_cold_start(evaluations)
        return prompts

    def stream(self, prompts: PromptSource, start: int, cut: dict[str, Any]) -> RolloutStream:
        """Open the ledger, and return the stream that samples the rest of the run's groups."""
        assert self.meshes.generators is not None
        ledger = self.verbs.ledger(start, cut, self.attempt)
        settings = self.verbs.sampling(start, attempt=self.attempt, bad_prompts=self.bad_prompts["rl"])
        judge, decode = self.verbs.judge(), self.setup.tokenizer.decode
        return RolloutStream(settings, self.meshes.generators, prompts, judge, decode, self.clock, ledger)
