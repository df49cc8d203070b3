"""Real runs under chaos."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.running import SMALL
from titan_rl.config.sections import FaultSection

PATIENCE = 90
FAULTS = ("kill:generator", "kill:trainer", "error:generator", "corrupt:generator", "disk:trainer")


def under_chaos(folder: Path, *faults: str, **overrides: object) -> tuple[subprocess.CompletedProcess[str], Any]:
    """These faults, once each."""
    keys = {**SMALL, "generator.replicas": 2, "eval.interval": 0}
    keys |= {key.replace("__", "."): value for key, value in overrides.items()}
    run = subprocess.run(
        [
            *(sys.executable, "-m", "titan_rl.chaos", "--config", "grpo_llama", "--run", str(folder)),
            *("--kills", str(len(faults)), "--seed", "5", "--only", ",".join(faults), "--pace", "0.1"),
            *("--patience", str(PATIENCE), "--csv", str(folder.with_suffix(".csv"))),
            *(part for key, value in keys.items() for part in (f"--{key}", str(value))),
        ],
        capture_output=True,
        text=True,
        timeout=400,
    )
    return run, json.loads((folder / "chaos.json").read_text()) if run.returncode in (0, 1) else None


def test_a_run_comes_through_five_faults(tmp_path: Path) -> None:
    run, found = under_chaos(tmp_path / "run", *FAULTS, training__steps=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert found["problems"] == []
    assert all(problems == [] for problems in found["audits"].values())
    assert len(found["audits"]) == 7
    assert sorted(f"{row['fault']}:{row['role']}" for row in found["classes"]) == sorted(FAULTS)
    for outcome in found["faults"]:
        kind, mesh = outcome["fault"]["kind"], outcome["fault"]["victim"].partition("[")[0]
        assert outcome["blamed"] == ("" if kind == "corrupt" else mesh)
        assert (outcome["detected"] is None) == (kind == "corrupt")
        assert 0 < outcome["recovered"] < PATIENCE
        if kind == "kill":
            assert outcome["detected"] < FaultSection().hang_seconds, "before any deadline"
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 6


def test_a_run_that_does_not_come_through_is_named(tmp_path: Path) -> None:
    run, found = under_chaos(tmp_path / "run", "kill:trainer", training__steps=60, fault__max_restarts=0)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "expected exit code 0, found 1" in found["problems"]
    assert "died: its process was killed by signal 9" in run.stdout
