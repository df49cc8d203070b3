"""Packing a shard into a reader's run, by strided copies, against indexing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.kernels.pack_weights import Cast, broken, pack, reference_pack, window
from titan_rl.wire.weight_plan import Copy


@st.composite
def copies_of(draw: st.DrawFn, name: str, rows: int, cols: int) -> Copy:
    height, width = draw(st.integers(1, rows)), draw(st.integers(1, cols))
    row0, col0 = draw(st.integers(0, rows - height)), draw(st.integers(0, cols - width))
    return Copy(name, row0, col0, height, width, "p", 0, 0)


@settings(max_examples=2 * settings().max_examples)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_copies_are_packed_as_by_indices(data: st.DataObject, held: torch.dtype, sent: torch.dtype) -> None:
    params, copies = {"vector": torch.randn(5).to(held)}, [Copy("vector", 1, 0, 3, 1, "p", 0, 0)]
    for i in range(data.draw(st.integers(1, 3), "tensors")):
        rows, cols = data.draw(st.integers(2, 16)), data.draw(st.integers(1, 9))
        wide = torch.randn(rows, cols + 2).to(held)
        params[f"{i}"] = wide[:, 1:-1] if data.draw(st.booleans(), "a view") else wide[:, 1:-1].contiguous()
        copies += data.draw(st.lists(copies_of(f"{i}", rows, cols), max_size=4))
    found, expected = torch.full((2, sum(c.elements for c in copies)), torch.nan, dtype=sent).unbind()
    pack(params, copies, found)
    reference_pack(params, copies, expected)
    assert torch.equal(found, expected)
    most = max(p.numel() for p in params.values())
    cast = Cast(
        params,
        data.draw(st.sets(st.sampled_from(sorted(params))), "cast whole"),
        torch.zeros(2, most, dtype=sent).unbind(),
    )
    pack(cast, copies, found.zero_())
    assert torch.equal(found, expected)


def test_a_parameter_is_cast_when_it_is_asked_for_into_the_memory_that_held_one_longest() -> None:
    params = {name: torch.full((2, 3), value) for name, value in {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}.items()}
    cast = Cast(params, {"a", "b", "c"}, torch.zeros(2, 8, dtype=torch.bfloat16).unbind())
    assert cast["d"] is params["d"]
    kept = {name: cast[name] for name in "abc"}
    params["b"].zero_()
    assert cast["b"].data_ptr() == kept["b"].data_ptr()
    assert cast["b"].unique().tolist() == [2]  # as it was when it was cast
    assert kept["a"].data_ptr() == cast["c"].data_ptr()
    assert cast["a"].unique().tolist() == [1]
    assert cast["b"].unique().tolist() == [0]


def test_worth_casting_whole_is_what_is_taken_mostly_and_by_parts_of_rows() -> None:
    params = {name: torch.zeros(8, 4) for name in ("halves", "half", "rows")} | {"vector": torch.zeros(8)}
    copies = [Copy(name, 0, 0, 8, 2, "p", 0, 0) for name in ("halves", "half")]
    copies += [Copy("halves", 0, 2, 8, 2, "p", 0, 0), Copy("rows", 0, 0, 8, 4, "p", 0, 0)]
    copies += [Copy("vector", 0, 0, 8, 1, "p", 0, 0)] * 2
    assert broken(params, copies, torch.bfloat16) == {"halves"}
    assert broken(params, copies, torch.float32) == set()


def test_nothing_is_written_beyond_the_run() -> None:
    buffer = torch.zeros(8)
    pack({"w": torch.ones(2, 2)}, [Copy("w", 0, 0, 2, 2, "p", 0, 0)], buffer[2:6])
    assert buffer.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    pack({}, [], buffer[:0])
    for run in (buffer[:3], buffer[::2], buffer.view(2, 4)[:, :2]):
        with pytest.raises(ValueError, match="expected a contiguous run of 4 elements"):
            pack({"w": torch.ones(2, 2)}, [Copy("w", 0, 0, 2, 2, "p", 0, 0)], run)


def test_packing_leaves_no_trace_in_autograd() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    copy = Copy("w", 1, 1, 2, 2, "p", 0, 0)
    run = torch.empty(4)
    pack({"w": weight}, [copy], run)
    assert not run.requires_grad
    assert torch.equal(run.view(2, 2), weight.detach()[1:3, 1:])
    window(run.view(4, 1), Copy("", 0, 0, 2, 1, "p", 0, 0), 1, 0).fill_(0)
    assert run[1] == run[2] == 0 != run[0]
