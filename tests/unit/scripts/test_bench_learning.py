"""scripts/bench_learning.py: what its figures depend on. The runs themselves are made by hand."""

import os
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest

from bench import learning as bench
from bench.learning import MACHINES, curve_of, learning, plot, summary
from bench.rows import csv_rows


def row(config: str, variant: str, seed: int, *scores: float) -> dict[str, str]:
    curve = " ".join(f"{10 * i}:{score:.4f}" for i, score in enumerate(scores))
    ends = {"start": f"{scores[0]:.4f}", "final": f"{scores[-1]:.4f}", "curve": curve}
    return {"config": config, "variant": variant, "seed": str(seed), **ends, "wall_s": "60", "cpu_s": "90"}


def test_a_run_with_a_row_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    def measured(config: str, machine: bench.Emulated, seed: int) -> dict[str, Any]:
        made.append((machine.threads, seed))
        return {key: row(config, "", seed, 0.5, 0.9)[key] for key in ("start", "final", "curve", "wall_s", "cpu_s")}

    monkeypatch.setattr(bench, "measured", measured)
    path, machines = tmp_path / "learning.csv", ["avx2", "avx2, 2 threads"]
    learning(path, "grpo_llama", machines, range(1), csv_rows(path))
    assert made == [(1, 0), (2, 0)]
    learning(path, "grpo_llama", machines, range(2), csv_rows(path))
    assert made == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert [(r["variant"], r["seed"]) for r in csv_rows(path)] == [(m, s) for s in "01" for m in machines]


def test_machines_differ() -> None:
    assert len(MACHINES) == len({str(machine) for machine in MACHINES.values()}) == 10
    assert {machine.threads for machine in MACHINES.values()} == {1, 2}


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


def test_the_plot_has_a_line_per_run_and_their_median() -> None:
    rows = [row("a", "avx2", 0, 0.5, 0.9), row("a", "sse4", 0, 0.7, 0.98), row("a", "sse4", 1, 0.6, 1.0)]
    root = xml.fromstring(plot([*rows, row("b", "sse4", 0, 0.1, 0.2)], "a"))
    lines = [element for element in root if element.tag.endswith("polyline")]
    assert len(lines) == 4
    assert lines[1].attrib["stroke"] == lines[2].attrib["stroke"] != lines[0].attrib["stroke"]
    last = [float(line.attrib["points"].split(",")[-1]) for line in lines]
    assert last[3] == last[1] < last[0]  # the median's end is that of the middle run; a better score is further up
    assert curve_of(rows[0]) == {0: 0.5, 10: 0.9}


def test_the_seconds_of_a_process_that_outlives_its_parent_count() -> None:
    """Measured in a process of its own, because it waits for every child of its process."""
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
