"""Draws runs that do not learn, and healthy ones, from a seed: cause, magnitude, scale, length and noise are random, so
that the writer of a rule does not choose its cases."""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from support.metric_histories import Line, config, metrics
from titan_rl.config.sections import Config
from titan_rl.tools.diagnosis.answer_facts import AnswerFacts
from titan_rl.tools.diagnosis.history import MetricsHistory
from titan_rl.tools.diagnosis.ranking import diagnose

Curve = Callable[[float], float]
SCALES = ((0, 1), (0, 1), (0, 10), (-1, 1), (-3, 3), (0, 100), (-1, 0))  # worst and best reward


class Drawn(NamedTuple):
    """A run, its cause, and the rules or keys of which one names it. None: the run is healthy."""

    cause: str
    names: frozenset[str]
    lines: list[Line]
    config: Config
    answers: AnswerFacts | None

    @property
    def found(self) -> list[str]:
        """Return "rule key" of each problem."""
        problems = diagnose(MetricsHistory(self.lines, self.config, self.answers)).problems
        return [f"{each.rule} {each.changes[0].key if each.changes else ''}" for each in problems]

    def place(self, found: list[str]) -> int:
        """Return the place of the first problem that names the cause; a large number if none does."""
        return next((k for k, each in enumerate(found) if self.names & set(each.split())), 99)


