"""CPU kernels for the two aten operators under TorchTitan's VarlenAttention: what a GPU's trainer computes, on a CPU.

The seams are these operators and the choice of attention; everything above them is the code that runs on CUDA: the
casts, torch's varlen_attn with its autograd formula, activation checkpointing, torch.compile, FSDP2 and TP.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

calls = {"forward": 0, "backward": 0}


def documents(*cu_seqs: Tensor) -> Iterator[tuple[slice, ...]]:
    """Return each document's queries, and its keys."""
    ends = (itertools.pairwise(cu_seq.tolist()) for cu_seq in cu_seqs)
    return zip(*((slice(start, end) for start, end in each) for each in ends), strict=True)


def heads_first(x_TNH: Tensor, heads: int) -> Tensor:
    """Return [heads, T, H] in float32; each head of a group has a copy of its key or value."""
    return x_TNH.transpose(0, 1).float().repeat_interleave(heads // x_TNH.shape[1], 0)


def scores(q_NTH: Tensor, k_NTH: Tensor, scale: float, left: int) -> Tensor:
    queries, keys = q_NTH.shape[1], k_NTH.shape[1]
    future = torch.ones(queries, keys, dtype=torch.bool).triu(
        1 + keys - queries
    )  # aligned to the end, as FlashAttention
    past = torch.ones_like(future).tril(keys - queries - left - 1) if left >= 0 else ~torch.ones_like(future)
    return (q_NTH @ k_NTH.transpose(1, 2) * scale).masked_fill(future | past, -math.inf)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    *_: Any,
    scale: float | None = None,
    window_size_left: int = -1,
    **__: Any,
) -> tuple[Tensor, ...]:
    assert query.dtype == torch.bfloat16
    calls["forward"] += 1
    scale, n = scale or 1 / math.sqrt(query.shape[-1]), query.shape[1]
    output, lse_NT = torch.empty_like(query), query.new_empty((n, len(query)), dtype=torch.float32)
    for at, keys in documents(cum_seq_q, cum_seq_k):
        q, k, v = (heads_first(x, n) for x in (query[at], key[keys], value[keys]))
        scored = scores(q, k, scale, window_size_left)
        output[at] = (scored.softmax(-1) @ v).transpose(0, 1).to(output.dtype)
        lse_NT[:, at] = scored.logsumexp(-1)
    state = torch.zeros(2, dtype=torch.uint64)
    return output, lse_NT, state, torch.zeros((), dtype=torch.uint64), torch.empty(0)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse_NT: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    *_: Any,
    scale: float | None = None,
    window_size_left: int = -1,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    calls["backward"] += 1
    scale, n = scale or 1 / math.sqrt(query.shape[-1]), query.shape[1]
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    for at, keys in documents(cum_seq_q, cum_seq_k):
        q, k, v, g = (heads_first(x, n) for x in (query[at], key[keys], value[keys], grad[at]))
        p = scores(q, k, scale, window_size_left).softmax(-1)
        dp = g @ v.transpose(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        for to, found in zip(grads, (ds @ k, ds.transpose(1, 2) @ q, p.transpose(1, 2) @ g), strict=True):
            shared = found.view(-1, n // to.shape[1], *found.shape[1:]).sum(1) if to is not grads[0] else found
            to[at if to is grads[0] else keys] = shared.transpose(0, 1).to(to.dtype)
    return grads


@contextmanager
def flash_on_cpu() -> Iterator[dict[str, int]]:
    """Let models built in this block attend as on CUDA. Yields how often the operators were called."""
    from titan_rl.actors.titan import document_attention

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", forward)
    library.impl("_flash_attention_backward", backward)
    chosen = document_attention.overrides
    document_attention.overrides = lambda device, compute, **_: chosen("cuda", "bfloat16")
    try:
        yield calls
    finally:
        document_attention.overrides = chosen
        library._destroy()
