"""Replayed routes on gloo ranks: mesh, recomputation, compilation and streaming show in no loss, gradient or score."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.gloo_ranks import on_ranks
from support.rank_programs import Case
from support.routed_rows import replay
from support.slow_cases import slow_except

ALONE = Case(family="qwen3_moe", share=False)
LAYOUTS = {
    2: ("fsdp2", "tp2", "fsdp2_ep2", "tp2_ep2"),
    4: ("fsdp2_tp2_ep2", "cp2_tp2_ep4"),
}
ACCURACY = 1e-5
GATES = 1e-8  # their largest gradient is 1e-3


BIASED = replace(ALONE, family="glm4_moe", layers=3)  # the first layer has no experts


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    (found,) = on_ranks(1, replay, [ALONE])
    return found


def check(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    np.testing.assert_allclose(found["steps"], expected["steps"], rtol=0, atol=ACCURACY, err_msg=where)
    np.testing.assert_allclose(found["gates"], expected["gates"], rtol=0, atol=GATES, err_msg=where)
    for name, scores in expected["scores"].items():
        np.testing.assert_allclose(found["scores"][name], scores, rtol=0, atol=ACCURACY, err_msg=f"{where}: {name}")
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6), where


def test_a_replay_of_drawn_routes_changes_what_is_learnt(alone: dict[str, Any]) -> None:
    for step in alone["metrics"]:
        assert 0.7 < step["routing/replayed"] < 0.9, "a fifth of the tokens has no known route"
        assert step["routing/agreement"] == pytest.approx(0.25, abs=0.1), "two of eight experts agree by chance"
    assert all(np.abs(gate).max(1).min() > 1e-5 for gate in alone["gates"]), "each expert's row learns"
    assert np.abs(np.subtract(alone["scores"]["replayed"], alone["scores"]["own"])).max() > 1e-3


@pytest.mark.parametrize("ranks", slow_except(LAYOUTS, 0))
def test_ranks_replay_as_one_does(ranks: int, alone: dict[str, Any]) -> None:
    cases = [replace(ALONE, layout=layout) for layout in LAYOUTS[ranks]]
    for case, found in zip(cases, on_ranks(ranks, replay, cases), strict=True):
        check(found, alone, case.layout)


@pytest.mark.slow
def test_first_layers_without_experts_have_no_routes() -> None:
    (alone,) = on_ranks(1, replay, [BIASED])
    for step in alone["metrics"]:
        assert 0.7 < step["routing/replayed"] < 0.9, "a fifth of the tokens has no known route"
        assert step["routing/agreement"] == pytest.approx(0.25, abs=0.1), "two of eight experts agree by chance"
    eager = replace(BIASED, layout="tp2_ep2", flash=True, compute="bfloat16")
    cases = [replace(BIASED, layout="tp2_ep2"), replace(BIASED, layout="fsdp2", recompute="full")]
    *same, rounded, traced = on_ranks(2, replay, [*cases, eager, replace(eager, compiled=True, recompute="selective")])
    for case, found in zip(cases, same, strict=True):
        check(found, alone, case.layout)
    assert traced == rounded


@pytest.mark.slow
def test_recomputed_compiled_and_streamed_steps_replay_the_same() -> None:
    """A backward that computes a block again must take the experts that its forward took."""
    plain = replace(ALONE, layout="tp2_ep2")
    eager = replace(plain, flash=True, compute="bfloat16")
    compiled = replace(eager, compiled=True, recompute="selective")
    cases = [plain, replace(plain, recompute="full"), replace(plain, parts=2, recompute="selective"), eager, compiled]
    first, recomputed, streamed, last, traced = on_ranks(2, replay, cases)
    assert recomputed == first
    check(streamed, first, "streamed")
    assert traced == last
