"""Sizes the windows of logits in which a GPU computes log-probs (token_logprob_triton.py). The estimate of a rank's
memory reads it too, so it needs no torch."""

import math

SECONDS = 0.3e-3  # least time for a window's product at the GPU's peak rate: launching a window takes the host less
MOST_LOGITS = 2**27  # a window has: 256 MiB in 16 bits
MOST_TOKENS = 8192  # a window has
WORDS = 16  # a window's vocabulary is a multiple: kept sets begin at a whole byte, Triton compiles one kernel
FASTEST = 2.5e15  # FLOP/s in bfloat16, the most in TorchTitan's table of GPUs
FLOPS_PER_GIB = 14e12  # more than any GPU in facts.toml has; a MIG slice has its share of a GPU's rate too


def window(tokens: int, vocabulary: int, width: int, peak_flops: float) -> tuple[int, int]:
    """Return tokens and vocabulary of the windows, all but equal, whose products [tokens, width] @ [width, vocabulary]
    take SECONDS at least."""
    rows = math.ceil(tokens / max(1, math.ceil(tokens / MOST_TOKENS)))
    logits = rows * vocabulary
    number = max(1, math.floor(logits / least_logits(width, peak_flops)), math.ceil(logits / MOST_LOGITS))
    return max(1, rows), max(WORDS, math.ceil(vocabulary / number / WORDS) * WORDS)


def least_logits(width: int, peak_flops: float) -> float:
    """Return the logits that a GPU computes in SECONDS."""
    return SECONDS * peak_flops / (2 * width)


def most_flops(gpu_bytes: int) -> float:
    """Return a rate that no GPU of this size exceeds; 0: of any size."""
    return min(FASTEST, FLOPS_PER_GIB * gpu_bytes / 2**30) if gpu_bytes else FASTEST


def most_logits(tokens: int, vocabulary: int, width: int, peak_flops: float) -> int:
    """Return the most logits of a window of up to this number of tokens."""
    most = min(MOST_LOGITS, 2 * least_logits(width, peak_flops))  # one window of nearly two windows' size stays whole
    return min(tokens * (vocabulary + WORDS), math.ceil(most) + WORDS * min(tokens, MOST_TOKENS))
