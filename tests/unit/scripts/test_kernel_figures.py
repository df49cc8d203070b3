"""docs/benchmarks.md has the script's figures, and the benchmark takes a GPU's own time."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import bench_kernels
import pytest
import torch

DOC = Path(__file__).parents[3] / "docs/benchmarks.md"


def test_the_estimates_of_the_page_are_the_scripts() -> None:
    pytest.importorskip("triton")
    from kernel_report import estimates

    assert "\n".join(["<!-- scripts/kernel_report.py estimates -->", *estimates(), ""]) in DOC.read_text()


def test_a_gpus_pass_is_timed_by_events_that_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock: Iterator[int] = count(step=250)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = next(clock)
            order.append("record")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    monkeypatch.setattr(bench_kernels, "DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("idle"))
    assert bench_kernels.seconds(lambda: order.append("run")) == {"device time, s": 0.25}
    assert order == ["idle", "record", "run", "record", "wait"]
