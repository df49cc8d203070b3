"""Divergences from a teacher's top tokens on gloo ranks: meshes and shared prompts change no step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.distilled_rows import TOP, distill
from support.gloo_ranks import on_ranks
from support.rank_programs import Case

ALONE = Case(share=False)
LAYOUTS = {2: ("fsdp2", "tp2", "cp2"), 4: ("fsdp2_tp2", "cp2_tp2")}
ACCURACY = 1e-5
ENTRIES = 3e-5  # log-probs of -4 at half the temperature, in the second step of other weights


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    alone, shared = on_ranks(1, distill, [ALONE, replace(ALONE, share=True)])
    check(shared, alone, "shared prompts")
    return alone


def check(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    np.testing.assert_allclose(found["steps"], expected["steps"], rtol=0, atol=ACCURACY, err_msg=where)
    for (ids, logprobs), (same_ids, same) in zip(found["entries"], expected["entries"], strict=True):
        assert np.mean(np.array(ids) == same_ids) > 0.95, where  # rounding may exchange two neighbours
        np.testing.assert_allclose(logprobs, same, rtol=0, atol=ENTRIES, err_msg=where)


def test_the_teachers_entries_are_its_most_likely_tokens(alone: dict[str, Any]) -> None:
    unknown = 0
    for ids, logprobs in alone["entries"]:
        if ids[0][0] < 0:
            assert {id for row in ids for id in row} == {-1}
            unknown += 1
            continue
        for row, own in zip(ids, logprobs, strict=True):
            assert len(set(row[1:])) == TOP
            assert own[1:] == sorted(own[1:], reverse=True)
            assert sum(np.exp(own[1:])) < 1
            assert own[0] == pytest.approx(own[row.index(row[0], 1)]) if row[0] in row[1:] else own[0] <= own[-1]
    assert unknown == 2, "one a step"
    assert all(loss > 1e-3 and norm > 1e-3 for loss, norm, _ in alone["steps"])
    assert all(loss == pytest.approx(divergence, rel=1e-5) for loss, _, divergence in alone["steps"])


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_ranks_learn_as_one_does(ranks: int, alone: dict[str, Any]) -> None:
    cases = [replace(ALONE, layout=layout, share=False) for layout in LAYOUTS[ranks]]
    for case, found in zip(cases, on_ranks(ranks, distill, cases), strict=True):
        check(found, alone, case.layout)
