"""Log-probability of each target token and the entropy of its distribution, from hidden states and the output head.

    hidden [.., D], weight [V, D], targets [..] -> logprob [..], entropy [..]

    z = hidden @ weight.T / temperature        matmul in the inputs' dtype, all that follows in fp32
    logprob = z[target] - lse(z)               what vLLM's `processed_logprobs` returns at the sampling temperature
    entropy = lse(z) - sum softmax(z) z        nats

The logits [T, V] never exist: a tile of them is computed, reduced to four numbers a token and overwritten, and computed
again in the backward pass. With p = softmax(z) and incoming gradients g (of logprob) and h (of entropy):

    dz = g (onehot(target) - p) - h p (log p + entropy)

Under tensor parallelism each rank holds some rows of the weight. The four numbers of the ranks combine as those of the
tiles do, in one MAX and one SUM all-reduce per call; the backward pass sums hidden's gradient over the ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

TILE_TOKENS, TILE_VOCABULARY = 512, 2048


def reference_token_logprob(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain autograd, both results differentiable. It keeps several [T, V] tensors."""
    logits_TV = hidden_TD @ weight_VD.T
    logits_TV = logits_TV.to(_accumulation_dtype(logits_TV)) / temperature
    logprobs_TV = logits_TV.log_softmax(-1)
    logprob_T = logprobs_TV.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprob_T, entropy_T


@dataclass(frozen=True)
class SoftmaxSums:
    """A token's softmax over a part of the vocabulary, in four numbers that combine with those of the other parts.

    max m = max z; mass = sum e^(z-m); moment = sum e^(z-m) (z-m); target = z[target] where the part has it, else 0.
    """

    max_T: torch.Tensor
    mass_T: torch.Tensor
    moment_T: torch.Tensor
    target_T: torch.Tensor

    @classmethod
    def of_nothing(cls, tokens: int, dtype: torch.dtype, device: torch.device) -> "SoftmaxSums":
        """Max is the least finite number, not -inf: an empty part's `max - max` must not be NaN."""
        zeros = torch.zeros(3, tokens, dtype=dtype, device=device)
        return cls(torch.full_like(zeros[0], torch.finfo(dtype).min), *zeros.unbind())

    def __getitem__(self, tokens: slice) -> "SoftmaxSums":
        return SoftmaxSums(self.max_T[tokens], self.mass_T[tokens], self.moment_T[tokens], self.target_T[tokens])

    def move_(self, max_T: torch.Tensor) -> None:
        """State mass and moment about another max."""
        shift_T = self.max_T - max_T
        self.moment_T.addcmul_(shift_T, self.mass_T).mul_(shift_T.exp())
        self.mass_T.mul_(shift_T.exp())
        self.max_T.copy_(max_T)

    def reduce_(self, group: dist.ProcessGroup) -> None:
        """Combine with the other ranks' parts."""
        max_T = self.max_T.clone()
        dist.all_reduce(max_T, dist.ReduceOp.MAX, group)
        self.move_(max_T)
        sums_3T = torch.stack([self.mass_T, self.moment_T, self.target_T])
        dist.all_reduce(sums_3T, dist.ReduceOp.SUM, group)
        for mine, everyone in zip((self.mass_T, self.moment_T, self.target_T), sums_3T, strict=True):
            mine.copy_(everyone)

    def lse(self) -> torch.Tensor:
        return self.max_T + self.mass_T.log()

    def entropy(self) -> torch.Tensor:
        return self.mass_T.log() - self.moment_T / self.mass_T


