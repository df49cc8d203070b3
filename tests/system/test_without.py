"""The core runs without its optional parts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "scripts/take_away.py"
PARTS = [*sorted(path.name for path in (ROOT / "titan_rl/ext").glob("*/")), "tools"]


def without(*arguments: str, seconds: float) -> None:
    done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].endswith(": trained, resumed, recovered and exported")


@pytest.mark.timeout(1100)
def test_the_core_alone_trains_resumes_recovers_and_exports() -> None:
    without("--all", "--no-tests", seconds=1000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_cores_tests_pass_without_the_parts() -> None:
    without("--all", seconds=1700)


@pytest.mark.slow
@pytest.mark.parametrize("part", [name for name in PARTS if not name.startswith("__")])
def test_each_part_alone_can_be_taken_away(part: str) -> None:
    without(part, "--no-tests", seconds=500)
