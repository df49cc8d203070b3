"""Lists an expert's objections to a plan, and finds a plan that costs less."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from titan_rl.tools.plan.choose import Case, Keys, Plan, plans, smaller

ENOUGH, MANY = 30, 60  # passes over the prompts
GROUP_SIZE = 32  # where prompts are few
IDLE, FULL = 0.4, 1.0  # shares of a side's time, and of the engines' cache
WORTH = 0.8  # share of the GPU-hours, at most


@dataclass(frozen=True, slots=True)
class Budget:
    """What a plan takes, at the expected seconds of a step."""

    plan: Plan
    gpus: int
    steps: int
    seconds: float  # each step takes

    @property
    def days(self) -> float:
        return self.steps * self.seconds / 86400

    @property
    def hours(self) -> float:
        """Return the GPU-hours."""
        return self.gpus * self.days * 24

    def passes(self, prompts: int) -> float:
        return self.steps * self.plan.config.rollout.groups_per_step / prompts


def budget(case: Case, plan: Plan, days: float) -> Budget:
    """Return the steps that a plan makes in these days."""
    seconds = case.facts.expected(case.gpu, plan.seconds)
    return Budget(plan, case.count, max(1, int(days * 86400 / seconds)), seconds)


def fullness(plan: Plan) -> float:
    """Return how full the engines' caches are when all sequences have their mean length: above 1, some wait or are
    computed again."""
    line, r = plan.line, plan.config.rollout
    cached = line.rates.engine.cached_tokens
    if not cached:
        return 0.0
    slots = min(line.config.generator.max_num_seqs, r.groups_per_step * r.group_size / line.config.generator.replicas)
    work = line.work
    return slots * (work.prompt.mean + line.read + work.turns.mean * work.answer.mean) / cached


def idle(plan: Plan) -> tuple[float, float]:
    """Return the shares of the time in which trainers and engines wait for each other, if they overlap."""
    found = plan.simulated
    if found:
        return (found.trainers_idle, found.engines_idle) if plan.step.overlaps else (0.0, 0.0)
    sides = [sum(side.values()) for side in plan.sides.values()]
    return (1 - sides[0] / max(sides), 1 - sides[1] / max(sides)) if plan.step.overlaps else (0.0, 0.0)


def objections(case: Case, spent: Budget, prompts: int) -> Iterator[str]:
    """Yield the faults of a plan that an expert sees first."""
    passes, full, (trainers, engines) = spent.passes(prompts), fullness(spent.plan), idle(spent.plan)
    if passes > MANY:
        yield f"each prompt is trained on {passes:,.0f} times, {ENOUGH} are plenty: take more prompts or less time"
    if full > FULL:
        wait = f"of {spent.plan.line.config.generator.max_num_seqs} sequences of an engine {1 / full:.0%} fit its cache"
        yield f"{wait} at mean length ({full:.0%} full): the others wait or are computed again"
    for side, share, other in (("trainers", trainers, "engines"), ("engines", engines, "trainers")):
        if share > IDLE:
            yield f"{side} idle {share:.0%} of the time: they wait for the {other}"


def cheaper(case: Case, spent: Budget, prompts: int) -> tuple[Case, Budget] | None:
    """Return a plan of fewer GPU-hours for what `spent` reaches, or for ENOUGH passes if it makes many more. Without
    many passes it may take longer."""
    if case.device == "cpu":
        return None
    many = spent.passes(prompts) > MANY
    counts = [n for k in range(8) if (n := case.count >> k) and (n <= case.gpu.per_node or n % case.gpu.per_node == 0)]
    larger: Keys = {"rollout.group_size": GROUP_SIZE} if many and case.work.turns.mean == 1 else {}
    found = list[tuple[Case, Budget]]()
    fewer = [replace(case.with_keys(larger), count=count) for count in counts[0 if many else 1 :]]
    for other in fewer if many else [*fewer, *islice(smaller(case), 1, 3)]:
        best = plans(replace(other, rejected=[]))[:1]
        if best:
            groups = best[0].config.rollout.groups_per_step
            steps = -(-ENOUGH * prompts // groups) if many else spent.steps
            seconds = case.facts.expected(case.gpu, best[0].seconds)
            found.append((other, Budget(best[0], other.count, steps, seconds)))
    fitting = [each for each in found if not many or each[1].days <= spent.days]
    fitting = [each for each in fitting if each[1].hours <= WORTH * spent.hours]
    return min(fitting, key=lambda each: each[1].hours, default=None)
