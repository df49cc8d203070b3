"""Compares recorded runs: settings, scores, curves, speed and samples. The first run is what the others differ from.

Every part is data that json can write; titan_rl compare shows it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from titan_rl.config.eval_sets import HELD_OUT
from titan_rl.config.toml import as_toml, schema
from titan_rl.record.config_history import cuts
from titan_rl.record.scores import Difference, independent_difference, paired_difference
from titan_rl.tools.inspect.recorded_run import ABSENT, DRAWN, ROWS, RecordedRun, StepScore, number_of
from titan_rl.tools.inspect.samples import RunSample, Samples

LETTERS = "ABCDEFGH"
TASK = (*ROWS, *(key for key in DRAWN if key != "debug.seed"), "task.eval_path")
REWARDS = ("task.reward", "task.rewards", "task.eval_reward", "task.reward_args")
CURVES = {
    "reward/mean": "reward",
    "loss": "loss",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "cut off",
    "logprob_gap/mean": "log-prob gap",
    "grad_norm": "gradient norm",
}
PARTS = ("step", "generate", "judge", "train", "sync", "wait")
FIRST, COMMON, BEST, LAST = "first", "same step", "best", "last"


@dataclass(frozen=True, slots=True)
class SetScores:
    """The scores of one evaluation set, of each run that has it."""

    name: str
    moments: Sequence[str]
    scores: Mapping[int, Mapping[str, StepScore]]  # by run and moment
    differences: Mapping[int, Mapping[str, Difference | None]]  # from the first of these runs; None: no interval known

    @property
    def runs(self) -> list[int]:
        return list(self.scores)


@dataclass(frozen=True, slots=True)
class Reached:
    """When runs first had a score."""

    name: str  # the set
    score: float
    at: Sequence[StepScore | None]  # by run; None: never


@dataclass(frozen=True, slots=True)
class SamePrompt:
    """One prompt, and the samples of each run at one step."""

    step: int
    prompt_id: int
    prompt: str
    answer: str
    samples: Sequence[Sequence[RunSample]]  # by run


def warnings(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Yield what makes a comparison of scores doubtful."""
    for letter, run in zip(LETTERS, runs, strict=False):
        if run.unreadable:
            yield f"the settings of {letter} are unknown: {run.unreadable}"
        for cut in cuts(run.folder):
            yield f"{letter} had other settings up to step {cut.step}: {cut}"
    readable = [run for run in runs if not run.unreadable]
    if tasks := [key for key in TASK if _differ(readable, key)]:
        yield f"these runs have different tasks ({', '.join(tasks)}): their scores are not of the same problems"
    if rewards := [key for key in REWARDS if _differ(readable, key)]:
        yield f"these runs have different rewards ({', '.join(rewards)}): their scores do not measure the same"


def settings(runs: Sequence[RecordedRun]) -> dict[str, list[str | None]]:
    """Return the keys that differ, with each run's value as TOML has it; None: the run's version has no such key."""
    known = [f"{section}.{name}" for section, keys in schema().items() for name in keys]
    keys = dict.fromkeys([*known, *(key for run in runs for key in run.settings)])
    readable = [run for run in runs if not run.unreadable]
    return {
        key: [None if (value := run.setting(key)) is ABSENT else as_toml(value) for run in runs]
        for key in keys
        if any(key in run.settings for run in runs) and _differ(readable, key)
    }


def provenance(runs: Sequence[RecordedRun]) -> dict[str, list[str | None]]:
    """Return what differs in versions, commit and machine; None: unknown, as of a run that has not ended."""
    found = [_facts(run.summary) for run in runs]
    names = dict.fromkeys(name for facts in found for name in facts)
    known = {name: {facts[name] for facts in found if name in facts} for name in names}
    return {name: [facts.get(name) for facts in found] for name in names if len(known[name]) > 1}


