"""Packed rows cut over ranks: losses, gradients, metrics and scores equal one process's with whole rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.cp_programs import ALGORITHMS, STEPS, learn
from support.gloo_ranks import on_ranks
from support.outputs import losses, sampled
from support.rank_programs import Case, train_and_export
from support.running import WHOLE, RunFiles, Runs
from support.slow_cases import slow_except

ACCURACY = 1e-5


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    return on_ranks(1, learn, "one", list(ALGORITHMS))


@pytest.mark.parametrize(
    ("layout", "ranks", "names"),
    slow_except(
        [
            ("cp2", 2, list(ALGORITHMS)),
            ("fsdp2_cp2", 4, ["gspo", "dr_grpo", "ppo", "critic"]),
            ("cp2_tp2", 4, ["gspo", "kept", "ppo", "critic"]),
        ],
        0,
    ),
    ids=str,
)
def test_every_objective_learns_as_in_one_process(
    layout: str, ranks: int, names: list[str], one_process: dict[str, Any]
) -> None:
    cut = on_ranks(ranks, learn, layout, names)
    for name in names:
        check(name, cut[name], one_process[name])


def check(name: str, cut: dict[str, Any], whole: dict[str, Any]) -> None:
    assert len({step["loss"] for step in whole["steps"]}) == STEPS, f"{name}: an invariance of constants proves nothing"
    for ours, theirs in zip(cut["steps"], whole["steps"], strict=True):
        assert ours.keys() == theirs.keys()
        for metric, value in ours.items():
            if not metric.startswith(("throughput/", "tokens/")):
                assert value == pytest.approx(theirs[metric], abs=ACCURACY, rel=ACCURACY), (name, metric)
    assert any(whole["scores"]), f"{name}: it has learnt"
    np.testing.assert_allclose(cut["scores"], whole["scores"], atol=ACCURACY)


def test_other_meshes_families_and_experts_do_too() -> None:
    def shared(layout: str, **keys: Any) -> Case:
        return Case(layout=layout, share=True, **keys)

    experts: dict[str, Any] = {"family": "qwen3_moe"}
    dense, mixture = on_ranks(1, train_and_export, [shared("one"), shared("one", **experts)], [])[0]
    cases = [shared("hsdp_cp2"), shared("cp4", sync="microbatch"), shared("cp2_tp2_ep4", **experts)]
    for found, expected in zip(on_ranks(4, train_and_export, cases, [])[0], (dense, dense, mixture), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_recomputed_and_compiled_parts_with_cudas_attention() -> None:
    eager = Case(layout="cp2", share=True, flash=True, compute="bfloat16", layers=1)
    cases = [eager, replace(eager, recompute="selective"), replace(eager, recompute="selective", compiled=True)]
    plain, recomputed, compiled = on_ranks(2, train_and_export, cases, [])[0]
    (whole,) = on_ranks(1, train_and_export, [replace(eager, layout="one")], [])[0]
    assert recomputed == plain
    np.testing.assert_allclose(compiled, plain, rtol=1e-3)
    np.testing.assert_allclose(plain, whole, rtol=1e-2)


def test_a_run_trains_on_parts_as_on_whole_rows_and_survives_a_kill(
    runs: Runs, whole: RunFiles, tmp_path: Path
) -> None:
    """`whole` has two FSDP2 ranks; two that share rows sample the same and learn the same."""
    keys: dict[str, Any] = WHOLE | {
        "parallelism__data_parallel_shard_degree": 1,
        "parallelism__context_parallel_degree": 2,
    }
    folder = tmp_path / "run"
    run = runs.start(folder, **keys)
    run.wait_for_step(5)
    run.process.kill()
    run.finish(timeout=60)
    resumed = runs.finish(folder, **keys)
    assert [tokens for *_, tokens, _ in sampled(resumed)] == [tokens for *_, tokens, _ in sampled(whole)]
    assert losses(resumed) == pytest.approx(losses(whole), abs=ACCURACY)
    assert all(line["logprob_gap/mean"] <= ACCURACY for line in resumed.lines("metrics.jsonl"))
    other = runs.finish(folder, **{**keys, "parallelism__context_parallel_degree": 1, "training__steps": 9})
    assert len(losses(other)) == 9, "the checkpoint fits a mesh without parts"
