"""Models on gloo ranks without Monarch: CUDA's modules with CPU kernels under them, and gradients synced per update.

Recomputed activations, compiled blocks, FlashAttention's operators and FSDP2 or TP meet here as on a GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from support.gloo_ranks import on_ranks
from support.rank_programs import STEPS, Case, saved_and_stepped, train_and_count, train_and_export
from titan_rl.config.sections import Dtype

Mode = Literal["none", "selective", "full", "offload"]
MODES: tuple[Mode, ...] = ("none", "selective", "full", "offload")
Losses = list[list[float]]  # loss and gradient norm of each step
Answer = tuple[list[Losses], list[Any]]


def on_cuda(layout: str, modes: Sequence[Mode] = MODES) -> list[Case]:
    return [Case(layout=layout, flash=True, compute="bfloat16", recompute=mode) for mode in modes]


def compiled(layout: str, modes: Sequence[Mode]) -> list[Case]:
    """Return a case that is not compiled, then one per mode that is. Each layer is compiled anew: they have one."""
    plain, *others = (replace(case, layers=1) for case in on_cuda(layout, ["none", *modes]))
    return [plain, *(replace(case, compiled=True) for case in others)]


def synced(layout: str, compute: Dtype = "float32") -> list[Case]:
    """Return cases that sync gradients after every microbatch, per update, and per part of an update."""
    whole = Case(layout=layout, compute=compute)
    return [replace(whole, sync="microbatch"), whole, replace(whole, parts=2)]


def sharing(layout: str, *shares: bool) -> list[Case]:
    """Return cases with and without shared prompts: in float32, and with CUDA's attention."""
    whole = Case(layout=layout)
    flash = replace(whole, flash=True, compute="bfloat16", recompute="selective")
    return [replace(case, share=share) for case in (whole, flash) for share in shares]


@pytest.fixture(scope="module")
def alone() -> Answer:
    cases = [*on_cuda("one"), *compiled("one", MODES), Case(compute="bfloat16"), *synced("one")]
    cases += sharing("one", False, True)
    cases.append(replace(cases[-1], compiled=True))
    return on_ranks(1, train_and_export, cases, [Case()])


@pytest.fixture(scope="module")
def two() -> Answer:
    meshed = [(on_cuda(layout), compiled(layout, ["selective", "offload"])) for layout in ("fsdp2", "tp2")]
    cases = [case for eager, graphs in meshed for case in (*eager, *graphs)]
    cases += [*synced("fsdp2"), *sharing("fsdp2", True), *sharing("tp2", True)]
    return on_ranks(2, train_and_export, cases, [])


@pytest.fixture(scope="module")
def four() -> Answer:
    cases = [*synced("fsdp2_tp2", "bfloat16"), *synced("hsdp_2x2")]
    cases += [*sharing("fsdp2_tp2", True)[:1], *sharing("hsdp_2x2", True)[:1]]
    return on_ranks(4, train_and_export, cases, [Case(layout="fsdp2_tp2", recompute=mode) for mode in MODES])


def assert_close(found: Losses, expected: Losses, relative: float) -> None:
    assert len(found) == STEPS
    assert found[0] != found[1], "the steps differ"
    np.testing.assert_allclose(found, expected, rtol=relative)


def test_recomputed_and_compiled_blocks_change_no_loss(alone: Answer) -> None:
    eager, plain, document = alone[0][:4], alone[0][4], alone[0][9]
    assert eager == [eager[0]] * 4, "recomputing and offloading change no bit"
    for found in alone[0][5:9]:
        assert_close(found, plain, 1e-3)
    assert_close(eager[0], document, 1e-2)
    assert eager[0] != document, "it is another attention"


@pytest.mark.parametrize(("first", "layout"), [(0, "fsdp2"), (7, "tp2")], ids=["fsdp2", "tp2"])
def test_nor_do_they_on_a_mesh(first: int, layout: str, alone: Answer, two: Answer) -> None:
    *eager, plain, selective, offload = two[0][first : first + 7]
    assert eager == [eager[0]] * 4
    for found in (selective, offload):
        assert_close(found, plain, 1e-3)
    if layout == "tp2":  # it has the rows of one process
        assert_close(eager[0], alone[0][0], 1e-2)


def test_shared_prompts_change_no_loss_on_any_mesh(alone: Answer, two: Answer, four: Answer) -> None:
    plain, exact, flash_plain, *flash = alone[0][-5:]
    fsdp2, tp2 = two[0][-4:-2], two[0][-2:]
    for found in (exact, fsdp2[0], tp2[0], *four[0][-2:]):
        assert_close(found, plain, 1e-6)
    for found in (*flash, fsdp2[1], tp2[1]):
        assert_close(found, flash_plain, 1e-2)


