"""Checks of [launch]: the job that starts a run."""

import re
from collections.abc import Iterator
from dataclasses import fields

from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.preflight.refusal import problem

MOUNT = re.compile(r"(/[^:,]*|(pvc|secret)/[a-z0-9]([a-z0-9.-]*[a-z0-9])?):/[^:,]*(:ro)?")
STOP_SECONDS = 30  # on top of fault.stop_grace_seconds: ranks end, and schedulers signal late


def stop_seconds(config: Config) -> int:
    """Return how long before its end a job must be signalled, so that the run can save."""
    return int(config.fault.stop_grace_seconds) + STOP_SECONDS


def problems(config: Config) -> Iterator[str]:
    launch = config.launch
    for key in fields(launch):
        value = getattr(launch, key.name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and key.name != "setup" and not text.isprintable():
                yield f"launch.{key.name}: expected one line of printable text, found {as_toml(text)}"
    for mount in launch.mounts:
        if not MOUNT.fullmatch(mount):
            expected = '"/folder:/path", "pvc/claim:/path" or "secret/name:/path", each also with ":ro"'
            yield f"launch.mounts: expected {expected}, found {as_toml(mount)}"
    for argument in launch.extra_args:
        if not argument.startswith("-"):
            yield f"launch.extra_args: expected arguments of sbatch, such as --constraint=h100, found {argument!r}"
    if launch.minutes and 60 * launch.minutes <= stop_seconds(config):
        grace = f"fault.stop_grace_seconds = {config.fault.stop_grace_seconds:g}"
        yield problem(config, "launch.minutes", f"at least {stop_seconds(config) // 60 + 1} with {grace}")


def warnings(config: Config) -> Iterator[str]:
    yield from ()
