"""`python -m titan_rl replay`: a step is made again from kept batches, on the run's mesh and on another."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.running import RunFiles
from titan_rl.ext.replay.kept_batches import KeptBatches

ONE_RANK = ("--parallelism.data_parallel_shard_degree", "1")


@pytest.fixture
def copy(whole: RunFiles, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.folder, tmp_path / "run"))


def replay(run: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "titan_rl", "replay", str(run), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_step_on_the_run_s_mesh_is_equal_and_on_one_rank_nearly(copy: Path) -> None:
    assert KeptBatches(copy, 0).steps == [5, 6, 7, 8]
    code, out = replay(copy, "--step", "8", "--logprobs")
    assert code == 0, out
    rows = [line.split() for line in out.splitlines() if line.split()[1:2] in (["loss"], ["grad_norm"])]
    assert [row[0] for row in rows] == ["7", "7", "8", "8"]  # the checkpoint is of step 6
    assert {row[-1] for row in rows} == {"equal"}
    lines = [json.loads(line) for line in (copy / "replays" / "step-8.jsonl").read_text().splitlines()]
    gaps = [abs(gap) for line in lines for gap in line["gaps"]]
    assert 0 < max(gaps) < 1e-4
    code, out = replay(copy, "--step", "8", *ONE_RANK)
    assert code == 0, out


def test_a_changed_batch_is_told_from_the_run_s(copy: Path) -> None:
    kept = KeptBatches(copy, 4)
    updates = [
        [sample.with_columns(advantage=np.add(sample.columns["advantage"], 1.0)) for sample in update]
        for update in kept.read(8)
    ]
    kept.write(8, updates)
    code, out = replay(copy, "--step", "8")
    assert code == 1, out
    assert "step 8 differs by more than" in out


def test_the_debugger_stops_at_the_step(copy: Path) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"p len(batches)\nc\n")
    done = subprocess.run(
        [sys.executable, "-m", "titan_rl", "replay", str(copy), "--step", "8", "--debug", *ONE_RANK],
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "-> return self.phase.step(batches" in done.stdout
    assert "StepStats(loss=" in done.stdout
