"""The report from a GPU without vLLM and Monarch: its script on a CPU, with Triton's interpreter and tiny shapes."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/gpu_bare.py"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_bare_script_finds_nothing_wrong_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu_bare.md"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = out.read_text()
    assert (done.returncode, "| WRONG |" in text) == (0, False), text + done.stderr
    parts = {line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")}
    assert {"checksums", "head", "weights", "float32", "bfloat16", "eager", "deterministic"} <= parts
    assert text.count("| ok |") > 40
