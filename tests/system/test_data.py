"""Runs on data as users have it: files of several kinds, mixed by weights, with a curriculum."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from support.running import Run, Runs


def sums(first: int, last: int) -> list[tuple[str, str]]:
    return [(f"{a}+{b}=", str(a + b)) for a in range(first, last) for b in range(10, 20)]


def mixed(folder: Path) -> dict[str, Any]:
    """Write a source of two Parquet files, and one of JSONL with verl's columns and a bad row; return the keys."""
    parts = folder / "easy"
    parts.mkdir(parents=True)
    for number, rows in enumerate((sums(10, 11)[:3], sums(11, 12)[:3])):
        table = pyarrow.Table.from_pylist([{"question": q, "answer": a} for q, a in rows])
        pyarrow.parquet.write_table(table, parts / f"{number}.parquet")
    lines = [json.dumps({"prompt": q, "reward_model": {"ground_truth": a}}) for q, a in sums(40, 45)]
    (folder / "hard.jsonl").write_text("\n".join([*lines[:7], '{"prompt": "1+', *lines[7:]]))
    easy = f'easy = {{path = "{parts}", weight = 3}}'
    return {
        "task__name": "jsonl",
        "task__sources": f'{{{easy}, hard = {{path = "{folder}/hard.jsonl"}}}}',
        "task__bad_rows": "drop",
        "curriculum__hopeless_wait": 1,
        "eval__size": 0,
        "checkpoint__interval": 2,
    }


def trained(run: Run) -> tuple[list[Any], list[Any]]:
    rollouts = [
        (line["step"], line["prompt_id"], line["prompt"], line["tokens"]) for line in run.lines("rollouts.jsonl")
    ]
    names = ("loss", "grad_norm", "curriculum/active", "curriculum/solved", "curriculum/waiting")
    return rollouts, [tuple(line[name] for name in names) for line in run.lines("metrics.jsonl")]


def test_a_mixture_that_is_killed_and_resumed_is_the_uninterrupted_one(runs: Runs, tmp_path: Path) -> None:
    keys = mixed(tmp_path)
    whole = runs.finish(tmp_path / "whole", training__steps=4, **keys)
    killed = runs.start(tmp_path / "killed", training__steps=4, **keys)
    killed.wait_for_step(3)  # the checkpoint of step 2 is being written
    os.kill(killed.process.pid, signal.SIGKILL)
    out = killed.finish()
    resumed = runs.finish(killed.folder, training__steps=4, **keys)
    assert trained(resumed) == trained(whole), out
    prompts = {(line["prompt_id"], line["prompt"]) for line in whole.lines("rollouts.jsonl")}
    easy = sum(prompt.startswith("1") for _, prompt in prompts)
    assert 8 <= easy < len(prompts) == 16
    waiting = [line["curriculum/waiting"] for line in whole.lines("metrics.jsonl")]
    assert len(set(waiting)) > 1  # prompts were passed over, and came back
    assert whole.summary()["bad_rows"] == resumed.summary()["bad_rows"] == 1
    assert [pid for pid, name, _ in resumed.processes() if name == "mixture"] == []
    audit = [sys.executable, "-m", "titan_rl", "audit", str(resumed.folder)]
    done = subprocess.run(audit, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
