"""Whole runs whose engines draft: of several turns, of two ranks, and with adapters."""

from pathlib import Path
from typing import Any

import pytest

from support.outputs import losses, sampled
from support.running import Runs
from support.slow_cases import slow_except

FEW: dict[str, Any] = {"cold_start__steps": 6, "training__steps": 4, "algorithm__kl_coef": 0.0, "eval__size": 0}
CASES: dict[str, dict[str, Any]] = {
    "hunt_llama": {"environment__concurrency": 16},
    "grpo_llama": {
        "generator__max_num_seqs": 1,  # siblings wait for each other
        "generator__tensor_parallel_degree": 2,
        "lora__rank": 4,
        "optimizer__lr": 1e-2,
        "rollout__temperature": 0.3,  # and are alike
    },
}


@pytest.mark.parametrize("name", slow_except(CASES, 1))
def test_a_run_that_drafts_has_the_rollouts_of_one_that_does_not(name: str, runs: Runs, tmp_path: Path) -> None:
    plain = runs.finish(tmp_path / "plain", name, **FEW, **CASES[name])
    drafting = runs.finish(tmp_path / "drafting", name, **FEW, **CASES[name], generator__drafts="siblings")
    assert [each[:3] for each in sampled(drafting)] == [each[:3] for each in sampled(plain)]
    for found, expected in zip(sampled(drafting), sampled(plain), strict=True):
        assert found[3] == pytest.approx(expected[3], abs=1e-4)
    assert losses(drafting) == pytest.approx(losses(plain), abs=1e-4)
    drafted, accepted = (
        sum(each.get(f"engine/{kind}_tokens", 0) for each in drafting.lines("metrics.jsonl"))
        for kind in ("drafted", "accepted")
    )
    assert drafted > accepted > 0
    assert not any("engine/drafted_tokens" in each for each in plain.lines("metrics.jsonl"))
