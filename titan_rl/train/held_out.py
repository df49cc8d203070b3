"""Measures problems that are not trained on, and keeps the weights that answer them best."""

from titan_rl.record.evaluation import Answer, Evaluation
from titan_rl.rollout.judges import ranks_right, scores_of
from titan_rl.rollout.player import DRIVER_ATTEMPTS, Casts, Player, no_opponents
from titan_rl.rollout.session import SessionLimits
from titan_rl.tasks.prompts import SAMPLES
from titan_rl.train.best_weights import BestWeights
from titan_rl.train.learner import Learner
from titan_rl.train.run_parts import RunParts
from titan_rl.wire.sessions import Plays


class HeldOut:
    def __init__(self, run: RunParts, learner: Learner, cast: Casts = no_opponents) -> None:
        self._cast = cast
        self._run, self._learner, self._config, self._setup = run, learner, run.config, run.setup
        self._best = BestWeights(run)
        self.sets = [problems for problems in (run.setup.heldout, *run.setup.eval_sets) if problems.prompts]

    def due(self, step: int) -> bool:
        """Return True if the config asks for an evaluation after this step."""
        interval = self._config.eval.interval
        return step == self._config.training.steps or (interval > 0 and step % interval == 0)

    async def measure(self, step: int | None) -> list[Evaluation]:
        """Measure the held-out problems (greedy answers, or the pairs that a reward model ranks), then the sets of
        [eval.sets]. Keep the weights if they are the best that a `step` made."""
        with self._run.clock("eval"):
            evaluations = await self._evaluations()
        if step is not None:
            await self._best.offer(step, evaluations)
        return evaluations

    async def practice(self) -> float:
        """Return the score on training problems."""
        temperature = self._config.cold_start.stop_temperature
        return await self._setup.practice.score(self._plays(), self._run.terminal.warn, temperature)

    async def _evaluations(self) -> list[Evaluation]:
        if self._config.algorithm.kind == "reward":
            tokenizer = self._setup.tokenizer
            pairs = [s for prompt in self._setup.heldout.prompts for s in SAMPLES["reward"](prompt, tokenizer)]
            ranked = ranks_right(scores_of(pairs, await self._learner.scores(pairs)))
            return [Evaluation("", {i: [Answer(float(right))] for i, right in enumerate(ranked)})]
        return [await problems.measure(self._plays(), self._run.terminal.warn) for problems in self.sets]

    def _plays(self) -> Plays:
        meshes = self._run.meshes
        assert meshes.generators is not None
        return Player(
            meshes.environments,
            meshes.generators,
            self._setup.tokenizer.decode,
            limits=SessionLimits.of(self._config, played=meshes.environments is not None),
            attempts=DRIVER_ATTEMPTS,
            cast=self._cast,
            shares=self._run.shares,
        ).play_for_evaluation
