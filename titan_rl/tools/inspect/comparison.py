"""Compares recorded runs: settings, scores, curves, speed and samples. The first run is what the others differ from.

Every part is data that json can write; titan_rl compare shows it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from string import ascii_uppercase
from typing import Any

from titan_rl.config.eval_sets import HELD_OUT
from titan_rl.config.toml import as_toml, schema
from titan_rl.record.run_names import ROLLOUTS
from titan_rl.tools.inspect.recorded_run import ABSENT, DRAWN, ROWS, RecordedRun, StepScore, number_of
from titan_rl.tools.inspect.samples import RunSample, Samples
from titan_rl.tools.inspect.score_differences import Difference, independent_difference, paired_difference

LETTERS = ascii_uppercase
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
        for cut in run.files.cuts():
            yield f"{letter} had other settings up to step {cut.step}: {cut}"
    tasks, rewards = _differing(runs, TASK), _differing(runs, REWARDS)
    if tasks:
        yield f"these runs have different tasks ({', '.join(tasks)}): their scores are not of the same problems"
    if rewards:
        yield f"these runs have different rewards ({', '.join(rewards)}): their scores do not measure the same"


def settings(runs: Sequence[RecordedRun]) -> dict[str, list[str | None]]:
    """Return the keys that differ, with each run's value as TOML has it; None: the run's version has no such key."""
    written = dict.fromkeys(key for run in runs for key in run.settings)
    known = [f"{section}.{name}" for section, keys in schema().items() for name in keys]
    keys = [key for key in dict.fromkeys([*known, *written]) if key in written]
    return {key: [_as_toml(run.setting(key)) for run in runs] for key in _differing(runs, keys)}


def _as_toml(value: Any) -> str | None:
    return None if value is ABSENT else as_toml(value)


def provenance(runs: Sequence[RecordedRun]) -> dict[str, list[str | None]]:
    """Return what differs in versions, commit and machine; None: unknown, as of a run that has not ended."""
    facts = [_facts(run.summary) for run in runs]
    differing = dict[str, list[str | None]]()
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each.get(name) for each in facts]
        if len({value for value in values if value is not None}) > 1:
            differing[name] = values
    return differing


def _facts(summary: Mapping[str, Any]) -> dict[str, str]:
    facts = {**(summary.get("versions") or {}), "commit": summary.get("git_commit"), **(summary.get("machine") or {})}
    return {
        name: value if isinstance(value, str) else as_toml(value) for name, value in facts.items() if value is not None
    }


def _differing(runs: Sequence[RecordedRun], keys: Sequence[str]) -> list[str]:
    """Return the keys whose values differ between the runs with readable settings."""
    readable = [run for run in runs if not run.unreadable]
    return [key for key in keys if any(run.setting(key) != readable[0].setting(key) for run in readable[1:])]


def scores(runs: Sequence[RecordedRun]) -> list[SetScores]:
    """Return the scores of every set, the held-out problems first."""
    names = dict.fromkeys(name for run in runs for name in run.scores)
    return [_set_scores(runs, name) for name in sorted(names, key=lambda name: name != HELD_OUT)]


def _set_scores(runs: Sequence[RecordedRun], name: str) -> SetScores:
    having = {at: run.scores[name] for at, run in enumerate(runs) if run.scores.get(name)}
    common = set.intersection(*map(_steps, having.values()))
    moments = [FIRST, COMMON, BEST, LAST]
    ends = {each[-1].step for each in having.values()}
    if not common or len(ends) == 1 or max(common) == min(each[0].step for each in having.values()):
        moments.remove(COMMON)
    found, differences = dict[int, dict[str, StepScore]](), dict[int, dict[str, Difference | None]]()
    first = next(iter(having))
    for at, each in having.items():
        found[at] = {moment: _at(each, moment, common) for moment in moments}
        if at != first:
            pairs = ((moment, found[first][moment], found[at][moment]) for moment in moments)
            differences[at] = {moment: _difference(runs[first], runs[at], name, a, b) for moment, a, b in pairs}
    return SetScores(name, moments, found, differences)


def _steps(each: Sequence[StepScore]) -> set[int]:
    return {score.step for score in each}


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
    if score is None:
        score = min(_at(run.scores[names[0]], BEST, set()).estimate.value for run in runs)
    return Reached(names[0], score, [_first_with(run.scores[names[0]], score) for run in runs])


def _first_with(scores: Sequence[StepScore], least: float) -> StepScore | None:
    return next((score for score in scores if score.estimate.value >= least), None)


def scores_in_common(runs: Sequence[RecordedRun]) -> list[str]:
    names = set.intersection(*({name for name, scores in run.scores.items() if scores} for run in runs))
    return sorted(filter(names.__contains__, runs[0].scores), key=lambda name: name != HELD_OUT)


def seconds(runs: Sequence[RecordedRun]) -> dict[str, list[float | None]]:
    """Return the mean seconds of a step by part, for the parts that take any."""
    found = {part: [_mean(run, f"time/{part}") for run in runs] for part in PARTS}
    return {part: means for part, means in found.items() if any(means)}


def _mean(run: RecordedRun, key: str) -> float | None:
    values = [value for _, value in _points(run, key)]
    return fmean(values) if values else None


def _points(run: RecordedRun, key: str) -> list[tuple[int, float]]:
    values = ((line["step"], number_of(line, key)) for line in run.steps)
    return [(step, value) for step, value in values if math.isfinite(value)]


def curves(runs: Sequence[RecordedRun]) -> dict[str, list[list[tuple[int, float]]]]:
    """Return the points of each curve by run; curves that are 0 everywhere are left out."""
    found = {"held-out": [_held_out(run) for run in runs]}
    for key, name in CURVES.items():
        found[name] = [_points(run, key) for run in runs]
    if any(found["reward"]):
        del found["loss"]  # near zero on-policy by construction
    return {name: each for name, each in found.items() if any(value for _, value in chain.from_iterable(each))}


def _held_out(run: RecordedRun) -> list[tuple[int, float]]:
    return [(score.step, score.estimate.value) for score in run.scores.get(HELD_OUT, ())]


def same_prompts(runs: Sequence[RecordedRun], most: int) -> list[SamePrompt] | str:
    """Return the samples of the same prompts at the last common step, or why there are none."""
    found: list[Samples] = []
    for run in runs:
        with suppress(OSError):
            found.append(run.files.samples())
    if len(found) < len(runs):
        return f"no samples to compare: not every run has a {ROLLOUTS}"
    common = set.intersection(*(set(samples.steps) for samples in found))
    if not common:
        return "no samples to compare: no step is in the rollouts of all runs"
    step = max(common)
    groups = [_by_prompt(samples.groups(step)) for samples in found]
    shared = [key for key in groups[0] if all(key in each for each in groups)]
    if not shared:
        return f"no samples to compare: no prompt is in step {step} of all runs, as with other seeds or data"
    prompts = list[SamePrompt]()
    for key in shared[:most]:
        samples = [each[key] for each in groups]
        prompts.append(SamePrompt(step, *key, samples[0][0].answer, samples))
    return prompts


def _by_prompt(groups: Sequence[list[RunSample]]) -> dict[tuple[int, str], list[RunSample]]:
    return {(group[0].prompt_id, group[0].prompt): group for group in groups}


def as_data(runs: Sequence[RecordedRun], *, score: float | None, samples: int) -> dict[str, Any]:
    """Return the whole comparison for json."""
    reach, prompts = reached(runs, score), same_prompts(runs, samples) if samples else []
    return {
        "runs": _by_letter([_run_data(run) for run in runs]),
        "warnings": list(warnings(runs)),
        "settings": _rows(settings(runs)),
        "provenance": _rows(provenance(runs)),
        "scores": {each.name: _set_data(each) for each in scores(runs)},
        "reached": None if reach is None else _reached_data(reach),
        "seconds_per_step": _rows(seconds(runs)),
        "curves": _rows(curves(runs)),
        "samples": prompts if isinstance(prompts, str) else [_prompt_data(each) for each in prompts],
    }


def _by_letter(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(LETTERS, values, strict=False))


def _rows(table: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    return {name: _by_letter(values) for name, values in table.items()}


def _run_data(run: RecordedRun) -> dict[str, Any]:
    return {"folder": str(run.folder), "state": run.state, "step": run.last, "seconds": run.seconds_in_total}


def _reached_data(reach: Reached) -> dict[str, Any]:
    at = [at and {"step": at.step, "seconds": at.seconds} for at in reach.at]
    return {"set": reach.name, "score": reach.score, "at": _by_letter(at)}


def _set_data(each: SetScores) -> dict[str, Any]:
    scores, differences = dict[str, Any](), dict[str, Any]()
    for at, moments in each.scores.items():
        scores[LETTERS[at]] = {moment: _score_data(score) for moment, score in moments.items()}
    for at, moments in each.differences.items():
        differences[LETTERS[at]] = {moment: _difference_data(found) for moment, found in moments.items()}
    return {"scores": scores, f"minus_{LETTERS[each.runs[0]]}": differences}


def _score_data(score: StepScore) -> dict[str, Any]:
    found = score.estimate
    problems = len(score.problems)
    return {"step": score.step, "score": found.value, "low": found.low, "high": found.high, "problems": problems}


def _difference_data(found: Difference | None) -> dict[str, Any] | None:
    return found and {name: getattr(found, name) for name in ("value", "low", "high", "paired", "beyond_noise")}


def _prompt_data(each: SamePrompt) -> dict[str, Any]:
    head = {name: getattr(each, name) for name in ("step", "prompt_id", "prompt", "answer")}
    return head | {"samples": _by_letter([[_sample_data(sample) for sample in group] for group in each.samples])}


def _sample_data(sample: RunSample) -> dict[str, Any]:
    return {
        "text": sample.text,
        "reward": sample.reward,
        "tokens": sample.sampled,
        "truncated": sample.truncated,
    }
