"""The report that a user with a GPU sends: every part runs within its limit, also if others fail."""

import subprocess
import sys
import time
from pathlib import Path

import gpu_smoke
import pytest
from gpu_smoke import Part, execute, parts_for, report

from titan_rl.config.toml import find, load
from titan_rl.preflight.checks import problems
from titan_rl.wire.gpus import Gpus

ROOT = Path(__file__).parents[3]


def part(program: str, seconds: int = 60) -> Part:
    return Part("a part", "something", [sys.executable, "-c", program], seconds)


def test_a_part_that_fails_or_hangs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_smoke, "GRACE", 0.2)
    hang = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    parts = [part("print('fine')"), part("import sys; sys.exit('no such GPU')"), part(hang, 1)]
    began = time.monotonic()
    for one in parts:
        execute(one)
    assert time.monotonic() - began < 60
    assert [one.ended for one in parts] == [
        "passed",
        "failed with exit code 1",
        "stopped by this script's limit of 1 s",
    ]
    text = report(parts, "cuda", Gpus(1, 80 << 30, driver="580.65", cuda="13.0"))
    assert all(
        line in text
        for line in ("no such GPU", "driver 580.65 for CUDA up to 13.0", "| stopped by this script's limit of 1 s |")
    )


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_cousins_of_the_presets_start_on_any_node(count: int, tmp_path: Path) -> None:
    gpus = Gpus(count, 16 << 30)
    runs = {part.name: part for part in parts_for("cuda", gpus, tmp_path) if part.run}
    assert set(runs) == {"one_gpu", "float32"} | ({"node", "lag"} if count > 1 else set())
    for run in runs.values():
        flags = [str(word).removeprefix("--").split("=", 1) for word in run.command if "=" in str(word)]
        name = run.command[run.command.index("--config") + 1]
        assert problems(load(find(name), [(key, value) for key, value in flags]), gpus=gpus) == []


def test_the_script_says_what_it_needs(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts/gpu_smoke.py"), "--folder", str(tmp_path)]
    none = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert none.returncode == 2
    assert "expected a GPU that nvidia-smi shows, found none" in none.stderr
    other = subprocess.run([*script, "--device", "cpu", "--only", "docter"], capture_output=True, text=True, timeout=60)
    assert other.returncode == 2
    assert "found ['docter']" in other.stderr
    one = subprocess.run([*script, "--device", "cpu", "--only", "doctor"], capture_output=True, text=True, timeout=120)
    assert one.returncode == 0, one.stderr
    assert "| doctor | this machine and its install | passed |" in (tmp_path / "report.md").read_text()
