"""A package `wandb` with as much as a tracker calls. Its end is a file in the run's folder."""

from pathlib import Path
from typing import Any


class Settings:
    def __init__(self, **_: Any) -> None: ...


class Run:
    offline, url = False, "http://wandb/run"

    def __init__(self, folder: str) -> None:
        self.dir, self.points = folder, 0
        self.config = self.summary = Updated()

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def log(self, _: Any) -> None:
        self.points += 1

    def finish(self, exit_code: int) -> None:
        state = self.summary.values["state"]
        Path(self.dir, "ending").write_text(f"{exit_code} {state}")
        Path(self.dir, "ending").rename(Path(self.dir, "ended"))


class Updated:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def update(self, values: dict[str, Any], **_: Any) -> None:
        self.values |= values


def init(*, dir: str, **_: Any) -> Run:
    return Run(dir)
