"""A mixture of experts on gloo ranks: the mesh, and experts over ranks, show in no loss, gradient, count or export."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from support.async_gather import needs_gradient
from support.gloo_ranks import on_ranks
from support.rank_programs import STEPS, Case, train_and_export

ALONE = Case(family="qwen3_moe", share=False)
LAYOUTS = {
    2: ("fsdp2_ep2", "tp2_ep2", "tp2"),
    4: ("fsdp2_tp2_ep2", "hsdp_2x2_ep2"),
}
EXPORTS = 3  # the last layouts


def case(layout: str, **keys: Any) -> Case:
    return Case(family="qwen3_moe", layout=layout, share=False, **keys)


def answers(ranks: int, cases: Sequence[Case]) -> tuple[list[Any], list[Any]]:
    return on_ranks(ranks, train_and_export, cases, cases[-EXPORTS:])


@pytest.fixture(scope="module")
def alone() -> tuple[list[Any], list[Any]]:
    return answers(1, [ALONE])


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_ranks_compute_what_one_does(ranks: int, alone: tuple[list[Any], list[Any]]) -> None:
    cases = [case("fsdp2" if ranks == 2 else "fsdp2_tp2_ep4", sync="microbatch"), *map(case, LAYOUTS[ranks])]
    losses, exports = answers(ranks, cases)
    (expected,), (whole,) = alone
    assert len(expected) == STEPS
    assert expected[0] != expected[1], "the steps differ"
    assert all(len(step) == 5 and 1 < step[2] <= step[3] for step in expected), "and the experts are used unevenly"
    for each, found in zip(cases, losses, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6, err_msg=each.layout)
    assert exports == [whole] * EXPORTS


def test_an_unfinished_gather_loses_its_gradient_in_local_map() -> None:
    """This is why Mixture copies its input. If it fails, torch may have been mended, and the copy can go."""
    assert on_ranks(2, needs_gradient) == {
        "waited for": True,
        "unfinished": False,
        "unfinished, copied": True,
    }
