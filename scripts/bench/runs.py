"""Whole runs of titan_rl in a process of their own, and the lines of their metrics.jsonl."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_rl.environment import CONTROLLER_ENV

CONFIG = "grpo_llama"


def run_to_end(keys: Mapping[str, Any], config: str = CONFIG, program: Sequence[str] = ("-m", "titan_rl.run")) -> str:
    """Run `program` with these config keys and return what it printed."""
    command = [sys.executable, *program, "--config", config]
    command += [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    done = subprocess.run(command, env={**CONTROLLER_ENV, **os.environ}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def metric_lines(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] in kinds]
