"""The settings with which a run was made, if it was resumed with others.

config.6.toml     in force up to step 6
config.9.toml     from there up to step 9
config.toml       from there on
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.config.changes import differences
from titan_rl.config.sections import Config
from titan_rl.config.toml import CONFIG, ConfigError, as_toml, load

KEPT = re.compile(r"config\.(\d{1,18})\.toml")


@dataclass(frozen=True, slots=True)
class Cut:
    """A step after which a run had other settings."""

    step: int
    changed: Mapping[str, tuple[str, str]]  # a key's values in TOML, before and after

    def __str__(self) -> str:
        keys = ", ".join(f"{key} {was} -> {now}" for key, (was, now) in self.changed.items())
        return f"since step {self.step}: {keys}"


def keep_config(folder: Path, config: Config, step: int) -> None:
    """Keep the settings in force at `step`, after which the run resumes, if the new ones differ. Settings of later
    steps, which the run makes again, are renamed."""
    kept = _kept(folder)
    now = next((path for at, path in kept if at >= step), folder / CONFIG)
    before = _read(now)
    if before is not None and _changed(before, config) and now.name != f"config.{step}.toml":
        shutil.copyfile(now, folder / f"config.{step}.toml")
    for at, path in kept:
        if at > step:
            path.rename(path.with_suffix(".superseded.toml"))


def cuts(folder: Path) -> list[Cut]:
    """Return the changes of a run's settings, in order. Settings that this version cannot read are left out."""
    kept = _kept(folder)
    configs = [_read(path) for path in (*(path for _, path in kept), folder / CONFIG)]
    found = [
        Cut(step, _changed(was, now))
        for (step, _), was, now in zip(kept, configs, configs[1:], strict=False)
        if was is not None and now is not None
    ]
    return [cut for cut in found if cut.changed]


def _kept(folder: Path) -> Sequence[tuple[int, Path]]:
    return sorted(
        (int(found[1]), path) for path in folder.glob("config.*.toml") if (found := KEPT.fullmatch(path.name))
    )


def _read(path: Path) -> Config | None:
    try:
        return load(path, (), of_run=True)
    except (ConfigError, OSError, ValueError):
        return None


def _changed(before: Config, after: Config) -> dict[str, tuple[str, str]]:
    both: Any = differences(before, after)
    return {key: (as_toml(was), as_toml(now)) for key, was, now in both if not key.startswith("job.")}
