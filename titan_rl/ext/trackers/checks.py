"""Checks of metrics.trackers: names, and what this machine needs to reach them."""

import netrc
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml, did_you_mean
from titan_rl.ext.trackers.messages import TRACKERS

WANDB_SERVER = "https://api.wandb.ai"


def problems(config: Config) -> Iterator[str]:
    yield from check_tracker_names(config)
    yield from check_tracker_packages(config)


def check_tracker_names(config: Config) -> Iterator[str]:
    for name in config.metrics.trackers:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS)
            yield f"metrics.trackers: expected any of {', '.join(TRACKERS)}, found {as_toml(name)}{hint}"
    if not config.metrics.project.strip():
        yield 'metrics.project: expected a name, found ""'


def check_tracker_packages(config: Config) -> Iterator[str]:
    """Refuse a tracker whose package is missing: the run would train without it."""
    for name in TRACKERS:
        missing = [package for package in packages_of(name) if not is_installed(package)]
        if name in config.metrics.trackers and missing:
            yield (
                f"metrics.trackers: {as_toml(name)} needs the package {' and '.join(missing)}: "
                f"pip install 'titan-rl[{name}]'"
            )


def packages_of(tracker: str) -> tuple[str, ...]:
    if tracker == "mlflow" and os.environ.get("MLFLOW_TRACKING_URI", "sqlite:").startswith("sqlite:"):
        return "mlflow", "sqlalchemy", "alembic"  # mlflow-skinny has no database without them
    return (tracker,)


def is_installed(package: str) -> bool:
    """A folder that W&B wrote to the current folder has its name, but is no package."""
    with suppress(ImportError, ValueError):
        spec = find_spec(package)
        return spec is not None and spec.origin is not None
    return False


def warnings(config: Config) -> Iterator[str]:
    if "wandb" in config.metrics.trackers and not wandb_can_write():
        yield (
            'metrics.trackers: "wandb" finds no API key, so that the run would be in no project: call "wandb login", '
            "set WANDB_API_KEY, or WANDB_MODE=offline for later"
        )


def wandb_can_write() -> bool:
    """Return whether W&B has an API key, as far as files and the environment tell, or needs none."""
    variables = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if os.environ.get("WANDB_MODE", "online") not in ("online", "shared") or any(map(os.environ.get, variables)):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB_SERVER)).hostname
    for path in (os.environ.get("NETRC", ""), "~/.netrc", "~/_netrc"):
        with suppress(OSError, netrc.NetrcParseError, RuntimeError):
            if path and netrc.netrc(Path(path).expanduser()).authenticators(server or ""):
                return True
    return False