def _facts(summary: Mapping[str, Any]) -> dict[str, str]:
    facts = {**(summary.get("versions") or {}), "commit": summary.get("git_commit"), **(summary.get("machine") or {})}
    return {
        name: value if isinstance(value, str) else as_toml(value) for name, value in facts.items() if value is not None
    }


def _differ(runs: Sequence[RecordedRun], key: str) -> bool:
    return any(run.setting(key) != runs[0].setting(key) for run in runs[1:])


def scores(runs: Sequence[RecordedRun]) -> list[SetScores]:
    """Return the scores of every set, the held-out problems first."""
    names = dict.fromkeys(name for run in runs for name in run.scores)
    return [_set_scores(runs, name) for name in sorted(names, key=lambda name: name != HELD_OUT)]


def _set_scores(runs: Sequence[RecordedRun], name: str) -> SetScores:
    having = {at: run.scores[name] for at, run in enumerate(runs) if run.scores.get(name)}
    common = set.intersection(*({score.step for score in each} for each in having.values()))
    moments = [FIRST, COMMON, BEST, LAST]
    ends = {each[-1].step for each in having.values()}
    if not common or len(ends) == 1 or max(common) == min(each[0].step for each in having.values()):
        moments.remove(COMMON)
    found = {at: {moment: _at(each, moment, common) for moment in moments} for at, each in having.items()}
    first, *others = having
    differences = {
        at: {
            moment: _difference(runs[first], runs[at], name, found[first][moment], found[at][moment])
            for moment in moments
        }
        for at in others
    }
    return SetScores(name, moments, found, differences)


def _at(each: Sequence[StepScore], moment: str, common: set[int]) -> StepScore:
    if moment == COMMON:
        return next(score for score in each if score.step == max(common))
    if moment == BEST:
        return max(each, key=lambda score: score.estimate.value)
    return each[0] if moment == FIRST else each[-1]


def _difference(a: RecordedRun, b: RecordedRun, name: str, first: StepScore, second: StepScore) -> Difference | None:
    known = a.problems_of(name)
    same = known is not None and known == b.problems_of(name) and list(first.problems) == list(second.problems)
    if same and first.problems:
        return paired_difference(list(first.problems.values()), list(second.problems.values()))
    found = independent_difference(first.estimate, second.estimate)
    return None if math.isnan(found.low + found.high) else found


def reached(runs: Sequence[RecordedRun], score: float | None = None) -> Reached | None:
    """Return when each run first had a score; by default the best one that all had. None: no set is in all runs."""
    names = scores_in_common(runs)
    if not names:
        return None
    each = [run.scores[names[0]] for run in runs]
    if score is None:
        score = min(max(found.estimate.value for found in found_scores) for found_scores in each)
    at = [next((s for s in found_scores if s.estimate.value >= score), None) for found_scores in each]
    return Reached(names[0], score, at)


def scores_in_common(runs: Sequence[RecordedRun]) -> list[str]:
    names = [name for name in runs[0].scores if all(run.scores.get(name) for run in runs)]
    return sorted(names, key=lambda name: name != HELD_OUT)


def seconds(runs: Sequence[RecordedRun]) -> dict[str, list[float | None]]:
    """Return the mean seconds of a step by part, for the parts that take any."""
    found = {part: [_mean(run, f"time/{part}") for run in runs] for part in PARTS}
    return {part: means for part, means in found.items() if any(means)}


def _mean(run: RecordedRun, key: str) -> float | None:
    values = [value for _, value in _points(run, key)]
    return fmean(values) if values else None


def _points(run: RecordedRun, key: str) -> list[tuple[int, float]]:
    return [(line["step"], value) for line in run.steps if math.isfinite(value := number_of(line, key))]


