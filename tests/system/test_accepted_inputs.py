"""What the checks accept must also run: each odd but good input, as a real run of two steps."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.hostile_files import NO_REWARDS, ODD_REWARDS
from support.hostile_keys import ODD_FLAGS
from support.running import SMALL

TWO_STEPS = {
    **SMALL,
    "cold_start.steps": 2,
    "cold_start.batch_size": 8,
    "rollout.max_new_tokens": 8,
    "eval.size": 4,
    "training.steps": 2,
    "job.dump_folder": "run",
}


def run(folder: Path, *flags: str, code: int = 0) -> str:
    known = [f"--{key}={str(value).lower()}" for key, value in TWO_STEPS.items()]
    command = [sys.executable, "-m", "titan_rl.run", "--config", "grpo_llama", *known, *flags]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [flags for flags in ODD_FLAGS if "training.steps" not in flags])
def test_flags(tmp_path: Path, flags: str) -> None:
    run(tmp_path, *shlex.split(flags.replace("{world}", str(tmp_path))))


@pytest.mark.slow
@pytest.mark.parametrize("source", ODD_REWARDS)
def test_rewards(tmp_path: Path, source: str) -> None:
    (tmp_path / "judge.py").write_text(source)
    judged = source != NO_REWARDS  # else the run ends by name
    said = run(tmp_path, "--task.reward=judge:f", "--algorithm.max_dead_steps=0", code=0 if judged else 1)
    assert judged or "4 of 4 answers have no reward" in said