class Plan:
    """What a cause changes of a learning run."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.steps = round(math.exp(draw.uniform(math.log(32), math.log(160))))
        self.first = draw.uniform(0.12, 0.55)
        self.entropy_0 = math.exp(draw.uniform(math.log(0.15), math.log(1.6)))
        self.reward: Curve = self.rise(self.first, self.first + draw.uniform(0.2, 0.4))
        self.score: Curve | None = None
        self.entropy: Curve = self.rise(self.entropy_0, self.entropy_0 * draw.uniform(0.3, 0.9))
        self.dead: Curve = self.rise(draw.uniform(0.1, 0.5), draw.uniform(0.3, 0.65))
        self.keys: dict[str, Any] = {
            "rollout__groups_per_step": draw.choice((8, 16, 32, 64, 128)),
            "rollout__temperature": round(draw.uniform(0.6, 1.1), 2),
            "algorithm__entropy_coef": draw.choice((0.0, 0.0, 0.001, 0.005)),
            "algorithm__kl_coef": draw.choice((0.0, 0.0, 0.001, 0.01, 0.04)),
        }
        self.base = draw.choice(("grpo_llama", "grpo_smollm2"))
        self.scale = draw.choice(SCALES)
        self.kl: Curve = self.rise(1e-5, math.exp(draw.uniform(math.log(2e-3), math.log(0.3))))
        self.changes: list[Callable[[int, Line], Mapping[str, Any]]] = []
        self.noise = draw.uniform(0.5, 2.5)

    def rise(self, first: float, last: float, power: float | None = None) -> Curve:
        power = power or self.draw.uniform(0.5, 1.5)
        return lambda share: first + (last - first) * share**power

    def flat(self, drift: float = 0.0) -> None:
        self.reward = self.rise(self.first, self.first - drift)

    def still(self, power: float = 0.0) -> None:
        self.entropy = self.rise(self.entropy_0, self.entropy_0 * (1 - power))

    def sets(self, **values: Any) -> None:
        """Set metrics in all steps: numbers, or functions of the step."""
        self.changes.append(
            lambda n, line: {k.replace("__", "/"): v(n) if callable(v) else v for k, v in values.items()}
        )

    def logistic(self, middle: float, width: float, low: float, high: float) -> Callable[[float], float]:
        return lambda step: low + (high - low) / (1 + math.exp(min(50.0, max(-50.0, -(step - middle) / width))))

    def log(self, low: float, high: float) -> float:
        return math.exp(self.draw.uniform(math.log(low), math.log(high)))


def disturb(plan: Plan) -> None:
    """Add harmless things that many runs have: keys at the edge of recipes, a lag, some cuts, a grader."""
    draw = plan.draw
    if draw.random() < 0.4:
        plan.keys["algorithm__entropy_coef"] = draw.uniform(0, 0.018)
    if draw.random() < 0.3:
        plan.keys["algorithm__kl_coef"] = draw.uniform(0, 0.09)
    if draw.random() < 0.3:
        lags(plan)
    if draw.random() < 0.3:
        cut = draw.uniform(0.03, 0.22)
        plan.sets(completions__clipped_ratio=lambda n: cut * draw.uniform(0.7, 1.3))
    if draw.random() < 0.3:
        plan.keys["algorithm__clip_high"] = 0.28
        plan.sets(clip_ratio__low=draw.uniform(0, 0.04), clip_ratio__high=draw.uniform(0, 0.04))
    if draw.random() < 0.2:
        spike = draw.randrange(2, plan.steps)
        plan.changes.append(lambda n, line: {"grad_norm": 30.0} if n == spike else {})
    if draw.random() < 0.2:
        longer = draw.uniform(0, 0.6) / plan.steps
        plan.changes.append(lambda n, line: {k: line[k] * (1 + longer * n) for k in ("time/step", "time/generate")})


# -- causes: each changes a plan, and returns the rules or keys that name it -------------------------------------------


def rate_high(plan: Plan) -> str:
    """An update that is too large: entropy and reward break within a few steps."""
    draw = plan.draw
    at, width = draw.uniform(0.1, 0.8) * plan.steps, draw.uniform(0.2, 1.2)
    wild = draw.random() < 0.65
    end = min(4.0, plan.entropy_0 * draw.uniform(3, 8) + 0.6) if wild else plan.entropy_0 * draw.uniform(0.01, 0.1)
    break_ = plan.logistic(at, width, 0, 1)
    least = draw.uniform(0.0, 0.55)
    reward, entropy, steps = plan.reward, plan.entropy, plan.steps
    plan.reward = lambda x: reward(x) * (1 - (1 - least) * break_(x * steps))
    plan.entropy = lambda x: entropy(x) * (1 - break_(x * steps)) + end * break_(x * steps)
    plan.keys["optimizer__lr"] = plan.log(3e-5, 3e-2)
    if wild:
        cut, late = draw.uniform(0.1, 1.0), draw.uniform(0, 4)
        plan.sets(completions__clipped_ratio=lambda n: 0.02 + (cut - 0.02) * break_(n - late))
    if least < 0.1:
        dead = plan.dead
        plan.dead = lambda x: max(dead(x), break_(x * steps))
    return "collapse"


def rate_small(plan: Plan) -> str:
    plan.flat()
    plan.still()
    plan.steps = max(plan.steps, 50)
    plan.kl = lambda x: 1e-9
    plan.keys["optimizer__lr"] = plan.log(1e-10, 2e-8)
    return "rate_too_small"


def kl_coef(plan: Plan) -> str:
    weight = plan.keys["algorithm__kl_coef"] = plan.log(0.3, 30)
    distance = plan.log(1e-6, 3e-3) if plan.draw.random() < 0.6 else plan.draw.uniform(0.5, 3) / weight
    plan.kl = lambda x: distance * min(1.0, 8 * x)
    plan.flat(plan.draw.choice((0.0, 0.03)))
    plan.still(plan.draw.choice((0.0, 0.05, 0.4)))
    return "algorithm.kl_coef"


def entropy_coef(plan: Plan) -> str:
    draw = plan.draw
    plan.keys["algorithm__entropy_coef"] = plan.log(0.03, 3)
    width = plan.log(0.4, 0.25 * plan.steps)
    at = draw.uniform(0.1, 0.6) * plan.steps + 2 * width
    ramp, end = plan.logistic(at, width, 0, 1), min(4.1, plan.entropy_0 * draw.uniform(2, 8) + 0.3)
    least, cut, late = draw.uniform(0, 0.6), draw.uniform(0.05, 1), draw.uniform(-2, 5)
    steps, begin = plan.steps, plan.entropy_0
    plan.entropy = lambda x: begin + (end - begin) * ramp(x * steps)
    plan.reward = lambda x: plan.first * (1 - (1 - least) * ramp(x * steps))
    plan.sets(completions__clipped_ratio=lambda n: 0.01 + cut * ramp(n - late))
    return "algorithm.entropy_coef"


def cold(plan: Plan) -> str:
    plan.keys["rollout__temperature"] = round(plan.draw.uniform(0.05, 0.4), 2)
    plan.entropy_0 = plan.log(0.005, 0.12)
    plan.still(plan.draw.uniform(0, 0.5))
    plan.flat(plan.draw.choice((0.0, 0.0, 0.9 * plan.first)))
    plan.dead = plan.rise(plan.draw.uniform(0.6, 0.95), plan.draw.uniform(0.8, 1.0))
    return "rollout.temperature"


def hot(plan: Plan) -> str:
    plan.keys["rollout__temperature"] = round(plan.draw.uniform(1.3, 2.5), 1)
    plan.entropy_0 = plan.draw.uniform(0.9, 2.5)
    plan.first = plan.draw.uniform(0.05, 0.3)
    plan.reward = plan.rise(plan.first, plan.first + 0.1)
    lead = plan.draw.uniform(0.35, 0.6)
    plan.score = lambda x: plan.first + lead
    plan.scale = (0, 1)
    return "rollout.temperature"


def too_hard(plan: Plan) -> str:
    share = plan.draw.choice((0.0, 0.0, 0.003))
    plan.reward = lambda x: share
    plan.dead = lambda x: 1.0 - 3 * share
    plan.still(plan.draw.uniform(0, 0.3))
    if plan.draw.random() < 0.5:
        plan.score = lambda x: share
    return "too_hard no_signal" if share else "too_hard"


def constant(plan: Plan) -> str:
    value = plan.draw.uniform(0.1, 0.9)
    plan.scale = plan.draw.choice(((0, 1), (0, 10), (0, 3)))
    low, high = plan.scale
    plan.changes.append(lambda n, line: {
        "reward/mean": low + value * (high - low), "reward/std": 0.0, "frac_reward_zero_std": 1.0})  # fmt: skip
    plan.still(plan.draw.uniform(0, 0.3))
    return "constant_reward"


def no_signal(plan: Plan) -> str:
    plan.flat()
    level = plan.draw.uniform(0.83, 0.98)
    plan.dead = lambda x: level
    plan.still(plan.draw.uniform(0, 0.3))
    return "no_signal"


def truncation(plan: Plan) -> str:
    share = plan.draw.uniform(0.33, 1.0)
    plan.first = plan.draw.uniform(0.0, 0.25)
    plan.flat()
    plan.still(plan.draw.uniform(0, 0.3))
    plan.sets(completions__clipped_ratio=lambda n: share)
    return "truncation"


def stale(plan: Plan) -> str:
    draw, lag = plan.draw, plan.draw.randrange(4, 17)
    plan.keys |= {"rollout__max_staleness_steps": lag}
    plan.flat(draw.choice((0.0, 0.1)))
    values: dict[str, Any] = {"policy_age__mean": 0.8 * lag, "policy_age__max": float(lag)}
    if draw.random() < 0.5:
        values["off_policy__ess"] = draw.uniform(0.1, 0.42)
    else:
        values |= {"clip_ratio__low": draw.uniform(0.0, 0.3), "clip_ratio__high": draw.uniform(0.25, 0.4)}
    plan.sets(**values)
    return "stale"


def minibatches(plan: Plan) -> str:
    plan.keys["algorithm__minibatches"] = plan.draw.choice((4, 8, 16))
    plan.flat(plan.draw.choice((0.0, 0.1)))
    plan.sets(clip_ratio__low=plan.draw.uniform(0.1, 0.3), clip_ratio__high=plan.draw.uniform(0.15, 0.3))
    return "stale"


def gap(plan: Plan) -> str:
    at, mean = (
        plan.draw.uniform(0, 0.7) * plan.steps,
        plan.log(0.06, 0.8) + 0.3 * (plan.keys.get("rollout__max_staleness_steps", 0) > 0),
    )
    plan.flat(plan.draw.choice((0.0, 0.1)))
    plan.sets(
        logprob_gap__mean=lambda n: mean if n >= at else 1e-5,
        logprob_gap__mult=lambda n: math.exp(1.3 * mean) if n >= at else 1.0,
        logprob_gap__max=lambda n: 8 * mean if n >= at else 1e-4,
    )
    return "gap"


def merged(plan: Plan) -> str:
    gap(plan)
    plan.base = "grpo_smollm2_lora"
    plan.keys["generator__dtype"] = "bfloat16"
    return "lora.sync"


def overfit(plan: Plan) -> str:
    plan.reward = plan.rise(plan.first, plan.first + plan.draw.uniform(0.25, 0.4))
    high, fall = plan.draw.uniform(0.45, 0.7), plan.draw.uniform(0.18, 0.45)
    at = plan.draw.uniform(0, 0.4)
    plan.score = lambda x: high - fall * max(0.0, x - at) / (1 - at)
    return "overfit"


def graded(plan: Plan) -> str:
    plan.keys["task__grader"] = "contains"
    level, spread = plan.draw.uniform(0.1, 0.7), plan.draw.uniform(0.01, 0.04)
    drift = plan.draw.choice((0.0, -0.1))
    plan.reward = plan.rise(plan.first, plan.first + plan.draw.uniform(0.2, 0.4))
    plan.sets(reward_part__grader=lambda n: level + drift * n / plan.steps + plan.draw.gauss(0, spread))
    return "task.reward"


def behind(plan: Plan) -> str:
    plan.first = plan.draw.uniform(0.2, 0.4)
    plan.reward = plan.rise(plan.first, plan.draw.uniform(0.8, 0.95))
    level = plan.draw.uniform(0.2, 0.45)
    plan.score = lambda x: level
    return "task.reward"


def failures(plan: Plan) -> str:
    ending, share = plan.draw.choice(("error", "timeout", "lost")), plan.draw.uniform(0.06, 0.6)
    plan.sets(**{f"stop__{ending}": share, "stop__completed": 1 - share})
    plan.changes.append(lambda n, line: {"rollouts/failed": 0.0})
    return "failures"


def not_finite(plan: Plan) -> str:
    bad = set(plan.draw.sample(range(3, plan.steps), plan.draw.randrange(1, 8)))
    plan.changes.append(lambda n, line: {"grad_norm": None, "updates/skipped": 1.0} if n in bad else {})
    return "not_finite"


def slower(plan: Plan) -> str:
    at, more = plan.draw.uniform(0.3, 0.8) * plan.steps, plan.draw.uniform(12, 60)
    key = plan.draw.choice(("time/generate", "time/train", "time/wait"))
    plan.changes.append(
        lambda n, line: {"time/step": line["time/step"] + more, key: line[key] + more} if n > at else {}
    )
    return "slow"


def component(plan: Plan) -> str:
    plan.keys["task__rewards"] = "{exact = 1.0, format = 0.5}"
    plan.flat()
    plan.sets(reward_part__exact=plan.first, reward_part__format=0.0)
    return "format"


def teacher(plan: Plan) -> Callable[[float], float]:
    """Make it a run that learns from a teacher, and return its distance over the share of the steps."""
    plan.base = plan.draw.choice(("opd_llama", "gkd_llama", "sdft_calc_llama", "opsd_calc_llama"))
    share = plan.draw.choice((0.0, 0.0, 0.2))
    plan.scale, plan.reward, plan.dead = (0, 1), lambda x: share, lambda x: 1.0 if not share else 0.5
    away = plan.log(0.2, 2.0)
    return plan.rise(away, away * plan.draw.uniform(0.1, 0.6), plan.draw.uniform(0.4, 1.0))


def distances(plan: Plan, curve: Curve) -> None:
    noise, covered = plan.draw.uniform(0.01, 0.06), plan.base.startswith(("sdft", "opsd"))
    key, sign = {"gkd_llama": ("distill/divergence", 1), "opd_llama": ("loss", 1)}.get(plan.base, ("distill/gain", -1))
    more = {"distill/covered": 1.0, "distill/too_long": 0.0} if covered else {}

    def change(step: int, line: Line) -> Mapping[str, Any]:
        return more | {key: sign * curve((step - 1) / plan.steps) * plan.draw.gauss(1, noise)}

    plan.changes.append(change)


def teacher_lost(plan: Plan) -> str:
    curve, at, times = teacher(plan), plan.draw.uniform(0.2, 0.8), plan.draw.uniform(2, 8)
    distances(plan, lambda x: curve(x) if x < at else curve(0) * times)
    return "optimizer.lr"


def teacher_stuck(plan: Plan) -> str:
    curve = teacher(plan)
    plan.still()
    plan.keys["optimizer__lr"] = plan.log(1e-10, 2e-8)
    distances(plan, lambda x: curve(0))
    return "optimizer.lr"


SICK: tuple[Callable[[Plan], str], ...] = (
    rate_high, rate_small, kl_coef, entropy_coef, cold, hot, too_hard, constant, no_signal, truncation, stale,
    minibatches, gap, merged, overfit, graded, behind, failures, not_finite, slower, component, teacher_lost,
    teacher_stuck,
)  # fmt: skip


# -- healthy runs ------------------------------------------------------------------------------------------------------


def learns(plan: Plan) -> None:
    if plan.draw.random() < 0.6:
        reward, lead = plan.reward, plan.draw.uniform(-0.05, 0.1)
        plan.score = lambda x: min(1.0, max(0.0, reward(x) + lead))


def saturates(plan: Plan) -> None:
    top = plan.draw.uniform(0.75, 0.98)
    speed = plan.draw.uniform(1.5, 5)
    plan.reward = lambda x: min(top, plan.first + speed * x * (top - plan.first))
    plan.score = plan.reward if plan.draw.random() < 0.5 else None
    plan.dead = plan.rise(0.3, top - 0.1)


def creeps(plan: Plan) -> None:
    """A gain that is small beside the noise."""
    plan.reward = plan.rise(plan.first, plan.first + plan.draw.uniform(0.04, 0.15))
    plan.score = plan.reward if plan.draw.random() < 0.5 else None


def dips(plan: Plan) -> None:
    """A reward that falls a little before it rises, as where the form of an answer changes."""
    reward, depth, at = plan.reward, plan.draw.uniform(0.02, 0.1), plan.draw.uniform(0.1, 0.3)
    plan.reward = lambda x: max(0.02, reward(x) - depth * math.exp(-(((x - at) / 0.08) ** 2)))


def explores(plan: Plan) -> None:
    """An entropy that grows while answers get better: longer reasoning."""
    plan.entropy = plan.rise(plan.entropy_0, plan.entropy_0 * plan.draw.uniform(1.1, 2.2))
    longer = plan.draw.uniform(0, 2) / plan.steps
    plan.sets(completions__mean_length=lambda n: 8 * (1 + longer * n))


def begins(plan: Plan) -> None:
    """A run of few steps, of which nothing can be said."""
    plan.steps = plan.draw.randrange(3, 30)
    plan.reward = plan.rise(plan.first, plan.first + plan.draw.uniform(-0.01, 0.1))


def anneals(plan: Plan) -> None:
    """A policy that gets sure in its first steps, on a task that was half solved, whose rate decays."""
    plan.entropy_0 = plan.log(0.05, 0.5)
    end = plan.entropy_0 * plan.draw.uniform(0.1, 0.4)
    plan.entropy = lambda x: end + (plan.entropy_0 - end) * math.exp(-6 * x)
    plan.reward = lambda x: 0.95 - (0.95 - plan.first) * math.exp(-3 * x)
    plan.dead = plan.rise(0.4, 0.9)
    plan.changes.append(lambda n, line: {"lr": line["lr"] * max(0.0, 1 - n / plan.steps)})


def whole_sequences(plan: Plan) -> None:
    plan.base = "gspo_llama"
    plan.keys |= {"rollout__max_staleness_steps": 1}
    plan.sets(policy_age__mean=0.8, policy_age__max=1.0, clip_ratio__low=plan.draw.uniform(0.02, 0.35),
              clip_ratio__high=plan.draw.uniform(0.02, 0.35))  # fmt: skip


def lags(plan: Plan) -> None:
    lag = plan.draw.randrange(1, 5)
    plan.keys |= {"rollout__max_staleness_steps": lag}
    gaps = plan.draw.uniform(0.005, 0.03)
    plan.sets(policy_age__mean=0.8 * lag, policy_age__max=float(lag), off_policy__ess=plan.draw.uniform(0.8, 0.99),
              clip_ratio__high=plan.draw.uniform(0, 0.06), logprob_gap__mean=gaps, logprob_gap__mult=1 + 1.3 * gaps,
              logprob_gap__max=3.0)  # fmt: skip


def brief(plan: Plan) -> None:
    """Answers that are cut off at first, and learn to be brief."""
    first = plan.draw.uniform(0.2, 0.8)
    plan.sets(completions__clipped_ratio=lambda n: max(0.03, first * (1 - 2 * n / plan.steps)))


def follows(plan: Plan) -> None:
    reward = plan.reward
    plan.keys["task__grader"] = "contains"
    plan.sets(reward_part__grader=lambda n: 0.8 * reward((n - 1) / plan.steps) + plan.draw.gauss(0, 0.03))


def distils(plan: Plan) -> None:
    distances(plan, teacher(plan))


def choosy(plan: Plan) -> None:
    """A temperature or a bonus at the edge of what recipes use, in a run that learns."""
    plan.keys["rollout__temperature"] = round(plan.draw.uniform(0.3, 1.2), 2)
    plan.keys["algorithm__entropy_coef"] = plan.draw.uniform(0, 0.05)
    plan.keys["algorithm__kl_coef"] = plan.draw.uniform(0, 0.2)


HEALTHY: tuple[Callable[[Plan], None], ...] = (
    learns, saturates, creeps, dips, explores, begins, anneals, whole_sequences, lags, brief, follows, distils, choosy,
)  # fmt: skip


def drawn(seed: int, *, sick: bool) -> Drawn:
    """Draw a run."""
    draw = random.Random(2 * seed + sick)
    plan = Plan(draw)
    shape = draw.choice(SICK) if sick else draw.choice(HEALTHY)
    disturb(plan)
    name = shape(plan)
    cfg = config(plan.base, **plan.keys)
    low, high = plan.scale

    def change(step: int, line: Line) -> Line:
        share = (step - 1) / max(1, plan.steps - 1)
        more: Line = {
            "reward/mean": low + (high - low) * line["reward/mean"],
            "reward/std": (high - low) * line["reward/std"],
            "entropy": plan.entropy(share) * draw.gauss(1, 0.04 * plan.noise),
        }
        if not line["reward/std"]:  # equal rewards in all groups
            more["frac_reward_zero_std"] = 1.0
        if cfg.algorithm.kl_coef:
            more["kl/k3"] = plan.kl(share) * draw.uniform(0.7, 1.4)
        for each in plan.changes:
            more |= each(step, line | more)
        return more

    lines = metrics(plan.steps, cfg, seed=seed, reward=plan.reward, entropy=plan.entropy, dead=plan.dead,
                    score=plan.score, problems=draw.choice((128, 256, 512)), every=max(2, plan.steps // 8),
                    change=change)  # fmt: skip
    for line in lines:
        for key in ("eval/score", "eval/low", "eval/high"):
            if key in line:
                line[key] = low + (high - low) * line[key]
    facts = None
    if draw.random() < 0.5:
        means = [line["reward/mean"] for line in lines if line["kind"] == "rl"]
        varied = any(line.get("reward/std") for line in lines)
        worst, best = (float(low), float(high)) if varied else (min(means), max(means))
        facts = AnswerFacts(1, plan.steps, 64 * plan.steps, worst=worst, best=best)
    return Drawn(shape.__name__, frozenset(name.split()) if name else frozenset(), lines, cfg, facts)


class Score(NamedTuple):
    """How many of the runs drawn are named."""

    sick: int
    first: int
    in_two: int
    healthy: int
    alarms: int
    missed: tuple[str, ...]  # cause, seed and findings

    @property
    def text(self) -> str:
        return (
            f"sick runs {self.sick}: named first {self.first / self.sick:.1%}, among the first two "
            f"{self.in_two / self.sick:.1%}; healthy runs {self.healthy}: false alarms {self.alarms / self.healthy:.1%}"
        )


def score(seeds: range, healthy: range) -> Score:
    """Diagnose the runs of these seeds."""
    first = in_two = alarms = 0
    missed = []
    for seed in seeds:
        run = drawn(seed, sick=True)
        place = run.place(found := run.found)
        first, in_two = first + (place == 0), in_two + (place < 2)
        if place:
            missed.append(f"{run.cause} {seed}: {found[:3]}")
    for seed in healthy:
        run = drawn(seed, sick=False)
        if found := run.found:
            alarms += 1
            missed.append(f"healthy {run.cause} {seed}: {found[:3]}")
    return Score(len(seeds), first, in_two, len(healthy), alarms, tuple(missed))
