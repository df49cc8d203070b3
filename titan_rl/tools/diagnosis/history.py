"""The numbers of a run, step by step, and the statistics that rules share."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from titan_rl.config.sections import Config
from titan_rl.record.lines import is_number
from titan_rl.tools.diagnosis.answer_facts import AnswerFacts
from titan_rl.tools.diagnosis.findings import moved

RECENT = 5  # steps whose mean is "now": one step is noise, and ten hide a fresh change
BEFORE = 8  # steps whose mean a change is compared with
SIGMAS = 4.0  # a change: a rule looks at a hundred places of a run, and a healthy one has 3 sigmas somewhere
GAIN_SIGMAS = 2.0  # a gain between the first and the last third, of which a run has one
SOLVED = 0.95  # level of a mean reward that leaves little to learn; 0 is the worst reward, 1 the best
OUTLIERS = 0.1  # share of later steps that may be exceptions to "since step N"


class Series:
    """The finite values of one metric, with their steps."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self.steps = [step for step, _ in points]
        self.values = [value for _, value in points]

    def __len__(self) -> int:
        return len(self.values)

    def recent(self, count: int = RECENT) -> float:
        """Return the mean of the last values; NaN if there is none."""
        return fmean(self.values[-count:]) if self.values else math.nan

    def at(self, step: int, default: float = math.nan) -> float:
        return self.values[self.steps.index(step)] if step in self.steps else default

    def since(self, holds: Callable[[float], bool]) -> int:
        """Return the first step from which on it holds, but for a few exceptions."""
        first, exceptions = self.steps[-1], 0
        backwards = zip(reversed(self.steps), reversed(self.values), strict=True)
        for count, (step, value) in enumerate(backwards, 1):
            if holds(value):
                first = step
            else:
                exceptions += 1
                if exceptions > max(1, OUTLIERS * count):
                    break
        return first

    def between(self, first: int, last: int) -> list[float]:
        return [value for step, value in zip(self.steps, self.values, strict=True) if first <= step <= last]

    def scatter(self) -> float:
        """Return the noise of one value, from the differences of neighbours: a trend does not count as noise."""
        differences = [abs(b - a) for a, b in zip(self.values, self.values[1:], strict=False)]
        return 1.4826 * median(differences) / math.sqrt(2) if differences else math.inf  # 1.4826: sigma of a normal

    def plus(self, other: "Series") -> "Series":
        """Return the sums of two metrics at the steps that have both."""
        added = dict(zip(other.steps, other.values, strict=True))
        pairs = zip(self.steps, self.values, strict=True)
        return Series([(step, value + added[step]) for step, value in pairs if step in added])

    def thirds(self) -> tuple[float, float]:
        """Return the means of the first and the last third; NaN if there is no value."""
        third = max(1, len(self.values) // 3)
        return (fmean(self.values[:third]), fmean(self.values[-third:])) if self.values else (math.nan, math.nan)

    def onset(self) -> int:
        """Return the first step from which on the values are nearer to the last ones than a sixth of the way, which is
        when a slow rise or fall began."""
        before, after = self.thirds()
        before = min(self.values[:RECENT], key=lambda value: abs(value - before))
        sixth = before + (after - before) / 6
        return self.since(lambda value: (value - sixth) * (after - before) > 0)

    @property
    def gain(self) -> float:
        before, after = self.thirds()
        return after - before

    @property
    def gain_noise(self) -> float:
        """Return the standard error of the gain."""
        return self.scatter() * math.sqrt(2 / max(1, len(self) // 3))


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """The held-out score after a step, and its 95% interval."""

    step: int
    value: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return max((self.high - self.low) / 3.92, 1e-9)  # 3.92: two-sided 95% of a normal


class Goal(NamedTuple):
    """A metric that a run without rewards improves."""

    name: str
    series: Series  # times `sign`, so that it rises as the run learns
    sign: int

    @property
    def moved(self) -> str:
        before, after = self.series.thirds()
        return moved(self.name, self.sign * before, self.sign * after)


class MetricsHistory:
    """A run as the rules see it. Lines are from metrics.jsonl; older versions lack keys, and null stands for a
    number that is not finite."""

    def __init__(self, lines: Iterable[Mapping[str, Any]], config: Config, answers: AnswerFacts | None = None) -> None:
        self.config, self.answers = config, answers
        self.lines: list[Mapping[str, Any]] = []
        self.scores: list[HeldOutScore] = []
        self.cold_start_loss = math.nan
        for line in lines:
            if line["kind"] in ("rl", "fit"):
                self.lines.append(line)
            elif line["kind"] == "cold_start" and is_number(line.get("loss")):
                self.cold_start_loss = line["loss"]
            if line["kind"] != "cold_start" and is_number(score := line.get("eval/score")):
                low, high = (line.get(key) for key in ("eval/low", "eval/high"))
                low, high = (score if each is None else each for each in (low, high))
                self.scores.append(HeldOutScore(line["step"], float(score), low, high))
        self._series: dict[str, Series] = {}

    @property
    def samples(self) -> bool:
        """True if the run samples its training data."""
        return any(line["kind"] == "rl" for line in self.lines[-1:])

    @property
    def last(self) -> int:
        return self.lines[-1]["step"] if self.lines else 0

    def __getitem__(self, key: str) -> Series:
        if key not in self._series:
            found = [(line["step"], float(line[key])) for line in self.lines if is_number(line.get(key))]
            self._series[key] = Series(found)
        return self._series[key]

    def keys(self, prefix: str) -> list[str]:
        return sorted({key for line in self.lines for key in line if key.startswith(prefix)})

    @property
    def reward(self) -> Series:
        return self["reward/mean"]

    @property
    def teacher_only(self) -> bool:
        """True if a teacher's log-probs take the place of rewards. A teacher that reads a right sibling needs them."""
        algorithm = self.config.algorithm
        return self.samples and algorithm.advantage == "teacher" and "sibling" not in algorithm.teacher_context

    @property
    def goal(self) -> "Goal":
        """Return what a run without rewards improves."""
        if self.teacher_only and len(self["distill/gain"]):
            return Goal("distill/gain", self["distill/gain"], 1)
        name = "distill/divergence" if self.teacher_only and len(self["distill/divergence"]) else "loss"
        falls = self[name]
        return Goal(name, Series([(s, -v) for s, v in zip(falls.steps, falls.values, strict=True)]), -1)

    @property
    def same_reward_held_out(self) -> bool:
        """True if the held-out answers are judged as the training answers are."""
        task = self.config.task
        return task.eval_reward in ("", task.reward) and not task.rewards

    @property
    def reward_range(self) -> tuple[float, float]:
        """Return the worst and the best reward: of all samples, or as far as the means and deviations show them."""
        facts = self.answers
        if facts and facts.best > facts.worst:
            low, high = facts.worst, facts.best
        else:
            stds = dict(zip(self["reward/std"].steps, self["reward/std"].values, strict=True))
            means = zip(self.reward.steps, self.reward.values, strict=True)
            moments = [(mean, math.hypot(mean, stds.get(step, 0.0))) for step, mean in means]
            low = min((mean for mean, _ in moments), default=0.0)
            # Of two values 0 and b the mean square is b times the mean; of -b and b it is the square of b.
            estimates = (root if low < 0 else root * root / mean for mean, root in moments if low < 0 or mean > 0)
            high = max(estimates, default=1.0)
            low = -high if low < 0 else 0.0
        if low >= 0:
            return (low if high > 1 and facts and facts.best > facts.worst else 0.0), max(high, 1.0)
        return low, high

    @property
    def score_range(self) -> tuple[float, float]:
        """Return the same of held-out scores, which another reward may judge."""
        if self.same_reward_held_out:
            return self.reward_range
        values = [0.0, 1.0, *(score.value for score in self.scores)]
        return min(values), max(values)

    @property
    def reward_level(self) -> float:
        """Return where the mean reward is between the worst reward, 0, and the best, 1."""
        low, high = self.reward_range
        return (self.reward.recent() - low) / (high - low)

    @property
    def reward_std(self) -> float:
        """Return the usual standard deviation of a reward."""
        return median(self["reward/std"].values) if self["reward/std"].values else math.nan

    @property
    def reward_noise(self) -> float:
        """Return the noise of one step's mean reward, from the scatter of the steps once there are some."""
        most = self.most_reward_noise
        return min(most, max(self.reward.scatter(), most / 3)) if len(self.reward) > BEFORE else most

    @property
    def most_reward_noise(self) -> float:
        """Return an upper bound of that noise. A step's prompts differ in difficulty, so groups count as independent,
        and the answers of one group do not."""
        return max(self["reward/std"].values, default=math.nan) / math.sqrt(self.config.rollout.groups_per_step)

    @property
    def reward_gain(self) -> tuple[float, float]:
        """Return the gain of the reward between the first and the last third of the steps, and its noise."""
        if len(self.reward) < 2:
            return 0.0, math.inf
        before, after = self.reward.thirds()
        return after - before, self.reward_noise * math.sqrt(2 / max(1, len(self.reward) // 3))

    @property
    def rises(self) -> bool:
        """True if the reward or the held-out score rose beyond noise, or the loss on given data fell."""
        if self.samples and not self.teacher_only:
            gain, noise = self.reward_gain
        else:
            goal = self.goal.series
            gain, noise = goal.gain, goal.gain_noise
        learnt = len(self.lines) >= 6 and gain > max(GAIN_SIGMAS * noise, 1e-6)
        if len(self.scores) > 1:
            first, now = self.scores[0], self.scores[-1]
            error = math.hypot(first.error, now.error)
            learnt = learnt or now.value - first.value > GAIN_SIGMAS * error
        return learnt


@dataclass(frozen=True, slots=True)
class Jump:
    """A lasting change of a metric, at the first step that shows it."""

    step: int
    before: float
    after: float
    sigmas: float


def jumps(series: Series, noise: float) -> list[Jump]:
    """Return the lasting changes beyond noise: the mean before a step against the one of this step and the two after
    it. A change lasts if the later values stay on its side of the middle. Of neighbours the clearest counts."""
    found = []
    for i in range(1, len(series)):
        before, after = series.values[max(0, i - BEFORE) : i], series.values[i : i + 3]
        change = fmean(after) - fmean(before)
        error = noise * math.sqrt(1 / len(before) + 1 / len(after))
        middle = fmean(before) + change / 2
        later = median(series.values[i:])
        if abs(change) > SIGMAS * error and (later - middle) * change > 0:
            found.append(Jump(series.steps[i], fmean(before), fmean(after), abs(change) / max(error, 1e-12)))
    return [
        jump
        for jump in found
        if not any(other.sigmas > jump.sigmas and abs(other.step - jump.step) <= RECENT for other in found)
    ]
