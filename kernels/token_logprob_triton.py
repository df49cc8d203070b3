"""GPU kernels of `token_logprob.py`, for the parts that would otherwise pass over the logits several times.

    softmax_sums   matmul and online softmax in one kernel: no logit reaches memory
    descent_       turns a tile of logits, computed by cuBLAS, into -dz in place; cuBLAS then multiplies it twice

The backward pass leaves all three matmuls to cuBLAS, which a Triton matmul with two accumulations would not beat. The
only memory it takes is one tile [2048, 16384] in the inputs' dtype.
"""
# ruff: noqa: ANN001, ANN201  a kernel's arguments have Triton's types; its launcher passes plain values for constexpr
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl

from titan_rl.kernels.softmax_sums import Incoming, SoftmaxSums

BLOCK_TOKENS, BLOCK_VOCABULARY, BLOCK_HIDDEN = 64, 128, 64
PROGRAMS = 1024  # several per multiprocessor: with few tokens, the vocabulary is split further
DESCENT_BLOCK = 1024
LEAST = tl.constexpr(torch.finfo(torch.float32).min)  # as in SoftmaxSums.of_nothing


@triton.jit
def softmax_sums_kernel(
    hidden_ptr,
    weight_ptr,
    targets_ptr,
    sums_ptr,  # [4, splits, T]
    tokens,
    vocabulary,
    width: tl.constexpr,
    scale,
    hidden_stride,
    weight_stride,
    size: tl.constexpr,
    precision: tl.constexpr,
    block_tokens: tl.constexpr,
    block_vocabulary: tl.constexpr,
    block_hidden: tl.constexpr,
):
    """Reduce one block of tokens over one split of the vocabulary, `width` wide."""
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    split = tl.program_id(1)
    alive = token < tokens
    target = tl.load(targets_ptr + token, mask=alive, other=-1)
    most = tl.full([block_tokens], LEAST, tl.float32)
    mass = tl.zeros([block_tokens], tl.float32)
    moment = tl.zeros([block_tokens], tl.float32)
    found = tl.zeros([block_tokens], tl.float32)
    for start in range(0, width, block_vocabulary):
        word = split * width + start + tl.arange(0, block_vocabulary)
        known = word < vocabulary
        product = tl.zeros([block_tokens, block_vocabulary], tl.float32)
        hidden_rows = hidden_ptr + token.to(tl.int64)[:, None] * hidden_stride
        weight_rows = weight_ptr + word.to(tl.int64)[None, :] * weight_stride
        for first in range(0, size, block_hidden):
            place = first + tl.arange(0, block_hidden)
            inside = place < size
            hidden = tl.load(hidden_rows + place[None, :], mask=alive[:, None] & inside[None, :], other=0.0)
            weight = tl.load(weight_rows + place[:, None], mask=known[None, :] & inside[:, None], other=0.0)
            product = tl.dot(hidden, weight, product, input_precision=precision)
        # Round like the backward pass's logits, or its probabilities would not sum to one.
        logits = product.to(hidden_ptr.dtype.element_ty).to(tl.float32) * scale
        found += tl.sum(tl.where(word[None, :] == target[:, None], logits, 0.0), 1)
        logits = tl.where(known[None, :], logits, LEAST)
        more = tl.maximum(most, tl.max(logits, 1))
        factor = tl.exp(most - more)
        moment = (moment + (most - more) * mass) * factor
        mass = mass * factor
        shifted = tl.where(known[None, :], logits - more[:, None], 0.0)
        exponentials = tl.where(known[None, :], tl.exp(shifted), 0.0)
        mass += tl.sum(exponentials, 1)
        moment += tl.sum(exponentials * shifted, 1)
        most = more
    row = sums_ptr + split * tokens + token
    part = tl.num_programs(1) * tokens
    tl.store(row, most, mask=alive)
    tl.store(row + part, mass, mask=alive)
    tl.store(row + 2 * part, moment, mask=alive)
    tl.store(row + 3 * part, found, mask=alive)


@triton.jit
def descent_kernel(
    logits_ptr,  # [T, V], contiguous
    targets_ptr,
    lse_ptr,
    entropy_ptr,
    logprob_grad_ptr,
    entropy_grad_ptr,
    vocabulary,
    scale,
    with_entropy: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0)
    word = tl.program_id(1) * block + tl.arange(0, block)
    known = word < vocabulary
    row = logits_ptr + token.to(tl.int64) * vocabulary + word
    logprob = tl.load(row, mask=known, other=0.0).to(tl.float32) * scale - tl.load(lse_ptr + token)
    onehot = tl.where(word == tl.load(targets_ptr + token), 1.0, 0.0)
    descent = tl.exp(logprob)
    if with_entropy:
        g = tl.load(logprob_grad_ptr + token)
        h = tl.load(entropy_grad_ptr + token)
        descent = descent * (g + h * (logprob + tl.load(entropy_ptr + token)))
        onehot = onehot * g
    tl.store(row, (descent - onehot).to(logits_ptr.dtype.element_ty), mask=known)


def softmax_sums(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, scale: float
) -> SoftmaxSums:
    tokens, size = hidden_TD.shape
    vocabulary = len(weight_VD)
    blocks = triton.cdiv(tokens, BLOCK_TOKENS)
    splits = min(triton.cdiv(PROGRAMS, max(blocks, 1)), triton.cdiv(vocabulary, BLOCK_VOCABULARY))
    if not (blocks and splits):
        return SoftmaxSums.of_nothing(tokens, dtype=torch.float32, device=hidden_TD.device)
    # A power of two, so that the kernel is compiled for few widths only.
    width = triton.next_power_of_2(triton.cdiv(vocabulary, splits))
    width = max(width, BLOCK_VOCABULARY)
    splits = triton.cdiv(vocabulary, width)
    hidden_TD, weight_VD, targets_T = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (hidden_TD, weight_VD, targets_T)
    )
    sums_4ST = torch.empty(4, splits, tokens, dtype=torch.float32, device=hidden_TD.device)
    softmax_sums_kernel[blocks, splits](
        hidden_TD,
        weight_VD,
        targets_T,
        sums_4ST,
        tokens,
        vocabulary,
        width,
        scale,
        hidden_TD.stride(0),
        weight_VD.stride(0),
        size,
        "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",  # as cuBLAS in the backward pass
        BLOCK_TOKENS,
        BLOCK_VOCABULARY,
        BLOCK_HIDDEN,
    )
    parts = SoftmaxSums(*sums_4ST.unbind())
    parts.move_(parts.max_T.amax(0).expand_as(parts.max_T))
    return SoftmaxSums(parts.max_T[0], *sums_4ST[1:].sum(1).unbind())


def descent_(logits_TV: torch.Tensor, incoming: Incoming, scale: float) -> torch.Tensor:
    entropy_grad_T = incoming.entropy_grad_T
    descent_kernel[len(logits_TV), triton.cdiv(logits_TV.shape[1], DESCENT_BLOCK)](
        logits_TV,
        incoming.targets_T.contiguous(),
        incoming.lse_T,
        incoming.entropy_T,
        incoming.logprob_grad_T.contiguous(),
        incoming.lse_T if entropy_grad_T is None else entropy_grad_T.contiguous(),
        logits_TV.shape[1],
        scale,
        entropy_grad_T is not None,
        DESCENT_BLOCK,
    )
    return logits_TV
