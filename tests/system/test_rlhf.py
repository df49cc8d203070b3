"""scripts/rlhf.py as a user calls it, on a model of random weights: stopped in a run, continued, and called again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.ctrl_c import hears_ctrl_c
from support.running import RunFiles, Runs

SCRIPT = Path(__file__).parents[2] / "scripts" / "rlhf.py"
PORT = 18741
STARTED = re.compile(r"^\$ .* -m titan_rl\.(\w+)", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_pipeline_on_a_toy(runs: Runs, tmp_path: Path) -> None:
    start: dict[str, Any] = {"cold_start__steps": 0, "training__steps": 1, "training__global_batch_size": 8}
    model = runs.finish(tmp_path / "model", "sft_llama", **start, optimizer__lr=1e-9).folder / "hf"
    keys = {"model.hf_assets_path": model, "training.steps": 6, "training.global_batch_size": 4, "eval.size": 4}
    flags = [f"--{key}={value}" for key, value in keys.items()]
    command = [sys.executable, SCRIPT, "--folder", tmp_path / "rlhf", "--judge-port", str(PORT), *flags]
    folder = {name: RunFiles(tmp_path / "rlhf" / name) for name in ("reward_model", "judge", "grpo", "ppo")}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    # Stopped in the second step of GRPO, while the judge is served.
    with (tmp_path / "log").open("w") as log:
        program = subprocess.Popen(command, stdout=log, stderr=log, env=env, preexec_fn=hears_ctrl_c)
    deadline = time.monotonic() + 600
    while not any(line["step"] >= 2 for line in folder["grpo"].lines("metrics.jsonl")):
        assert program.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.1)
    program.send_signal(signal.SIGINT)
    assert program.wait(120) == 130
    assert "stopped: the same command continues" in (tmp_path / "log").read_text()

    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert STARTED.findall(done.stdout) == ["serve", "run", "run", *["audit"] * 4]
    assert [line["step"] for line in folder["grpo"].lines("metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    for name in ("grpo", "ppo"):
        assert all("reward_part/grader" in line for line in folder[name].lines("metrics.jsonl"))
        assert folder[name].lines("metrics.jsonl", "eval")[0]["eval/judged/failed"] <= 4
    assert done.stdout.count("nothing lost, nothing twice, nothing stale") == 2
    assert re.search(r"\ngrpo .*\nppo .*\n$", done.stdout)

    again = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert STARTED.findall(again.stdout) == ["audit"] * 4
    assert again.stdout.splitlines()[-6:] == done.stdout.splitlines()[-6:]
