"""What a run sends to its trackers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from titan_rl.config.sections import Config
from titan_rl.config.toml import schema

Service = Literal["wandb", "trackio", "mlflow"]
SERVICES: tuple[Service, ...] = get_args(Service)
TRACKERS = ("tensorboard", *SERVICES)

HIDDEN = "(hidden)"
SECRET_NAME = re.compile(r"(?i)(^|_)(key|token|secret|password|passwd|credentials?|auth|authorization)$")
PASSWORD_IN_URL = re.compile(r"//[^/@\s]*@")
SHELL_KEYS = ("hosts.ssh", "metrics.alert")
"""Keys that hold commands or addresses, in which secrets have no place that could be recognized. [launch] is left out
as a whole."""


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


def grouped(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return scalars with a group in each name: trackers would show those without one before the overview."""
    return {name if "/" in name else f"train/{name}": value for name, value in scalars.items()}


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
