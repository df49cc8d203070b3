"""Ends a run that no longer makes progress: steps in a row with nothing to learn, or with numbers that are not finite.
Reports ranks that are slower than their peers, and once what a trainer takes of its GPU."""

import math
from collections.abc import Callable, Mapping, Sequence

from titan_rl.batch.experience import dead
from titan_rl.config.sections import Config
from titan_rl.train.stragglers import STRAGGLER_FACTOR, STRAGGLER_STEPS, Stragglers
from titan_rl.wire.errors import RunError
from titan_rl.wire.program import WHY_PAGE, why_command
from titan_rl.wire.reports import COMPILED, MEMORY, EngineStats, StepStats
from titan_rl.wire.types import Group, PhaseName, Sample

MEMORY_STEP = 3  # by then an attempt has its optimizer states and the allocator its blocks
REMEDY = "A smaller learning rate, float32 instead of bfloat16, or rewards without extremes may help."


class Rewind(RunError):
    """Asks to undo the latest steps and to continue from before them, without their prompts."""

    def __init__(
        self, headline: str, details: str, *, before: int, phase: PhaseName = "rl", prompts: Sequence[int] = ()
    ) -> None:
        super().__init__(headline, details)
        self.before = before  # the first step to undo
        self.phase: PhaseName = phase
        self.prompts = prompts  # ids of the undone steps' prompts: the same ones would give the same steps again


class Ruined(RunError):
    """The weights are no good, so no checkpoint of them may replace an older one."""


class Health:
    def __init__(
        self,
        config: Config,
        warn: Callable[[str], None],
        cause: Callable[[], str] = str,
        memory: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    ) -> None:
        """`cause` returns why the steps so far taught nothing, or "". `memory` gets the memory/* metrics of a step on
        GPUs, once."""
        self._warn, self._cause, self._memory, self._steps = warn, cause, memory, 0
        self._more = f"`{why_command(config.job.dump_folder)}` names causes and samples; {WHY_PAGE} explains them."
        self._ranks = Stragglers(STRAGGLER_FACTOR, STRAGGLER_STEPS)
        self._replicas = Stragglers(STRAGGLER_FACTOR, STRAGGLER_STEPS)
        self._most_dead, self._most_bad = config.algorithm.max_dead_steps, config.fault.max_bad_steps
        self._rolls_back = config.fault.on_bad_steps == "rollback"
        self._dead = self._bad = self._unsound = 0  # steps in a row
        self._bad_prompts: list[int] = []  # ids of the prompts of these bad steps
        self._last_problem = ""  # names the numbers of the last step that are not finite

    def after(
        self,
        step: int,
        stats: StepStats,
        groups: Sequence[Group] = (),
        samples: Sequence[Sample] = (),
        engines: Mapping[str, EngineStats] | None = None,
        phase: PhaseName = "rl",
        prompts: Sequence[int] = (),
    ) -> RunError | None:
        """Return why the run cannot continue after this step, or None. `prompts`: ids of what the step trained on."""
        paces = {name: e.seconds / e.steps for name, e in (engines or {}).items() if e.steps}
        ranks = {} if stats.hardware.get(COMPILED) else stats.ranks  # compiling takes longer than a step
        for straggler in [*self._ranks.seen(step, ranks), *self._replicas.seen(step, paces)]:
            self._warn(straggler)
        self._steps += 1
        if self._steps == MEMORY_STEP and MEMORY in stats.hardware:
            self._memory(stats.hardware)
        unsound, all_of_them = _unsound_samples(groups)
        if unsound:
            self._warn(f"step {step}: {unsound}; nothing is learnt from these tokens")
        finite_loss = math.isfinite(stats.loss)
        bad = stats.skipped > 0 or not finite_loss or not math.isfinite(stats.grad_norm)
        self._last_problem = unsound if all_of_them else ""
        if bad:
            self._last_problem = f"its loss was {stats.loss:g}, its gradient's norm {stats.grad_norm:g}"
        self._dead = self._dead + 1 if samples and dead(samples) else 0
        self._bad = self._bad + 1 if bad else 0
        self._bad_prompts = [*self._bad_prompts, *prompts] if bad else []
        self._unsound = self._unsound + 1 if unsound else 0
        if 0 < self._most_bad <= self._unsound:
            return Ruined(
                f"step {step}: {unsound}",
                f"{self._unsound} steps in a row were like that. No checkpoint was saved after them. The weights are "
                f"ruined, or the replica computes wrongly. {REMEDY} fault.max_bad_steps sets the limit. {self._more}",
            )
        if 0 < self._most_bad <= self._bad:
            return self._bad_steps(step, finite_loss, phase)
        if 0 < self._most_dead <= self._dead:
            cause = self._cause() or "the metrics do not show why"
            return RunError(
                f"{self._dead} steps in a row had no learning signal: the rewards within every group were equal",
                f"{cause[0].upper()}{cause[1:]}. The last step's first group: {groups[0].rewards}. A checkpoint was "
                "saved. algorithm.max_dead_steps sets the limit; dynamic_sampling replaces such groups. "
                f"{self._more}",
                again=True,
            )
        return None

    def raise_if_last_step_unsound(self) -> None:
        """Raise if the last step of a finished run had numbers that are not finite."""
        if self._last_problem:
            raise Ruined(f"the last step was not sound: {self._last_problem}", f"Nothing was exported to hf/. {REMEDY}")

    def _bad_steps(self, step: int, finite_loss: bool, phase: PhaseName) -> RunError:
        what = f"{self._bad} steps in a row had a {'gradient' if finite_loss else 'loss'} that is not finite"
        if self._rolls_back:
            before = step - self._bad + 1
            return Rewind(
                what,
                'fault.on_bad_steps = "rollback" rewinds the run.',
                before=before,
                phase=phase,
                prompts=self._bad_prompts,
            )
        limit = f"{REMEDY} fault.max_bad_steps sets the limit. {self._more}"
        if finite_loss:
            return RunError(
                what,
                f"Their updates were skipped: the weights are those after step {step - self._bad}, and their loss is "
                f"finite. A checkpoint was saved. {limit}",
            )
        first = f"step {step - self._bad + 1} of the {'cold start' if phase == 'cold_start' else 'run'}"
        return Ruined(
            what, f"The weights that {first} began with are ruined: no checkpoint was saved after this. {limit}"
        )


def _unsound_samples(groups: Sequence[Group]) -> tuple[str, bool]:
    """Return which sampled tokens have a log-prob that is not finite, or "", and whether all of them have."""
    bad = total = 0
    first = ""
    for group in groups:
        for sample, rollout in enumerate(group.rollouts):
            for completion in (turn.completion for turn in rollout.turns):
                total += len(completion.logprobs)
                if not completion.finite:
                    bad += sum(not math.isfinite(p) for p in completion.logprobs)
                    first = (
                        first or f"sample {sample} of prompt {group.prompt.id}, by {completion.replica or 'unknown'}"
                    )
    if not bad:
        return "", False
    return f"{bad} of {total} sampled tokens have a log-prob that is not finite, first in {first}", bad == total
