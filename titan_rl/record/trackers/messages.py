"""What a run sends to its trackers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from titan_rl.config.sections import Config
from titan_rl.config.toml import schema
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.wire.types import Group

Service = Literal["wandb", "trackio", "mlflow"]
SERVICES: tuple[Service, ...] = get_args(Service)
TRACKERS = ("tensorboard", *SERVICES)

State = Literal["finished", "stopped", "failed"]

Axis = Literal["cold_start", "rl"]
"""What the steps of a point count. Fits count as RL: a run has one or the other."""

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

HIDDEN = "(hidden)"
SECRET_NAME = re.compile(r"(?i)(^|_)(key|token|secret|password|passwd|credentials?|auth|authorization)$")
PASSWORD_IN_URL = re.compile(r"//[^/@\s]*@")
SHELL_KEYS = ("hosts.ssh",)
"""Keys that hold commands, in which secrets have no place that could be recognized. [launch] is left out as a whole."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Describes the run that a tracker begins or continues."""

    project: str
    name: str
    group: str
    """Runs of the same config have the same one."""
    tags: Sequence[str]
    config: Mapping[str, Mapping[str, Any]]
    folder: str
    id: str = ""
    """The tracker's id of the run that is continued. Empty: a new run."""
    attempt: int = 1
    """How often the run has begun or was rewound. Later points of a repeated step are of a later attempt."""


def overview(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return copies of the numbers to look at first, under names that trackers sort first."""
    first = {name: scalars[key] for name, key in OVERVIEW.items() if key in scalars}
    if "reward/mean" not in scalars and "loss" in scalars:  # a fit
        first["loss"] = scalars["loss"]
    return {f"{FIRST}/{name}": value for name, value in first.items()}


def grouped(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return scalars with a group in each name: trackers would show those without one before the overview."""
    return {name if "/" in name else f"train/{name}": value for name, value in scalars.items()}


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


def public_config(config: Config) -> dict[str, dict[str, Any]]:
    """Return every key of a config that may leave this machine: passwords and keys are hidden."""

    def public(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: public(str(key), item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [public(name, item) for item in value]
        if isinstance(value, str):
            hidden = value and SECRET_NAME.search(name)
            return HIDDEN if hidden else PASSWORD_IN_URL.sub(f"//{HIDDEN}@", value)
        return value

    return {
        section: {
            key: public(key, getattr(getattr(config, section), key))
            for key in keys
            if f"{section}.{key}" not in SHELL_KEYS
        }
        for section, keys in schema().items()
        if section != "launch"
    }
