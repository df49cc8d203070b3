"""Checks of metrics.alert: a program that exists, or an address; and of the events."""

import shlex
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml, did_you_mean
from titan_rl.environment import ALERT
from titan_rl.ext.alerts.alerting import EVENTS, destination, is_address


def problems(config: Config) -> Iterator[str]:
    metrics = config.metrics
    for name in metrics.alert_on:
        if name not in EVENTS:
            hint = did_you_mean(name, EVENTS)
            yield f"metrics.alert_on: expected any of {', '.join(EVENTS)}, found {as_toml(name)}{hint}"
    if not metrics.alert:
        yield f"metrics.alert_on: expected no events without metrics.alert, found {as_toml(metrics.alert_on)}"
    elif not destination(config):
        yield f"metrics.alert: expected the environment variable {ALERT} to hold a command or an address, found none"
    elif problem := problem_of(destination(config)):
        yield f"metrics.alert: expected {problem}"


def problem_of(to: str) -> str:
    """Return what a destination should be, without the destination itself, which may hold a secret; or ""."""
    if is_address(to):
        try:
            found = urlsplit(to)
            named = bool(found.hostname and (found.port is None or found.port))
        except ValueError:
            named = False
        return "" if named else "an address such as https://host/path, found one without a host"
    try:
        words = shlex.split(to)
    except ValueError as error:
        return f"a command, found one that cannot be split into words: {error}"
    if not words or shutil.which(words[0]) is None:
        return f"a program on PATH, or an http(s) address, found {as_toml(words[0] if words else '')}"
    return ""


def warnings(config: Config) -> Iterator[str]:
    if config.metrics.alert and not config.metrics.alert_on:
        yield "metrics.alert is never called: metrics.alert_on is empty"
