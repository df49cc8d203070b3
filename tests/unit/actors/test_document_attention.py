"""Attention by classes of segments is attention of every segment by itself."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.actors.titan.document_attention import DocumentSDPA
from titan_rl.actors.titan.document_masks import Attended, classed_masks

CPU = torch.device("cpu")


PARTS = st.tuples(  # lengths: of a prompt, of its short answers, of long answers, which share no block
    st.integers(0, 3), st.lists(st.integers(1, 3), max_size=20), st.lists(st.just(40), max_size=2)
)


@st.composite
def segments(draw: st.DrawFn) -> np.ndarray:
    """Prompts of some lengths with answers of some lengths, in any order: [G, 4] as batch/prefixes.py has them."""
    found, at = list[tuple[int, int, int, int]](), 0
    for prefix, short, long in draw(st.lists(PARTS, min_size=1, max_size=4)):
        begin, answers = at, short + long
        if prefix or not answers:
            found.append((at, max(prefix, 1), 0, 0))
            at += max(prefix, 1)
        for length in answers:
            found.append((at, length, begin if prefix else 0, prefix))
            at += length
    return np.array(draw(st.permutations(found)))


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments_G4: np.ndarray, window: int) -> torch.Tensor:
    """Attend by the definition: a segment sees its prefix and, causally, itself, as far back as the window."""
    out = torch.zeros_like(q)
    for begin, length, begin_prefix, prefix in segments_G4.tolist():
        keys = [*range(begin_prefix, begin_prefix + prefix), *range(begin, begin + length)]
        own, place = prefix + torch.arange(length)[:, None], torch.arange(len(keys))
        seen = (place <= own) & (place >= (own - window if window >= 0 else 0))
        scores = torch.einsum("tnh,knh->ntk", q[begin : begin + length], k[keys].repeat_interleave(2, 1))
        weights = (scores * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        out[begin : begin + length] = torch.einsum("ntk,knh->tnh", weights, v[keys].repeat_interleave(2, 1))
    return out


@settings(max_examples=25, deadline=None)
@given(segments(), st.sampled_from([-1, 0, 2, 5]))
def test_classes_are_segments_one_by_one(segments_G4: np.ndarray, window: int) -> None:
    random = torch.Generator().manual_seed(0)
    total = int(segments_G4[:, 1].sum())
    q, k, v = (torch.randn(total, n, 4, generator=random, dtype=torch.float64).requires_grad_() for n in (4, 2, 2))
    masks = classed_masks(Attended.whole(segments_G4), CPU)
    attention = DocumentSDPA.Config(window_size=(window, 0)).build()
    ours = attention(q[None], k[None], v[None], attention_masks=masks, enable_gqa=True)[0]
    theirs = one_by_one(q, k, v, segments_G4, window)
    weights = torch.randn(ours.shape, generator=random, dtype=torch.float64)
    gradients = torch.autograd.grad((ours * weights).sum(), (q, k, v))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for a, b in zip(gradients, torch.autograd.grad((theirs * weights).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)

    assert sum(each.segments for each in masks.classes) == len(segments_G4)
    assert len({each[1:] for each in masks.classes}) == len(masks.classes)
