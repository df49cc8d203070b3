"""Models on gloo ranks without Monarch: CUDA's modules with CPU kernels under them, and gradients synced per update.

Recomputed activations, compiled blocks, FlashAttention's operators and FSDP2 or TP meet here as on a GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from support.gloo_ranks import on_ranks
from support.rank_programs import MICROBATCHES, STEPS, Case, train_and_count, train_and_export
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


def test_a_cpu_gathers_parameters_once_per_update_and_computes_the_same() -> None:
    kept, again = on_ranks(2, train_and_count, [Case(layout="fsdp2"), Case(layout="fsdp2", gathers_once=False)])
    assert kept[0] == again[0]
    groups = 4  # the embedding, two blocks, the norm with the head
    assert kept[1] == STEPS * groups
    assert again[1] > STEPS * MICROBATCHES * groups


def test_cut_rotary_heads_are_exported_whole_however_activations_are_kept(alone: Answer, four: Answer) -> None:
    """Each of the 2 x 2 ranks has half a head of k_proj."""
    assert four[1] == alone[1] * len(MODES)
