"""Configs to check, and the files that they name."""

import json
from pathlib import Path
from typing import Any

from titan_rl.config.sections import Config
from titan_rl.config.toml import load

KUHN = """[task]
name = "titan_rl.ext.agents.kuhn:deals"
[cold_start]
steps = 0
[environment]
name = "titan_rl.ext.agents.kuhn:play"
"""
SEATS = 'seats = ["first", "second"]\n'


def config(tmp_path: Path, toml: str) -> Config:
    file = tmp_path / "run.toml"
    file.write_text(toml)
    return load(file)


def rows(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def edit(path: Path, **changes: Any) -> None:
    kept = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
