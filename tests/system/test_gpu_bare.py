"""The report from a GPU without vLLM and Monarch: its script on a CPU, with Triton's interpreter and tiny shapes.

A second test runs it as on a bare machine: in a virtual environment with torch 2.11 and the carried wheels. It needs a
package index and five gigabytes, because PyPI has only torch's CUDA build."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/gpu_bare.py"
CARRIED = ["torchtitan==0.3.0", "spmd_types==0.2.3", "tyro", "typeguard", "docstring_parser", "tomli", "torchdata"]
CARRIED += ["xxhash", "liger-kernel==0.8.5"]
# Triton 3.6's interpreter makes numbers of arrays of one element, which numpy 2.4 refuses.
BARE = ["torch==2.11.0", "numpy<2.4", f"transformers=={version('transformers')}"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A machine's Python, with the carried wheels in the folder site beside it."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*install, *BARE], check=True)
    subprocess.run([*install, "--no-deps", "--target", folder / "site", *CARRIED], check=True)
    yield python
    shutil.rmtree(folder)


def report(python: str | Path, out: Path, *path: Path) -> str:
    """Run the script with only this checkout and `path` to import from. Return its report, which has no WRONG row."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))}
    command = [str(python), str(SCRIPT), "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    text = out.read_text()
    assert (done.returncode, "| WRONG |" in text) == (0, False), text + done.stderr
    parts = {line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")}
    assert {"checksums", "head", "weights", "float32", "bfloat16", "eager", "recompute", "deterministic"} <= parts
    assert text.count("| ok |") > 40
    return text


def test_the_bare_script_finds_nothing_wrong_on_a_cpu(tmp_path: Path) -> None:
    report(sys.executable, tmp_path / "gpu_bare.md")


def test_nor_does_it_with_torch_2_11_and_what_it_says_to_carry(bare: Path, tmp_path: Path) -> None:
    text = report(bare, tmp_path / "gpu_bare.md", bare.parents[2] / "site")
    assert "torch 2.11.0" in text.splitlines()[0]
    assert "added to this torch" in text
