"""The verbs of a run. The controller drives them, and so does a user's own loop (titan_rl/api.py).

    begin ── prompts ── play, score ── learn_from ── sync ── evaluate
             task       generators,    roles,        trainers to    generators
                        judges         trainers      generators

Each is one collective over a mesh, or several at the same time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from titan_rl.batch.experience import Estimate, samples_of, with_advantages
from titan_rl.batch.own_advantages import estimate_of
from titan_rl.batch.own_filter import filter_of
from titan_rl.batch.role_means import RoleMeans
from titan_rl.batch.seats import seat_groups, with_seats
from titan_rl.preflight.checks.parts import runs_code
from titan_rl.record.config_history import cuts
from titan_rl.record.evaluation import Evaluation
from titan_rl.record.ledger import Ledger, bounds_of
from titan_rl.rollout.judges import by_model
from titan_rl.rollout.player import no_opponents
from titan_rl.rollout.sampling import StreamSettings
from titan_rl.rollout.session import SessionLimits
from titan_rl.tasks.judging import REWARD_ATTEMPTS, grader_rubric, training_rubric
from titan_rl.tasks.prompts import PromptSource
from titan_rl.train import engine_proof
from titan_rl.train.held_out import HeldOut
from titan_rl.train.learner import Learner
from titan_rl.train.run_parts import RunParts
from titan_rl.wire import parts
from titan_rl.wire.reports import StepStats
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import IMAGES, Group, Judge, PhaseName, Sample
from titan_rl.wire.user_functions import load

ROLE_MEANS, OPPONENTS = "role_means", "opponents"  # in a saved state
BEFORE_RL = -1  # the version of weights during a cold start; RL starts with version 0


class Verbs:
    """One attempt's calls to the meshes."""

    def __init__(self, run: RunParts, learner: Learner) -> None:
        self.run, self.setup, self.config = run, run.setup, run.config
        self.meshes, self.weights, self.learner = run.meshes, run.weights, learner
        if runs_code(run.config) and (configure := parts.part("sandbox settings")):
            configure(run.config.sandbox)
        self.opponents = None
        if run.config.opponents.pool:
            make = parts.needed_part("opponents", "opponents.pool")
            self.opponents = make(run.config, run.setup.folder, run.meshes.trainers)
        self.held_out = HeldOut(run, learner, self.opponents.cast_held_out if self.opponents else no_opponents)
        self._estimate: Estimate | None = None  # a user's, if algorithm.advantage names it
        if (algorithm := run.config.algorithm).own_advantage:
            own = load(algorithm.advantage, "algorithm.advantage")
            self._estimate = estimate_of(own, f'algorithm.advantage = "{algorithm.advantage}"')
        self.keeps = (
            filter_of(load(own, "task.filter"), f'task.filter = "{own}"') if (own := run.config.task.filter) else None
        )
        self.engines_proven = False  # their log-probs equal the trainers'
        self.role_means = RoleMeans(run.config.algorithm.role_decay)

    async def begin(self, phase: PhaseName, start: int, state: Mapping[str, Any]) -> PromptSource:
        """Give every mesh its weights, and return the phase's prompts."""
        rl = phase == "rl"
        if rl:
            await self.learner.begin(start)
        prompts = PromptSource(
            self.setup.task, self.setup.tokenizer, seed=derive(self.config.debug.seed, "prompts", phase)
        )
        if start:
            prompts.load_state_dict(dict(state))
            self.role_means.state = state.get(ROLE_MEANS, {})
        if rl and self.opponents is not None:
            await self.opponents.begin(start, state.get(OPPONENTS, {}) if start else {})
        version = start if rl else BEFORE_RL
        await self.sync(version)
        await self.prove_engines(version)
        return prompts

    @property
    def state(self) -> dict[str, Any]:
        """The part of a saved state that `begin` continues with, besides the stream's cut."""
        found: dict[str, Any] = {ROLE_MEANS: means} if (means := self.role_means.state) else {}
        return found | ({OPPONENTS: self.opponents.state} if self.opponents is not None else {})

    async def keep(self, step: int) -> None:
        """Keep the policy that `step` made as a later opponent, if it is due."""
        if self.opponents is not None:
            await self.opponents.keep(step)

    def with_opponents(self, stats: StepStats) -> StepStats:
        """Return a step's report with the metrics of opponents."""
        return stats if self.opponents is None else replace(stats, metrics=stats.metrics | self.opponents.metrics)

    async def prove_engines(self, version: int) -> None:
        """Raise unless the engines give the trainers' log-probs, after the first sync of this attempt."""
        generators = self.meshes.generators
        if generators is None or self.engines_proven:
            return
        if not generators.replicas:  # the only one was lost together with the trainers: its successor is asked
            await generators.settled()
        continuations = await engine_proof.sample_continuations(self.setup, generators, len(generators.replicas))
        sight: Any = None
        if self.config.model.vision != "none":
            begin = parts.needed_part("proof of sight", "model.vision")
            sight = begin(continuations[0], self.setup.folder / IMAGES)
            await sight.ask_engines(generators)
        await self.meshes.turn_of_trainers()
        scores = await self.learner.scores([continuation.sample for continuation in continuations])
        gap = engine_proof.logprob_gap(continuations, scores, self.config)
        self.run.terminal.note(f"generators and trainers agree: log-prob gap {gap:.1e} on one prompt")
        if sight:
            self.run.terminal.note(await sight.proven(self.meshes.trainers, self.learner.scores))
        self.engines_proven = True
        if self.meshes.colocated:
            await self.sync(version)  # wakes the engines

    async def learn_from(
        self, groups: Sequence[Group], estimate: Estimate | None = None
    ) -> tuple[list[Group], list[Sample]]:
        """Return the groups, and their samples with the columns of every role and with advantages: the algorithm's, or
        a user's `estimate`."""
        algorithm, trained = self.config.algorithm, seat_groups(groups)
        samples = await self.learner.judge(samples_of(trained, algorithm), trained)
        weights = training_rubric(self.config.task).weights
        found = with_advantages(trained, samples, algorithm, weights, estimate or self._estimate, self.role_means)
        if self.opponents is not None:
            self.opponents.learned_from(groups)
        return with_seats(groups, *found), found[1]

    async def sync(self, version: int) -> None:
        """Make the generators serve what the trainers hold, if there are generators."""
        if self.weights is not None:
            await self.weights.sync(version)

    async def wait_for_sync(self) -> None:
        if self.weights is not None:
            await self.weights.settle()

    async def evaluate(self, n: int | None) -> list[Evaluation]:
        """Measure the held-out problems, if there are any, once the generators serve the newest weights. `n`: the step
        that made them."""
        if not self.held_out.sets:
            return []
        await self.wait_for_sync()
        return await self.held_out.measure(n)

    async def practice(self) -> float:
        """Return the score on training problems."""
        await self.sync(BEFORE_RL)
        return await self.held_out.practice()

    def ledger(self, start: int, cut: Mapping[str, Any], attempt: int, *, own_loop: bool = False) -> Ledger:
        """Open the ledger of an attempt that continues after step `start`, at the cut of that step. `own_loop`: of the
        user's."""
        ledger = Ledger(self.setup.folder, self.run.terminal.warn)
        ledger.begun(
            start,
            cut.get("next", 0),
            cut.get("open", ()),
            attempt=attempt,
            bounds=bounds_of(self.config),
            bad_rows=self.setup.task.bad_rows,
            changed=next((cut.changed for cut in cuts(self.setup.folder) if cut.step == start), {}),
            own_loop=own_loop,
        )
        return ledger

    def judge(self) -> Judge:
        """Return the judge of training answers: a reward model, or the task's rewards."""
        if (model := self.meshes.reward_model) is not None:
            return by_model(model, self.config, self.setup.tokenizer.pad, self.learner.packer.rows)
        return self.setup.judges.judge(training_rubric(self.config.task), REWARD_ATTEMPTS)

    def sampling(self, start: int, *, attempt: int, bad_prompts: Collection[int] = ()) -> StreamSettings:
        """Return how the groups of the steps after `start` are sampled and scored."""
        config, warn = self.config, self.run.terminal.warn
        grader = grader_rubric(config.task)
        return StreamSettings(
            algorithm=config.algorithm,
            weights=training_rubric(config.task).weights,
            correct_at=config.curriculum.correct_at,
            rollout=config.rollout,
            sampling=self.setup.sampling,
            seed=config.debug.seed,
            first=start + 1,
            groups=(config.training.steps - start) * config.rollout.groups_per_step,
            attempt=attempt,
            bad_prompts=frozenset(bad_prompts),
            driver=self.meshes.environments,
            limits=SessionLimits.of(config, played=self.meshes.environments is not None),
            warn=warn,
            keeps=self.keeps,
            cast=self.opponents.cast if self.opponents else no_opponents,
            shares=self.run.shares,
            grade=grader and self.setup.judges.judge(grader),
            modelled=self.meshes.reward_model is not None,
        )
