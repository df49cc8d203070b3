"""Windows of logits whose products keep a GPU at work for longer than the host takes to launch them."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.kernels.logit_windows import (
    FASTEST,
    MOST_LOGITS,
    MOST_TOKENS,
    SECONDS,
    WORDS,
    most_flops,
    most_logits,
    window,
)
from titan_rl.kernels.peak_flops import known_peak_flops
from titan_rl.tools.plan.facts import read_facts

CARDS = [float(known_peak_flops(name) or 0) for name in ("NVIDIA A100", "NVIDIA H200", "NVIDIA B200", "NVIDIA GB200")]


def test_no_known_gpu_is_faster_than_the_fastest() -> None:
    assert max(CARDS) == FASTEST
    assert min(CARDS) == 312e12
    for card in read_facts().gpus.values():
        assert card.flops <= most_flops(int(card.memory_gb * 2**30)) <= FASTEST
    assert most_flops(10 << 30) < 989e12 / 7  # a MIG slice of an H100, whose name is a whole one's


@given(
    tokens=st.integers(0, 40_000),
    vocabulary=st.integers(1, 300_000),
    width=st.sampled_from([16, 576, 1024, 2048, 4096, 8192]),
    peak=st.sampled_from(CARDS),
)
@settings(deadline=None, max_examples=300)
def test_a_windows_product_takes_its_time_within_a_bound_of_memory(
    tokens: int, vocabulary: int, width: int, peak: float
) -> None:
    rows, words = window(tokens, vocabulary, width, peak)
    assert 1 <= rows <= MOST_TOKENS
    assert words % WORDS == 0
    number = math.ceil(tokens / rows), math.ceil(vocabulary / words)
    assert number[0] <= math.ceil(tokens / MOST_TOKENS)
    assert min(rows, tokens) * min(words, vocabulary) <= most_logits(tokens, vocabulary, width, peak)
    assert most_logits(tokens, vocabulary, width, peak) <= most_logits(tokens + 1, vocabulary, width, FASTEST)
    seconds = 2 * width * rows * words / peak
    whole = number[1] == 1
    bounded = rows * (words + WORDS) * 2 > MOST_LOGITS
    assert seconds >= SECONDS or whole or bounded
    if tokens and number[1] > 1:  # equal windows: the last one lacks what rounding up gave to the others
        assert number[1] * words - vocabulary < WORDS * number[1]


def test_measured_shapes_have_the_windows_that_were_fastest() -> None:
    """On an H200 tiles of 2^26 to 2^27 logits at width 1024, and of 2^25 to 2^26 at 4096."""
    h200 = known_peak_flops("NVIDIA H200") or 0
    for (tokens, vocabulary, width), powers in {
        (4096, 151936, 1024): (26, 27),
        (4096, 128256, 4096): (25, 26),
        (16384, 16032, 4096): (25, 26),
    }.items():
        rows, words = window(tokens, vocabulary, width, h200)
        assert 2 ** powers[0] <= rows * words <= 2 ** powers[1]
