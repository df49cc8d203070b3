"""A folder with a live run: which programs may use it. The run writes no checkpoints, and its plan names that."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.running import Run, Runs
from titan_rl.record.run_lock import LOCK, RunLock

KEYS: dict[str, Any] = {
    "checkpoint__enable": False,
    "fault__snapshot_interval": 0,
    "algorithm__max_dead_steps": 0,
    "training__steps": 1000,
    "eval__interval": 0,
}


def program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", name, *arguments], capture_output=True, text=True, timeout=120)


def open_files(pid: int) -> list[str]:
    return [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]


def test_a_live_run_keeps_its_folder_to_itself(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run", **KEYS)
    run.wait_for_step(1)
    assert json.loads((run.folder / LOCK).read_text())["pid"] == run.process.pid
    assert str(run.folder / LOCK) in open_files(run.process.pid)
    ranks = run.processes()
    assert len(ranks) >= 3
    assert not [rank for rank in ranks if str(run.folder / LOCK) in open_files(rank[0])]

    for fresh in (False, True):
        other = runs.start(run.folder, **KEYS, job__fresh=fresh)
        out = other.finish(timeout=120)
        assert other.code == 2, out
        assert f"{run.folder}, where process {run.process.pid} on " in " ".join(out.split())
        assert "Traceback" not in out
    assert not (tmp_path / "run.1").exists()
    dry = program("titan_rl.run", "--config", "grpo_llama", "--job.dump_folder", str(run.folder), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    audited = program("titan_rl.tools.audit", str(run.folder))
    assert audited.returncode == 0, audited.stdout + audited.stderr

    for command in ("checkpoint", "pause"):
        refused = program("titan_rl.tools.ctl", str(run.folder), command)
        assert refused.returncode == 1
        assert f"{command}: expected checkpoint.enable = true, found false" in refused.stderr
    status = program("titan_rl.tools.ctl", str(run.folder), "status", "--json")
    assert json.loads(status.stdout)["run"]["saved"] is None
    assert program("titan_rl.tools.ctl", str(run.folder), "stop", "--wait").returncode == 0
    assert "no checkpoint was written yet: the same command starts over" in ended(run)
    assert not (run.folder / LOCK).exists()
    with RunLock(run.folder):
        pass


def ended(run: Run) -> str:
    out = run.finish(timeout=60)
    assert run.code == 130, out
    return out
