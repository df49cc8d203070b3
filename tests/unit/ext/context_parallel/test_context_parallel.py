"""Parts of packed rows are the rows together, and have the attention of whole rows, wherever a row is cut."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.flash_on_cpu import flash_on_cpu
from support.packed_rows import groups_of
from titan_rl.actors.titan.document_attention import DocumentSDPA, SharedVarlen
from titan_rl.actors.titan.document_masks import Attended, Gather, SharedMetadata, classed_masks, varlen_masks
from titan_rl.batch.packing import pack
from titan_rl.ext.context_parallel.ranks.context_parallel import Part, cut
from titan_rl.wire.types import Rows, Sample

CPU = torch.device("cpu")
HEADS, KEY_HEADS, DIM = 4, 2, 8
WINDOWS = (-1, 5)


def packed(samples: list[Sample], share: bool) -> Rows:
    (batch,) = pack(samples, shards=1, seq_len=53, rows_per_microbatch=2, pad_id=0, share=share)
    return batch.microbatches[0]


def parts_of(rows: Rows, count: int, multiple: int) -> list[Any]:
    return [cut(rows, Part(index, count, multiple)) for index in range(count)]


@given(groups_of(20, 12), st.booleans(), st.integers(2, 5), st.integers(1, 3))
def test_parts_are_the_rows(samples: list[Sample], share: bool, count: int, multiple: int) -> None:
    rows = packed(samples, share)
    wide = np.random.default_rng(0).integers(-1, 9, (*rows.tokens.shape, 3, 2), np.int16)
    parts = parts_of(rows, count, multiple)
    length = rows.tokens.shape[1]
    cuts = {"tokens": (rows.tokens, 0), "positions": (rows.positions, 0), "wide": (wide, -1)}
    for name, (whole, padding) in cuts.items():
        joined = np.concatenate([part.cut(wide, -1) if name == "wide" else getattr(part, name) for part in parts], 1)
        np.testing.assert_array_equal(joined[:, :length], whole)
        assert (joined[:, length:] == padding).all()
    assert len({part.tokens.shape for part in parts}) == 1
    assert parts[0].tokens.shape[1] % multiple == 0
    assert (np.sum([part.own for part in parts], 0) == 1).all(), "each target is predicted in one part"
    read = np.sum([part.own * part.tokens.ravel()[part.places] for part in parts], 0)
    np.testing.assert_array_equal(read, rows.tokens.ravel()[rows.places])
    for part in parts:
        ends = part.attended.begin + part.attended.length
        assert [0, *ends] == [*part.attended.begin, part.tokens.size], "each query is of one segment, in order"


def attended(kind: str, window: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: Attended) -> torch.Tensor:
    which, masks = (DocumentSDPA, classed_masks) if kind == "sdpa" else (SharedVarlen, varlen_masks)
    attention = which(which.Config(window_size=(window - 1, 0) if window > 0 else (-1, 0)))
    made: Any = masks(of, CPU)
    assert kind == "sdpa" or isinstance(made, SharedMetadata) or of.keys == len(q.flatten(0, 1))
    return attention(q, k, v, attention_masks=made, enable_gqa=True)


def drawn(rows: int, places: int, padded: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(rows, places, heads, DIM, dtype=dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padded - places)).requires_grad_() for x in made]


def check_attention(rows: Rows, count: int, multiple: int, kind: str, window: int) -> None:
    parts, (batch, length) = parts_of(rows, count, multiple), rows.tokens.shape
    size = parts[0].tokens.shape[1]
    q, k, v = drawn(batch, length, count * size, torch.float64 if kind == "sdpa" else torch.float32)
    weights = torch.randn_like(q)
    weights[:, length:] = 0
    plain_q, plain_k, plain_v = (x[:, :length] for x in (q, k, v))
    whole = attended(kind, window, plain_q, plain_k, plain_v, Attended.whole(rows.segments))
    wanted = torch.autograd.grad((whole * weights[:, :length]).sum(), (q, k, v))
    queries = q.split(size, 1)
    joined = torch.cat(
        [attended(kind, window, x, k, v, part.attended) for x, part in zip(queries, parts, strict=True)], 1
    )
    found = torch.autograd.grad((joined * weights).sum(), (q, k, v))
    close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-6} if kind == "sdpa" else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(joined[:, :length], whole, **close)
    for ours, theirs in zip(found, wanted, strict=True):  # copies of keys add up in float32
        torch.testing.assert_close(ours, theirs, **close)


@settings(max_examples=15)
@given(groups_of(20, 12), st.booleans(), st.integers(2, 5), st.integers(1, 3), st.sampled_from(WINDOWS))
def test_attention_of_parts_is_that_of_whole_rows(
    samples: list[Sample], share: bool, count: int, multiple: int, window: int
) -> None:
    check_attention(packed(samples, share), count, multiple, "sdpa", window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("kind", ["sdpa", "flash"])
def test_a_row_may_be_cut_at_any_place(kind: str, share: bool, window: int) -> None:
    """Cuts fall before, in and after a shared prompt, at the ends of documents and in padding."""
    rng = np.random.default_rng(0)
    asked = rng.integers(3, 50, 9).tolist()
    samples = [Sample(asked + rng.integers(3, 50, n).tolist(), [0] * 9 + [1] * n, {}, 9) for n in (3, 7, 5, 4, 6)]
    samples += [Sample(rng.integers(3, 50, n).tolist(), [0] * 2 + [1] * (n - 2), {}, 2) for n in (11, 2)]
    rows = packed(samples, share)
    assert share == rows.segments[:, 3].any()
    with flash_on_cpu():
        length = rows.tokens.shape[1]
        primes = [n for n in range(2, length) if all(n % k for k in range(2, n))]  # each place is a multiple of one
        for size in primes if kind == "sdpa" else range(2, length, 5):
            check_attention(rows, -(-length // size), size, kind, window)


@given(groups_of(12, 12), st.integers(2, 4))
def test_gathered_keys_have_the_gradients_of_indexing(samples: list[Sample], count: int) -> None:
    for part in parts_of(packed(samples, True), count, 1):
        gathers: list[Gather] = [*classed_masks(part.attended, CPU)[1:]]
        masks = varlen_masks(part.attended, CPU)
        assert isinstance(masks, SharedMetadata)
        for gather, places in zip(
            [*gathers, masks.keys], [part.tokens.size] * 2 + [part.attended.keys] * 2, strict=True
        ):
            x = torch.randn(places, 2, 3, dtype=torch.float64, requires_grad=True)
            weights = torch.randn(len(gather.source), 2, 3, dtype=torch.float64)
            (ours,) = torch.autograd.grad((gather(x) * weights).sum(), x)
            (theirs,) = torch.autograd.grad((x[gather.source] * weights).sum(), x)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
