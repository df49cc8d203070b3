"""The tile of `token_logprob.py` on a GPU: cuBLAS multiplies, and one pass of a Triton kernel does the rest.

    forward     tile of logits <- cuBLAS        softmax_sums_kernel adds it to four sums a token: reads it once
    backward    tile of logits <- cuBLAS        descent_kernel turns it into -dz: reads it and writes it once
                (or none, if they were kept)    cuBLAS multiplies -dz twice, and adds to float32 totals itself

A forward with the matmul in the same Triton kernel never writes a logit, but its tiles of 64 x 128 read their operands
from L2 at 43 FLOP a byte, which allows about a quarter of the tensor cores' rate (docs/benchmarks.md).
"""
# ruff: noqa: ANN001, ANN201  a kernel's arguments have Triton's types; its launcher passes plain values for constexpr
# pyright: reportArgumentType=false, reportCallIssue=false

from functools import cached_property, partial

import torch
import triton
import triton.language as tl

from titan_rl.kernels.logit_windows import window
from titan_rl.kernels.peak_flops import peak_flops
from titan_rl.kernels.softmax_sums import Incoming, SoftmaxSums

SUMS_BLOCK, SUMS_WARPS = 4096, 8
DESCENT_BLOCK = 1024
# One number per token each. Their alignment varies with the number of tokens, and must not cause a compilation.
BY_TOKEN = ["targets_ptr", "max_ptr", "mass_ptr", "moment_ptr", "target_ptr", "kept_ptr"]
GRADIENTS = ["targets_ptr", "lse_ptr", "entropy_ptr", "logprob_grad_ptr", "entropy_grad_ptr", "kept_ptr"]


@triton.jit
def tanh(x):
    """Compute tanh to a few units in the last place. Triton has one on GPUs alone, not in its interpreter. Near zero
    1 - t would have lost the bits of x."""
    t = tl.exp(-2.0 * tl.abs(x))
    far = tl.where(x < 0.0, -1.0, 1.0) * (1.0 - t) / (1.0 + t)
    near = x * (1.0 - x * x * (1.0 / 3.0 - x * x * (2.0 / 15.0)))
    return tl.where(tl.abs(x) < 0.1, near, far)