def curves(runs: Sequence[RecordedRun]) -> dict[str, list[list[tuple[int, float]]]]:
    """Return the points of each curve by run; curves that are 0 everywhere are left out."""
    found = {
        name: [[(s.step, s.estimate.value) for s in run.scores.get(HELD_OUT, ())] for run in runs]
        for name in ["held-out"]
    }
    for key, name in CURVES.items():
        found[name] = [_points(run, key) for run in runs]
    if any(found["reward"]):
        del found["loss"]  # near zero on-policy by construction
    return {name: each for name, each in found.items() if any(value for points in each for _, value in points)}


def same_prompts(runs: Sequence[RecordedRun], most: int) -> list[SamePrompt] | str:
    """Return the samples of the same prompts at the last common step, or why there are none."""
    found: list[Samples] = []
    for run in runs:
        with suppress(OSError):
            found.append(Samples(run.folder))
    if len(found) < len(runs):
        return "no samples to compare: not every run has a rollouts.jsonl"
    common = set.intersection(*(set(samples.steps) for samples in found))
    if not common:
        return "no samples to compare: no step is in the rollouts of all runs"
    step = max(common)
    groups = [{(group[0].prompt_id, group[0].prompt): group for group in samples.groups(step)} for samples in found]
    shared = [key for key in groups[0] if all(key in each for each in groups)]
    if not shared:
        return f"no samples to compare: no prompt is in step {step} of all runs, as with other seeds or data"
    return [
        SamePrompt(step, id, text, groups[0][id, text][0].answer, [each[id, text] for each in groups])
        for id, text in shared[:most]
    ]


def as_data(runs: Sequence[RecordedRun], *, score: float | None, samples: int) -> dict[str, Any]:
    """Return the whole comparison for json."""

    def by_letter(values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(LETTERS, values, strict=False))

    reach, prompts = reached(runs, score), same_prompts(runs, samples) if samples else []
    return {
        "runs": by_letter(
            [
                {"folder": str(run.folder), "state": run.state, "step": run.last, "seconds": run.seconds_in_total}
                for run in runs
            ]
        ),
        "warnings": list(warnings(runs)),
        "settings": {key: by_letter(values) for key, values in settings(runs).items()},
        "provenance": {name: by_letter(values) for name, values in provenance(runs).items()},
        "scores": {each.name: _as_data(each) for each in scores(runs)},
        "reached": reach
        and {
            "set": reach.name,
            "score": reach.score,
            "at": by_letter([at and {"step": at.step, "seconds": at.seconds} for at in reach.at]),
        },
        "seconds_per_step": {part: by_letter(means) for part, means in seconds(runs).items()},
        "curves": {name: by_letter(points) for name, points in curves(runs).items()},
        "samples": prompts if isinstance(prompts, str) else [_prompt_data(each) for each in prompts],
    }


def _as_data(each: SetScores) -> dict[str, Any]:
    def score(s: StepScore) -> dict[str, Any]:
        return {
            "step": s.step,
            "score": s.estimate.value,
            "low": s.estimate.low,
            "high": s.estimate.high,
            "problems": len(s.problems),
        }

    def difference(d: Difference | None) -> dict[str, Any] | None:
        return d and {
            "value": d.value,
            "low": d.low,
            "high": d.high,
            "paired": d.paired,
            "beyond_noise": d.beyond_noise,
        }

    return {
        "scores": {LETTERS[at]: {m: score(s) for m, s in moments.items()} for at, moments in each.scores.items()},
        f"minus_{LETTERS[each.runs[0]]}": {
            LETTERS[at]: {m: difference(d) for m, d in moments.items()} for at, moments in each.differences.items()
        },
    }


def _prompt_data(each: SamePrompt) -> dict[str, Any]:
    samples = [
        [{"text": s.text, "reward": s.reward, "tokens": s.sampled, "truncated": s.truncated} for s in group]
        for group in each.samples
    ]
    return {
        "step": each.step,
        "prompt_id": each.prompt_id,
        "prompt": each.prompt,
        "answer": each.answer,
        "samples": dict(zip(LETTERS, samples, strict=False)),
    }
