"""A run whose engine means something else by the same bytes."""

import json
from pathlib import Path

import pytest

from support.running import Runs
from titan_rl.wire import failpoints


def test_an_engine_that_packs_one_weight_when_it_loads_ends_the_run_before_a_step(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: one linear layer computes with a copy from before the first sync, as vLLM's own CPU layers do. Its
    parameter has the trainers' bytes, so every checksum is right."""
    orders = tmp_path / "orders"
    orders.mkdir()
    failpoints.give(orders, "generator0[tp=0]", "pack", failpoints.FaultOrder("damage"))
    monkeypatch.setenv(failpoints.FOLDER, str(orders))
    run = runs.start(tmp_path / "run")
    out = run.finish(timeout=200)
    assert run.code == 1, out
    assert "the generators compute something else than the trainers: their log-probs differ by" in out
    assert "Expected at most 0.001 over 32 tokens sampled after the first weight sync" in " ".join(out.split())
    (hit,) = [json.loads(line) for line in (orders / failpoints.HITS).read_text().splitlines()]
    assert (hit["rank"], hit["point"]) == ("generator0[tp=0]", "pack")
    assert run.lines("metrics.jsonl") == run.lines("metrics.jsonl", "cold_start") == []
    assert not run.processes()
