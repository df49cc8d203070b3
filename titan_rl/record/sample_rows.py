"""Which samples and numbers of a step a person sees first, in TensorBoard and in trackers."""

from collections.abc import Mapping, Sequence
from typing import Any

from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.wire.types import Group

OVERVIEW = {
    "reward": "reward/mean",
    "score": EVAL_SCORE,
    "length": "completions/mean_length",
    "entropy": "entropy",
    "gap": "logprob_gap/mean",
}
FIRST = "0_overview"
"""Trackers sort groups of metrics by name: this one is the first that they show."""

SAMPLE_GROUPS = 4
MOST_TEXT = 8000  # characters of a sample's prompt, answer and text
COLUMNS = ("step", "prompt_id", "prompt", "answer", "text", "reward", "advantage", "finish")


def overview(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return copies of the numbers to look at first, under names that trackers sort first."""
    first = {name: scalars[key] for name, key in OVERVIEW.items() if key in scalars}
    if "reward/mean" not in scalars and "loss" in scalars:  # a fit
        first["loss"] = scalars["loss"]
    return {f"{FIRST}/{name}": value for name, value in first.items()}


def has_samples(step: int, interval: int) -> bool:
    """Return whether the samples of a step are logged: the first step's, and every `interval` steps'."""
    return interval > 0 and (step == 1 or step % interval == 0)


def sample_rows(step: int, groups: Sequence[Group]) -> list[list[Any]]:
    """Return the best and the worst rollout of the step's first groups, as rows of COLUMNS."""
    rows = []
    for group in groups[:SAMPLE_GROUPS]:
        ranked = sorted((each for each in group.rollouts if each.valid), key=lambda rollout: -rollout.reward)
        for rollout in (ranked[0], ranked[-1])[: len(ranked)] if ranked else ():
            texts = map(shown, (group.prompt.text, group.prompt.answer, rollout.text))
            scores = (float(rollout.reward), float(rollout.advantage))
            rows.append([step, group.prompt.id, *texts, *scores, rollout.finish])
    return rows


def shown(text: str) -> str:
    """Return the beginning of a text, without code points that UTF-8 cannot encode."""
    return text[:MOST_TEXT].encode(errors="replace").decode()