class Tile:
    """A [tokens, vocabulary] window of the logits in memory that the next window reuses."""

    def __init__(self, hidden_TD: torch.Tensor, temperature: float) -> None:
        self.dtype = _accumulation_dtype(hidden_TD)
        self.scale = 1 / temperature
        self.product = hidden_TD.new_empty(TILE_TOKENS * TILE_VOCABULARY)
        self.logits = self.product.to(self.dtype)  # the same memory where the dtypes agree
        self.exponentials = torch.empty_like(self.logits)

    def fill(self, hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits in fp32 or more, and scratch of the same shape."""
        shape = (hidden_TD.shape[0], weight_VD.shape[0])
        size = shape[0] * shape[1]
        product_TV, logits_TV = self.product[:size].view(shape), self.logits[:size].view(shape)
        torch.mm(hidden_TD, weight_VD.T, out=product_TV)
        if self.product.dtype != self.dtype:
            logits_TV.copy_(product_TV)
        if self.scale != 1:
            logits_TV.mul_(self.scale)
        return logits_TV, self.exponentials[:size].view(shape)

    def matrix(self, values_TV: torch.Tensor) -> torch.Tensor:
        """The values in the matmul's dtype."""
        if self.product.dtype == self.dtype:
            return values_TV
        return self.product[: values_TV.numel()].view(values_TV.shape).copy_(values_TV)


def _add_tile(sums: SoftmaxSums, logits_TV: torch.Tensor, scratch_TV: torch.Tensor, targets_T: torch.Tensor) -> None:
    """Add a window of the vocabulary to the sums; `targets_T` counts from the window's start. Overwrites the logits."""
    column_T1, inside_T = _columns(targets_T, logits_TV.shape[1])
    sums.target_T.addcmul_(logits_TV.gather(1, column_T1).squeeze(1), inside_T.to(logits_TV.dtype))
    sums.move_(torch.maximum(sums.max_T, logits_TV.amax(1)))
    shifted_TV = logits_TV.sub_(sums.max_T.unsqueeze(1))
    torch.exp(shifted_TV, out=scratch_TV)
    sums.mass_T.add_(scratch_TV.sum(1))
    sums.moment_T.add_(shifted_TV.mul_(scratch_TV).sum(1))


def _columns(targets_T: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's column in a window `width` wide, 0 where it lies outside, and whether it lies inside."""
    inside_T = (targets_T >= 0) & (targets_T < width)
    return torch.where(inside_T, targets_T, 0).unsqueeze(1), inside_T


def _softmax_sums(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, temperature: float
) -> SoftmaxSums:
    tile = Tile(hidden_TD, temperature)
    sums = SoftmaxSums.of_nothing(len(hidden_TD), tile.dtype, hidden_TD.device)
    for v in _windows(len(weight_VD), TILE_VOCABULARY):
        for t in _windows(len(hidden_TD), TILE_TOKENS):
            _add_tile(sums[t], *tile.fill(hidden_TD[t], weight_VD[v]), targets_T[t] - v.start)
    return sums


def _gradients(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    lse_T: torch.Tensor,
    entropy_T: torch.Tensor,
    grad_logprob_T: torch.Tensor,
    grad_entropy_T: torch.Tensor | None,
    temperature: float,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of hidden, in the accumulation dtype, and of weight, in its own.

    A tile holds a_t = -dz_t / row_t. Without the entropy's gradient dz_t is g_t (onehot - p): then row is g and scales
    [T, D] tensors instead of the tile.
    """
    tile = Tile(hidden_TD, temperature)
    row_T = grad_logprob_T if grad_entropy_T is None else torch.ones_like(grad_logprob_T)
    row_T1 = (-row_T / temperature).unsqueeze(1)
    scaled_TD = (hidden_TD * row_T1).to(hidden_TD.dtype) if needs[1] else hidden_TD
    grad_hidden_TD = torch.zeros_like(hidden_TD, dtype=tile.dtype) if needs[0] else None
    grad_weight_VD = torch.empty_like(weight_VD) if needs[1] else None
    for v in _windows(len(weight_VD), TILE_VOCABULARY):
        slice_VD = torch.zeros_like(weight_VD[v], dtype=tile.dtype)
        for t in _windows(len(hidden_TD), TILE_TOKENS):
            logits_TV, scratch_TV = tile.fill(hidden_TD[t], weight_VD[v])
            logprobs_TV = logits_TV.sub_(lse_T[t].unsqueeze(1))
            a_TV = torch.exp(logprobs_TV, out=scratch_TV)
            onehot_T = torch.ones_like(lse_T[t])
            if grad_entropy_T is not None:
                g_T, h_T = grad_logprob_T[t], grad_entropy_T[t]
                weight_TV = logprobs_TV.add_(entropy_T[t].unsqueeze(1)).mul_(h_T.unsqueeze(1)).add_(g_T.unsqueeze(1))
                a_TV.mul_(weight_TV)
                onehot_T = g_T
            column_T1, inside_T = _columns(targets_T[t] - v.start, a_TV.shape[1])
            a_TV.scatter_add_(1, column_T1, -(onehot_T * inside_T).unsqueeze(1))
            a_TV = tile.matrix(a_TV)
            if grad_hidden_TD is not None:
                _add_product(grad_hidden_TD[t], a_TV, weight_VD[v])
            if grad_weight_VD is not None:
                _add_product(slice_VD, a_TV.T, scaled_TD[t])
        if grad_weight_VD is not None:
            grad_weight_VD[v] = slice_VD
    if grad_hidden_TD is not None:
        grad_hidden_TD.mul_(row_T1)
    return grad_hidden_TD, grad_weight_VD


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_T: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        with_entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = _softmax_sums(hidden_TD, weight_VD, targets_T, temperature)
        if group is not None:
            sums.reduce_(group)
        lse_T, entropy_T = sums.lse(), sums.entropy()
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, lse_T, entropy_T)
        ctx.temperature, ctx.group = temperature, group
        ctx.set_materialize_grads(False)
        if not with_entropy_grad:
            ctx.mark_non_differentiable(entropy_T)
        return sums.target_T - lse_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:
        grad_logprob_T, grad_entropy_T = grad_outputs
        hidden_TD, weight_VD, targets_T, lse_T, entropy_T = ctx.saved_tensors
        if grad_logprob_T is None:
            grad_logprob_T = torch.zeros_like(lse_T)
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        grad_hidden_TD, grad_weight_VD = _gradients(
            hidden_TD,
            weight_VD,
            targets_T,
            lse_T,
            entropy_T,
            grad_logprob_T,
            grad_entropy_T,
            ctx.temperature,
            needs,
        )
        if grad_hidden_TD is not None:
            if ctx.group is not None:
                dist.all_reduce(grad_hidden_TD, group=ctx.group)
            grad_hidden_TD = grad_hidden_TD.to(hidden_TD.dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None, None


def token_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float = 1.0,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    with_entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy, fp32 (fp64 for fp64 inputs), in the targets' shape.

    Hidden is [.., D] and targets [..]. Gradients flow to hidden and weight from the log-prob, and from the entropy
    where `with_entropy_grad`; else it is detached, and the backward pass cheaper.

    With a `group`, weight holds this rank's rows of the vocabulary, from `vocab_start` on (any number of them, none
    included), targets are global ids, and hidden is the same on all ranks, as are results and their gradients. Weight's
    gradient is then this rank's rows', and hidden's the full one: it is summed over the group in the backward pass.
    """
    shape = targets_T.shape
    logprob_T, entropy_T = _TokenLogprob.apply(
        hidden_TD.reshape(-1, hidden_TD.shape[-1]),
        weight_VD,
        targets_T.reshape(-1) - vocab_start,
        temperature,
        group,
        with_entropy_grad,
    )
    return logprob_T.view(shape), entropy_T.view(shape)


def _windows(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