@triton.jit(do_not_specialize=["kept_row"], do_not_specialize_on_alignment=BY_TOKEN)
def softmax_sums_kernel(
    logits_ptr,  # [T, V], contiguous; before the temperature
    targets_ptr,
    max_ptr,
    mass_ptr,
    moment_ptr,
    target_ptr,
    kept_ptr,  # [T, >= V / 8] masks from kept_bits.py, whose rows are kept_row bytes apart
    kept_row,
    vocabulary,
    scale,
    truncated: tl.constexpr,
    cap: tl.constexpr,
    block: tl.constexpr,
):
    """Add a window of the vocabulary to the sums of one token."""
    token = tl.program_id(0)
    row = logits_ptr + token.to(tl.int64) * vocabulary
    most = tl.load(max_ptr + token)
    mass = tl.load(mass_ptr + token)
    moment = tl.load(moment_ptr + token)
    for first in range(0, vocabulary, block):
        word = first + tl.arange(0, block)
        known = word < vocabulary
        logits = tl.load(row + word, mask=known, other=float("-inf")).to(tl.float32)
        if cap is not None:
            logits = tl.where(known, cap * tanh(logits / cap), float("-inf"))
        logits *= scale
        if truncated:
            bits = tl.load(kept_ptr + token.to(tl.int64) * kept_row + word // 8, mask=known, other=0)
            known &= ((bits.to(tl.int32) >> (word % 8)) & 1) == 1
            logits = tl.where(known, logits, float("-inf"))
        more = tl.maximum(most, tl.max(logits, 0))
        factor = tl.exp(most - more)
        moment = (moment + (most - more) * mass) * factor
        shifted = tl.where(known, logits - more, 0.0)
        exponentials = tl.where(known, tl.exp(shifted), 0.0)
        mass = mass * factor + tl.sum(exponentials, 0)
        moment += tl.sum(exponentials * shifted, 0)
        most = more
    tl.store(max_ptr + token, most)
    tl.store(mass_ptr + token, mass)
    tl.store(moment_ptr + token, moment)
    target = tl.load(targets_ptr + token)
    if (target >= 0) & (target < vocabulary):
        logit = tl.load(row + target).to(tl.float32)
        if cap is not None:
            logit = cap * tanh(logit / cap)
        tl.store(target_ptr + token, logit * scale)


@triton.jit(do_not_specialize=["kept_row"], do_not_specialize_on_alignment=GRADIENTS)
def descent_kernel(
    logits_ptr,  # [T, V], contiguous; before the temperature
    descent_ptr,  # [T, V]; the same memory where the dtypes agree
    targets_ptr,
    lse_ptr,
    entropy_ptr,
    logprob_grad_ptr,
    entropy_grad_ptr,
    kept_ptr,
    kept_row,
    vocabulary,
    scale,
    with_entropy: tl.constexpr,
    truncated: tl.constexpr,
    cap: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0)
    word = tl.program_id(1) * block + tl.arange(0, block)
    known = word < vocabulary
    place = token.to(tl.int64) * vocabulary + word
    logit = tl.load(logits_ptr + place, mask=known, other=0.0).to(tl.float32)
    if cap is not None:
        share = tanh(logit / cap)
        logit = cap * share
    logprob = logit * scale - tl.load(lse_ptr + token)
    onehot = tl.where(word == tl.load(targets_ptr + token), 1.0, 0.0)
    descent = tl.exp(logprob)
    if with_entropy:
        g = tl.load(logprob_grad_ptr + token)
        h = tl.load(entropy_grad_ptr + token)
        descent = descent * (g + h * (logprob + tl.load(entropy_ptr + token)))
        onehot = onehot * g
    if truncated:
        bits = tl.load(kept_ptr + token.to(tl.int64) * kept_row + word // 8, mask=known, other=0)
        descent = tl.where(((bits.to(tl.int32) >> (word % 8)) & 1) == 1, descent, 0.0)
    descent -= onehot
    if cap is not None:
        descent *= 1.0 - share * share  # how much a capped logit grows with its product
    tl.store(descent_ptr + place, descent.to(descent_ptr.dtype.element_ty), mask=known)


class FusedTile:
    """Windows [tokens, vocabulary] of the logits, computed in the same memory unless they are kept. As high as the
    tokens allow: a window's part of weight's gradient is then one product, and the weight is read once."""

    fused = True
    dtype = torch.float32  # sums and totals

    def __init__(
        self, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, temperature: float, float32_logits: bool, cap: float = 0
    ) -> None:
        (tokens, width), words = hidden_TD.shape, len(weight_VD)
        self.tokens, self.vocabulary = window(tokens, words, width, peak_flops(hidden_TD.device))
        self.scale, self.cap = 1 / temperature, cap
        self.logit_dtype = self.dtype if float32_logits else hidden_TD.dtype
        self._new = partial(hidden_TD.new_empty, min(self.tokens, tokens) * min(self.vocabulary, words))
        self._same = self.logit_dtype == hidden_TD.dtype

    @cached_property
    def _product(self) -> torch.Tensor:
        return self._new(dtype=self.logit_dtype)

    @cached_property
    def _descent(self) -> torch.Tensor:
        return self._product if self._same else self._new()

    def multiply(
        self, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the window's logits before the temperature, as Tile.multiply does."""
        shape = (len(hidden_TD), len(weight_VD))
        product_TV = self._product[: shape[0] * shape[1]].view(shape) if out is None else out
        if self._same:
            return torch.mm(hidden_TD, weight_VD.T, out=product_TV)
        return torch.mm(hidden_TD, weight_VD.T, out_dtype=product_TV.dtype, out=product_TV)

    def add_to(
        self,
        sums: SoftmaxSums,
        product_TV: torch.Tensor,
        targets_T: torch.Tensor,
        kept_TB: torch.Tensor | None = None,
    ) -> None:
        """Add a window of the vocabulary to `sums`; `targets_T` and `kept_TB` count from the window's start."""
        tokens, words = product_TV.shape
        softmax_sums_kernel[(tokens,)](
            product_TV,
            targets_T,
            sums.max_T,
            sums.mass_T,
            sums.moment_T,
            sums.target_T,
            targets_T if kept_TB is None else kept_TB,
            0 if kept_TB is None else kept_TB.stride(0),
            words,
            self.scale,
            kept_TB is not None,
            self.cap or None,
            SUMS_BLOCK,
            num_warps=SUMS_WARPS,
        )

    def descent(self, product_TV: torch.Tensor, incoming: Incoming) -> torch.Tensor:
        """Return -dz as Tile.descent does."""
        tokens, words = product_TV.shape
        descent_TV = self._descent[: product_TV.numel()].view(product_TV.shape)
        entropy_grad_T, kept_TB = incoming.entropy_grad_T, incoming.kept_TB
        descent_kernel[tokens, triton.cdiv(words, DESCENT_BLOCK)](
            product_TV,
            descent_TV,
            incoming.targets_T,
            incoming.lse_T,
            incoming.entropy_T,
            incoming.logprob_grad_T.contiguous(),
            incoming.lse_T if entropy_grad_T is None else entropy_grad_T.contiguous(),
            incoming.targets_T if kept_TB is None else kept_TB,
            0 if kept_TB is None else kept_TB.stride(0),
            words,
            self.scale,
            entropy_grad_T is not None,
            kept_TB is not None,
            self.cap or None,
            DESCENT_BLOCK,
        )
        return descent_TV

    @staticmethod
    def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        if total.dtype == a.dtype:
            total.addmm_(a, b)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
