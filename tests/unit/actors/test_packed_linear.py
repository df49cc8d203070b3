"""Weights that are packed for oneDNN change no bit, and are forgotten when they are written."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from titan_rl.actors.vllm import packed_linear
from titan_rl.actors.vllm.packed_linear import CALLS, PackedLinear, forget_packed


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


@pytest.fixture(autouse=True)
def on_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's own products as kernels/cpu_matmul.py leaves them, in a process without layers."""
    monkeypatch.setattr(packed_linear, "linear", plain)
    monkeypatch.setattr(packed_linear, "_layers", [])
    packed_linear._fit.cache_clear()
    with torch.inference_mode():
        yield


def layer_of(weight: Tensor) -> PackedLinear:
    layer = packed_linear.packed_linear(weight)
    assert isinstance(layer, PackedLinear)
    return layer


@pytest.mark.parametrize(("wide", "high"), [(64, 192), (128, 768), (384, 128), (100, 77), (384, 4096)])
def test_a_packed_weight_changes_no_bit(wide: int, high: int) -> None:
    weight, bias = torch.randn(high, wide) / 50, torch.randn(high)
    layer = layer_of(weight)
    for rows in (*range(1, 20), 31, 32, 64, 100, 128, 256, 300, 512):
        x = torch.randn(rows, wide)
        for own in (None, bias):
            assert torch.equal(layer(x, weight, own), plain(x, weight, own)), rows
    assert layer._packed is not None


def test_a_weight_that_was_written_is_read_again() -> None:
    weight, x = torch.randn(64, 64), torch.randn(4, 64)
    layer = layer_of(weight)
    # (calls until the next write, those that use the weight itself): one, if there were more than CALLS before the last
    for calls, plainly in [(CALLS + 1, CALLS + 1), (CALLS + 2, 1), (3, 1), (CALLS, CALLS), (CALLS + 3, CALLS + 1)]:
        for call in range(calls):
            assert (layer._packed is not None) == (call >= plainly)
            assert torch.equal(layer(x, weight), plain(x, weight))
        weight.neg_()
        forget_packed()


def test_single_rows_never_pack_and_other_dtypes_are_torchs() -> None:
    weight = torch.randn(8, 8)
    layer = layer_of(weight)
    for _ in range(2 * CALLS):
        layer(torch.randn(1, 8), weight)
    assert layer._packed is None
    assert packed_linear.packed_linear(weight.bfloat16()) is plain


def test_copies_that_take_too_much_memory_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(64, 64), torch.randn(4, 64)
    layer = layer_of(weight)
    monkeypatch.setattr(packed_linear, "host_memory", lambda: packed_linear.SHARE * weight.nbytes - 1)
    for _ in range(2 * CALLS):
        assert torch.equal(layer(x, weight), plain(x, weight))
    assert layer._packed is None


def test_a_cpu_on_which_packing_changes_products_does_without_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "linear", lambda x, weight, bias=None: plain(x, weight, bias) + 1e-3)
    weight, x = torch.randn(64, 64), torch.randn(4, 64)
    layer = layer_of(weight)
    for _ in range(CALLS):
        layer(x, weight)
    with pytest.warns(UserWarning, match=r"weights of \(64, 64\) are not packed"):
        layer(x, weight)
    for _ in range(2 * CALLS):
        assert torch.equal(layer(x, weight), plain(x, weight) + 1e-3)
