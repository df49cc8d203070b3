"""What a loader does with a folder's tensors becomes the plan, or is refused by the parameter's name."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from titan_rl.actors.vllm import learned_plan
from titan_rl.actors.vllm.learned_plan import CopyRecorder, FolderTensor, explained, storage_of
from titan_rl.wire.weight_plan import Piece

ROWS, COLS = 6, 4


class Model(nn.Module):
    def __init__(self, rows: int = ROWS, cols: int = COLS) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(rows, cols))


def learned(load: Callable[[Tensor, Tensor], Any], model: Model | None = None) -> list[Piece]:
    """Return what `load` does with a parameter `w` and a folder's tensor `a` of the same size."""
    model = model or Model()
    a = torch.empty(tuple(model.w.shape))
    with CopyRecorder() as recorder:
        load(model.w.data, a)
    rows, cols = a.shape
    return list(
        explained(dict(model.named_parameters()), {storage_of(a): FolderTensor(["a"], [0], [rows], cols)}, recorder)
    )


def halves(w: Tensor, a: Tensor) -> None:
    w[3:].copy_(a[:3])
    w.narrow(0, 0, 3).copy_(a.narrow(0, 3, 3).contiguous())


def test_each_copy_is_a_piece() -> None:
    assert learned(lambda w, a: w.copy_(a)) == [Piece("w", 0, 0, "a", 0, ROWS, 0, COLS)]
    assert learned(halves) == [Piece("w", 0, 0, "a", 3, 3, 0, COLS), Piece("w", 3, 0, "a", 0, 3, 0, COLS)]
    assert learned(lambda w, a: w.view(-1).copy_(a.to(torch.bfloat16).view(-1))) == learned(lambda w, a: w.copy_(a))


def test_rows_in_turn_are_a_piece_each() -> None:
    found = learned(lambda w, a: (w[::2].copy_(a[:3]), w[1::2].copy_(a[3:])))
    assert [piece.row0 for piece in found] == [0, 3, 1, 4, 2, 5]
    assert {(piece.rows, piece.cols) for piece in found} == {(1, COLS)}


def test_rows_below_all_others_may_be_padding() -> None:
    assert learned(lambda w, a: (w[:4].copy_(a[:4]), w[4:].fill_(0))) == [Piece("w", 0, 0, "a", 0, 4, 0, COLS)]
    assert learned(lambda w, a: (w.zero_(), w.copy_(a))) == learned(lambda w, a: w.copy_(a))


@pytest.mark.parametrize(
    ("load", "problem"),
    [
        (lambda w, a: w.copy_(a + 1), r"w \(computed, not copied\)"),
        (lambda w, a: w.copy_(a.add_(1)), "computes by aten.add_"),
        (lambda w, a: w[:4].copy_(a[:4]), r"w \(8 elements have no source\)"),
        (lambda w, a: (w.copy_(a), w[:1].copy_(a[1:2])), r"w \(an element has two sources\)"),
        (lambda w, a: (w[2:].copy_(a[2:]), w[:2].zero_()), r"w \(filled with a constant\)"),
        (lambda w, a: w.zero_(), r"w \(filled with a constant\)"),
        (lambda w, a: torch.empty(ROWS, COLS).copy_(a), "a tensor that is no parameter"),
    ],
)
def test_all_else_is_refused(load: Callable[[Tensor, Tensor], Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        learned(load)


def test_a_copy_by_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_plan, "MOST_PIECES", 8)
    with pytest.raises(ValueError, match=r"w \(scattered by elements\)"):
        learned(lambda w, a: w.copy_(a.t()), Model(4, 4))


@given(st.data())
def test_any_cuts_by_views_give_what_the_copies_give(data: st.DataObject) -> None:
    """Copies between views are made twice: by torch, and from the pieces."""
    experts, rows, cols = (data.draw(st.integers(1, 4), name) for name in ("experts", "rows", "cols"))
    transposed = data.draw(st.booleans(), "transposed")
    stack = torch.arange(experts * rows * cols).view(experts, *((cols, rows) if transposed else (rows, cols)))
    source = stack.transpose(1, 2) if transposed else stack
    order = data.draw(st.permutations(range(experts)), "order")
    cut = data.draw(st.integers(0, cols), "cut")
    swapped = data.draw(st.booleans(), "halves of columns swapped")

    def parts() -> Iterable[tuple[Any, Any]]:
        places = [(slice(0, cut), slice(cols - cut, cols)), (slice(cut, cols), slice(0, cols - cut))]
        for to, expert in enumerate(order):
            for target, origin in places if swapped else [(slice(0, cols), slice(0, cols))]:
                yield (to, slice(None), target), (expert, slice(None), origin)

    made = torch.full((experts, rows, cols), -1)
    for target, origin in parts():
        made[target].copy_(source[origin])
    param = nn.Parameter(torch.empty(experts, rows, cols))
    with CopyRecorder() as recorder:
        for target, origin in parts():
            param.data[target].copy_(source[origin])
    names, size = [f"e{i}" for i in range(experts)], rows * cols
    table = FolderTensor(names, [i * size for i in range(experts)], [rows] * experts, cols, transposed)
    again = torch.full((experts * rows, cols), -1)
    for p in explained({"p": param}, {storage_of(stack): table}, recorder):
        found = source[names.index(p.name)][p.row0 : p.row0 + p.rows, p.col0 : p.col0 + p.cols]
        again[p.dst_row0 : p.dst_row0 + p.rows, p.dst_col0 : p.dst_col0 + p.cols] = found
    assert torch.equal(again.view_as(made), made)
