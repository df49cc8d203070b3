"""Packing a shard into a reader's run, by strided copies, against indexing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.kernels.pack_weights import pack, reference_pack, window
from titan_rl.wire.weight_plan import Copy


@st.composite
def copies_of(draw: st.DrawFn, name: str, rows: int, cols: int) -> Copy:
    height, width = draw(st.integers(1, rows)), draw(st.integers(1, cols))
    row0, col0 = draw(st.integers(0, rows - height)), draw(st.integers(0, cols - width))
    return Copy(name, row0, col0, height, width, "p", 0, 0)


@settings(max_examples=2 * settings().max_examples)
@given(st.data(), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_copies_are_packed_as_by_indices(data: st.DataObject, dtype: torch.dtype, sent: torch.dtype) -> None:
    params, copies = {"vector": torch.randn(5).to(dtype)}, [Copy("vector", 1, 0, 3, 1, "p", 0, 0)]
    for i in range(data.draw(st.integers(1, 3), "tensors")):
        rows, cols = data.draw(st.integers(2, 16)), data.draw(st.integers(1, 9))
        wide = torch.randn(rows, cols + 2).to(dtype)
        params[f"{i}"] = wide[:, 1:-1] if data.draw(st.booleans(), "a view") else wide[:, 1:-1].contiguous()
        copies += data.draw(st.lists(copies_of(f"{i}", rows, cols), max_size=4))
    packed, expected = torch.full((2, sum(c.elements for c in copies)), torch.nan, dtype=sent).unbind()
    pack(params, copies, packed)
    reference_pack(params, copies, expected)
    assert torch.equal(packed, expected)


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
