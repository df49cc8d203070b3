"""Ends a run that no longer makes progress: steps in a row with nothing to learn or without a finite gradient. Reports
ranks that are slower than their peers."""

from collections.abc import Callable, Mapping, Sequence

from titan_rl.batch.experience import dead
from titan_rl.config.sections import Config
from titan_rl.train.stragglers import Stragglers
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import EngineStats, Group, Sample, StepStats


class Rewind(RunError):
    """Asks to undo the latest steps and to continue from before them."""

    def __init__(self, headline: str, details: str, *, before: int) -> None:
        super().__init__(headline, details)
        self.before = before  # the first step to undo


class Health:
    def __init__(self, config: Config, warn: Callable[[str], None]) -> None:
        self._warn = warn
        fault = config.fault
        self._ranks = Stragglers(fault.straggler_factor, fault.straggler_steps)
        self._replicas = Stragglers(fault.straggler_factor, fault.straggler_steps)
        self._most_dead, self._most_bad = config.algorithm.max_dead_steps, config.fault.max_bad_steps
        self._rolls_back = config.fault.on_bad_steps == "rollback"
        self._dead = self._bad = 0

    def after(
        self,
        step: int,
        stats: StepStats,
        groups: Sequence[Group] = (),
        samples: Sequence[Sample] = (),
        engines: Mapping[str, EngineStats] | None = None,
    ) -> RunError | None:
        """Return why the run cannot continue after this step, or None."""
        paces = {name: e.seconds / e.steps for name, e in (engines or {}).items() if e.steps}
        for straggler in [*self._ranks.seen(step, stats.ranks), *self._replicas.seen(step, paces)]:
            self._warn(straggler)
        self._dead = self._dead + 1 if samples and dead(samples) else 0
        self._bad = self._bad + 1 if stats.skipped else 0
        if 0 < self._most_bad <= self._bad:
            what = f"{self._bad} steps in a row had a gradient that is not finite"
            if self._rolls_back:
                return Rewind(what, 'fault.on_bad_steps = "rollback" rewinds the run.', before=step - self._bad + 1)
            return RunError(
                what,
                "Their updates were skipped, so the weights are still good; a checkpoint was saved. A smaller "
                "optimizer.lr, float32 instead of bfloat16, or rewards without extremes may help. "
                "fault.max_bad_steps sets the limit.",
            )
        if 0 < self._most_dead <= self._dead:
            return RunError(
                f"{self._dead} steps in a row had no learning signal: the rewards within every group were equal",
                f"The last step's first group: {groups[0].rewards}. The task may be solved, too hard, or its reward "
                "constant. A checkpoint was saved. algorithm.max_dead_steps sets the limit; dynamic_sampling replaces "
                "such groups.",
            )
        return None
