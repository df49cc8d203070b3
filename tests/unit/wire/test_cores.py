"""How many cores a process counts as its own."""

import os
from pathlib import Path

import pytest

from titan_rl.wire import cores


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 6), ("900000 100000", 6), ("nonsense", 6), (None, 6)],
)
def test_a_container_s_limit_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(cores, "CPU_MAX", tmp_path / "cpu.max")
    if limit is not None:
        cores.CPU_MAX.write_text(limit)
    assert cores.usable_cores() == expected