def test_gradients_synced_once_per_update_are_those_synced_each_microbatch(
    alone: Answer, two: Answer, four: Answer
) -> None:
    for answer, first in ((alone, 10), (two, 14), (four, 0), (four, 3)):
        each, whole, parts = answer[0][first : first + 3]
        assert_close(whole, each, 1e-6)
        assert_close(parts, each, 1e-6)


def each_gather(case: Case) -> list[Case]:
    return [replace(case, gather="update"), replace(case, gather="microbatch")]


@pytest.mark.parametrize(("ranks", "layout"), [(1, "one"), (2, "fsdp2"), (2, "tp2")])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_parameters_are_gathered_once_per_update_and_computed_with_the_same(
    ranks: int, layout: str, compute: Dtype
) -> None:
    cases = [
        case
        for microbatches in (1, 8)
        for case in each_gather(Case(layout=layout, compute=compute, microbatches=microbatches, layers=6))
    ]
    one, one_again, eight, eight_again = on_ranks(ranks, train_and_count, cases)
    assert (one[0], eight[0]) == (one_again[0], eight_again[0]), "the same bits"
    groups = 8 if layout == "fsdp2" else 0  # the embedding, six blocks, the norm with the head
    assert one[1] == eight[1] == groups
    assert (one_again[1], eight_again[1]) == (max(0, 2 * groups - 1), max(0, 8 * (2 * groups - 1)))
    if layout == "one":
        assert one[2] <= one_again[2] / 50
        assert eight[2] <= eight_again[2] / 50
    else:  # with one microbatch the gradients' copies remain
        assert one[2] <= 0.7 * one_again[2]
        assert eight[2] <= eight_again[2] / 4


ALONE = [
    *(Case(compute="bfloat16", recompute=mode, flash=True) for mode in MODES),
    Case(compute="bfloat16", parts=2),
    Case(compute="bfloat16", sync="microbatch", family="qwen3_moe"),
    Case(compute="bfloat16", lora=4),
    Case(lora=4, parts=2),
    Case(compute="bfloat16", compiled=True, flash=True, layers=1),
]
"""Cases that pair one rank with recomputed blocks, experts, parts of an update, adapters and graphs."""
MESHED = [
    *synced("fsdp2", "bfloat16"),
    Case(layout="fsdp2", compute="bfloat16", lora=4),
    Case(layout="tp2", compute="bfloat16", lora=4, recompute="full"),
    Case(layout="hsdp", compute="bfloat16"),
]


@pytest.mark.parametrize(("ranks", "cases"), [(1, ALONE), (2, MESHED)], ids=["alone", "meshed"])
def test_how_parameters_are_gathered_changes_no_bit(ranks: int, cases: list[Case]) -> None:
    found, _ = on_ranks(ranks, train_and_export, [both for case in cases for both in each_gather(case)], [])
    assert found[::2] == found[1::2]


KEPT = [
    Case(layout="fsdp2", compute="bfloat16", parts=2),
    Case(layout="tp2", compute="bfloat16", lora=4),
    Case(layout="cp2", share=True),
]


@pytest.mark.parametrize(("ranks", "cases"), [(1, ALONE[-4:-1]), (2, KEPT)], ids=["alone", "meshed"])
def test_kept_logits_change_no_bit(ranks: int, cases: list[Case]) -> None:
    both = [replace(case, keep_logits=keep) for case in cases for keep in (True, False)]
    found, _ = on_ranks(ranks, train_and_export, both, [])
    assert found[::2] == found[1::2]


@pytest.mark.parametrize("lora", [0, 4])
def test_a_checkpoint_of_one_rank_resumes_with_fsdp_without_it_and_on_two_ranks(lora: int, tmp_path: Path) -> None:
    def run(ranks: int, case: Case, at: int) -> list[float]:
        return on_ranks(ranks, saved_and_stepped, str(tmp_path), replace(case, compute="bfloat16", lora=lora), at)

    plain, sharded = each_gather(Case())
    begun = run(1, sharded, 0)  # writes step 1
    assert run(1, plain, 0) == begun
    found = run(1, plain, 1)  # from the one that `plain` wrote, and writes step 2
    run(1, sharded, 0)
    assert run(1, plain, 1) == found, "the same from the one that `sharded` wrote"
    assert run(1, sharded, 1) == found
    np.testing.assert_allclose(run(2, Case(layout="fsdp2"), 1), found, rtol=1e-2)  # sums in another order, 16 bits


def test_cut_rotary_heads_are_exported_whole_however_activations_are_kept(alone: Answer, four: Answer) -> None:
    """Each of the 2 x 2 ranks has half a head of k_proj."""
    assert four[1] == alone[1] * len(MODES)
