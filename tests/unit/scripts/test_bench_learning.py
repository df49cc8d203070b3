"""scripts/bench_learning.py: what its figures depend on. The runs themselves are made by hand."""

import os
import subprocess
import sys

from bench.learning import summary


def row(config: str, variant: str, seed: int, *scores: float) -> dict[str, str]:
    curve = " ".join(f"{10 * i}:{score:.4f}" for i, score in enumerate(scores))
    ends = {"start": f"{scores[0]:.4f}", "final": f"{scores[-1]:.4f}", "curve": curve}
    return {"config": config, "variant": variant, "seed": str(seed), **ends, "wall_s": "60", "cpu_s": "90"}


def test_the_summary_counts_the_runs_that_end_high_and_those_that_improve() -> None:
    rows = [row("a", "avx2", 0, 0.7, 0.95), row("a", "sse4", 0, 0.6, 0.94), row("b", "sse4", 0, 0.6, 0.5)]
    assert list(summary(rows)) == [
        "a: 2 runs with 2 different curves, "
        "0.650 (0.600 to 0.700) -> 0.945 (0.940 to 0.950), 2 improved, 1 ended at 0.95 or more; "
        "median wall 60 s, CPU 90 s",
        "b: 1 runs with 1 different curves, "
        "0.600 (0.600 to 0.600) -> 0.500 (0.500 to 0.500), 0 improved, 0 ended at 0.95 or more; "
        "median wall 60 s, CPU 90 s",
    ]


def test_the_seconds_of_a_process_that_outlives_its_parent_count() -> None:
    """Measured in a separate process, because it waits for every child of its process."""
    burn = "import time; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}], start_new_session=True)"
    program = (
        "import os, sys; from bench.learning import run_counted\n"
        f"print(run_counted([sys.executable, '-c', {parent!r}], dict(os.environ)))\n"
        "run_counted([sys.executable, '-c', 'print(\"why\"); raise SystemExit(3)'], dict(os.environ))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert float(found.stdout) >= 0.4
    assert found.returncode == 1
    assert "ended with 3:\nwhy" in found.stderr
