"""Reads and changes keys of a Config by their dotted names, such as "training.steps"."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from titan_rl.config.sections import Config
from titan_rl.config.toml import schema


def valued(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def changed(config: Config, keys: Mapping[str, Any]) -> Config:
    """Return the config with other values of some keys."""
    by_section = defaultdict[str, dict[str, Any]](dict)
    for key, value in keys.items():
        section, _, name = key.partition(".")
        by_section[section][name] = value
    return replace(config, **{section: replace(getattr(config, section), **own) for section, own in by_section.items()})


def differences(one: Config, other: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that have another value in two configs, with both values."""
    for section, names in schema().items():
        before, after = getattr(one, section), getattr(other, section)
        for name in names:
            if (values := (getattr(before, name), getattr(after, name)))[0] != values[1]:
                yield f"{section}.{name}", *values
