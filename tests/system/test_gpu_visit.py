"""The visit of a machine with GPUs, on a CPU: tiny shapes, and Triton's interpreter for the checks of kernels."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/gpu_visit/visit.py"

QUICK = ["imports", "update", "sampling", "sampling_bare", "wake", "race_large", "adapter", "fp8", "killed"]
CHECKS = ["card", "numbers", "steps", "compiled", "deterministic", "weights"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("parts", [QUICK, CHECKS], ids=["ten minutes", "checks"])
def test_every_part_passes_on_a_cpu(parts: list[str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--minutes",
        "35",
        "--only",
        *parts,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = (tmp_path / "report.md").read_text()
    assert (done.returncode, "WRONG" in text) == (0, False), text + done.stderr
    results = dict(row.strip("| ").split(" | ")[::2] for row in text.splitlines() if row.count(" | ") == 3)
    assert {name: results[name] for name in parts} == dict.fromkeys(parts, "passed")
    if parts is CHECKS:
        assert text.count("| ok |") > 40
    else:
        assert (tmp_path / "race_large/timeline.json").exists()
        assert "trainer[dp=0 tp=0] | backward" in text
