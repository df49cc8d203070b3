"""Log-probability of each target token and the entropy of its distribution, from hidden states and the output head.

    hidden [.., D], weight [V, D], targets [..] -> logprob [..], entropy [..]

    z = hidden @ weight.T / temperature        matmul in the inputs' dtype, all that follows in fp32
    logprob = z[target] - lse(z)               equals vLLM's `processed_logprobs` at the sampling temperature
    entropy = lse(z) - sum softmax(z) z        nats

The logits [T, V] never exist as a whole: one tile at a time is computed, reduced to four numbers per token and
overwritten, and computed again in the backward pass: four products. With `keep_logits` they stay in memory as the
matmul leaves them, three products give the same bits, and a second backward still finds them. With p = softmax(z), and
g and h the gradients of log-prob and entropy:

    dz = g (onehot(target) - p) - h p (log p + entropy)

A matmul in bf16 rounds each logit to 8 bits. With `float32_logits` it keeps the float32 sums of the bf16 products, as
vLLM does with `head_dtype = "float32"`.

With a `cap` (Muse Glimmer, Gemma 2) a logit u becomes cap tanh(u / cap) before the temperature divides it.

A token of truncated sampling has a kept set (`kept`, kept_bits.py): the logits of all others count as DROPPED, so that
log-prob and entropy belong to the distribution that was sampled from, and dropped tokens get no gradient.

Log-probs of other ids can be read beside the target's. With their gradients g_k,

    dz = ... + sum_k g_k (onehot(id_k) - p)

Under tensor parallelism each rank holds some rows of the weight. The ranks' four numbers are combined like the tiles',
in one MAX and one SUM all-reduce per call; the backward pass sums hidden's gradient over the ranks.

CPU and GPU both run this file. On a GPU the tile is the one of `token_logprob_triton.py` if triton is installed and no
other ids are read.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from titan_rl.kernels.kept_bits import DROPPED, dropped, keeps
from titan_rl.kernels.softmax_sums import Incoming, SoftmaxSums
from titan_rl.kernels.triton_kernels import triton_kernels

if TYPE_CHECKING:
    from titan_rl.kernels.token_logprob_triton import FusedTile

# Tokens x vocabulary of `Tile`. Measured on two cores with 32 MiB of L3: 1024 x 1024 is the fastest of 64..2048 x
# 512..4096 at D = 128, or within noise of it; 64 x 1024 takes 1.6 times as long. A window begins at a whole byte of a
# kept set's mask: its vocabulary is a multiple of 8.
TILE = (1024, 1024)
LOGITS = 2**25  # at once, where the largest are looked for


def reference_token_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float = 1.0,
    kept_TV: torch.Tensor | None = None,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same in plain autograd, both results differentiable. It keeps several [T, V] tensors."""
    logits_TV = hidden_TD @ weight_VD.T
    logits_TV = logits_TV.to(_accumulation_dtype(logits_TV))
    logits_TV = (cap * torch.tanh(logits_TV / cap) if cap else logits_TV) / temperature
    if kept_TV is not None:
        logits_TV = logits_TV.masked_fill(~kept_TV, DROPPED)
    logprobs_TV = logits_TV.log_softmax(-1)
    logprob_T = logprobs_TV.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprob_T, entropy_T


class Tile:
    """Windows [tokens, vocabulary] of the logits, all computed in the same memory: new memory for each would cost page
    faults."""

    fused = False

    def __init__(
        self, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, temperature: float, float32_logits: bool, cap: float = 0
    ) -> None:
        self.tokens, self.vocabulary = TILE
        self.scale, self.cap = 1 / temperature, cap
        self.dtype = _accumulation_dtype(hidden_TD)
        size = min(self.tokens, len(hidden_TD)) * min(self.vocabulary, len(weight_VD))
        self.rounded = hidden_TD.new_empty(size)  # logits before the temperature, and the descent, in the inputs' dtype
        self.logits = self.rounded.to(self.dtype)  # the same memory where the dtypes agree
        self.product = self.logits if float32_logits else self.rounded
        self.scratch = torch.empty_like(self.logits)

    @property
    def logit_dtype(self) -> torch.dtype:
        return self.product.dtype

    def multiply(
        self, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a window's logits before the temperature, in `out` or in the memory of all windows."""
        shape = (len(hidden_TD), len(weight_VD))
        product_TV = self.product[: shape[0] * shape[1]].view(shape) if out is None else out
        kind = product_TV.dtype
        return torch.mm(hidden_TD.to(kind), weight_VD.to(kind).T, out=product_TV)

    def logits_and_scratch(self, product_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size, shape = product_TV.numel(), product_TV.shape
        logits_TV = self.logits[:size].view(shape)
        if logits_TV.data_ptr() != product_TV.data_ptr():
            logits_TV.copy_(product_TV)
        if self.cap:
            logits_TV.div_(self.cap).tanh_().mul_(self.cap)
        if self.scale != 1:
            logits_TV.mul_(self.scale)
        return logits_TV, self.scratch[:size].view(shape)

    def add_to(
        self,
        sums: SoftmaxSums,
        product_TV: torch.Tensor,
        targets_T: torch.Tensor,
        kept_TB: torch.Tensor | None = None,
        others_TK: torch.Tensor | None = None,
    ) -> None:
        """Add a window of the vocabulary to `sums`; ids and `kept_TB` count from the window's start."""
        logits_TV, scratch_TV = self.logits_and_scratch(product_TV)
        width = product_TV.shape[1]
        if kept_TB is not None:
            logits_TV.masked_fill_(dropped(kept_TB, width), DROPPED)
        if others_TK is not None and sums.others_TK is not None:
            column_TK, inside_TK = _columns(others_TK, width)
            sums.others_TK.add_(logits_TV.gather(1, column_TK) * inside_TK)
        column_T1, inside_T1 = _columns(targets_T.unsqueeze(1), width)
        sums.target_T.add_((logits_TV.gather(1, column_T1) * inside_T1).squeeze(1))
        sums.move_(torch.maximum(sums.max_T, logits_TV.amax(1)))
        shifted_TV = logits_TV.sub_(sums.max_T.unsqueeze(1))
        exponentials_TV = torch.exp(shifted_TV, out=scratch_TV)
        sums.mass_T.add_(exponentials_TV.sum(1))
        sums.moment_T.add_(exponentials_TV.mul_(shifted_TV).sum(1))

    def descent(self, product_TV: torch.Tensor, incoming: Incoming) -> torch.Tensor:
        """Return -dz in the inputs' dtype; `incoming` counts from the window's start. Kept logits stay as they are.

        If the entropy is detached, return -dz / g = p - onehot instead: the caller scales smaller tensors by g. The
        target is subtracted before the cast to bf16, in which p of a confident token would be 1.
        """
        logits_TV, scratch_TV = self.logits_and_scratch(product_TV)
        width = product_TV.shape[1]
        # how much a capped logit grows with its product
        slope_TV = 1 - (logits_TV / (self.cap * self.scale)).square_() if self.cap else None
        if incoming.kept_TB is not None:
            logits_TV.masked_fill_(dropped(incoming.kept_TB, width), DROPPED)
        column_T1, inside_T1 = _columns(incoming.targets_T.unsqueeze(1), width)
        onehot_T1 = inside_T1.to(self.dtype)
        logprobs_TV = logits_TV.sub_(incoming.lse_T.unsqueeze(1))
        descent_TV = torch.exp(logprobs_TV, out=scratch_TV)
        if incoming.entropy_grad_T is not None:
            g_T1, h_T1 = incoming.logprob_grad_T.unsqueeze(1), incoming.entropy_grad_T.unsqueeze(1)
            onehot_T1 = onehot_T1 * g_T1
            if incoming.others is not None:
                g_T1 = g_T1 + incoming.others[1].sum(1, keepdim=True)
            descent_TV.mul_(logprobs_TV.mul_(h_T1).add_(g_T1 + h_T1 * incoming.entropy_T.unsqueeze(1)))
        descent_TV.scatter_add_(1, column_T1, -onehot_T1)
        if incoming.others is not None:
            column_TK, inside_TK = _columns(incoming.others[0], width)
            descent_TV.scatter_add_(1, column_TK, -incoming.others[1] * inside_TK)
        if slope_TV is not None:
            descent_TV.mul_(slope_TV)
        if self.rounded.dtype == self.dtype:
            return descent_TV
        return self.rounded[: descent_TV.numel()].view(descent_TV.shape).copy_(descent_TV)

    @staticmethod
    def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        if total.dtype == a.dtype:
            total.addmm_(a, b)
        else:
            total.add_(a @ b)


def _columns(ids_TK: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each id's column in a window of this width, 0 if it is outside; and whether it is inside."""
    inside_TK = (ids_TK >= 0) & (ids_TK < width)
    return torch.where(inside_TK, ids_TK, 0), inside_TK


def softmax_sums(
    tile: "Tile | FusedTile",
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    kept_TB: torch.Tensor | None = None,
    others_TK: torch.Tensor | None = None,
    kept_logits: torch.Tensor | None = None,
) -> SoftmaxSums:
    """Reduce all windows of the logits. Their products stay in `kept_logits`, if given: T x V in any order."""
    sums = SoftmaxSums.of_nothing(len(hidden_TD), dtype=tile.dtype, device=hidden_TD.device)
    if others_TK is not None:
        sums = replace(sums, others_TK=torch.zeros_like(others_TK, dtype=tile.dtype))
    for v in _windows(len(weight_VD), tile.vocabulary):
        for t in _windows(len(hidden_TD), tile.tokens):
            kept_tB = None if kept_TB is None else kept_TB[t, v.start // 8 :]
            others = [] if others_TK is None else [others_TK[t] - v.start]
            product_TV = tile.multiply(hidden_TD[t], weight_VD[v], _part(kept_logits, len(hidden_TD), t, v))
            tile.add_to(sums[t], product_TV, targets_T[t] - v.start, kept_tB, *others)
    return sums


def _part(kept_logits: torch.Tensor | None, tokens: int, t: slice, v: slice) -> torch.Tensor | None:
    """Return a window among the kept logits of all `tokens`. Each is contiguous, as a tile's memory is."""
    if kept_logits is None:
        return None
    shape, start = (t.stop - t.start, v.stop - v.start), tokens * v.start + t.start * (v.stop - v.start)
    return kept_logits[start : start + shape[0] * shape[1]].view(shape)


def _gradients(
    tile: "Tile | FusedTile",
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    incoming: Incoming,
    kept_logits: torch.Tensor | None,
    hidden_needs_grad: bool,
    weight_needs_grad: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return hidden's gradient in the accumulation dtype, and weight's in its own, computed window by window."""
    row_T = incoming.logprob_grad_T if incoming.entropy_grad_T is None else torch.ones_like(incoming.lse_T)
    row_T1 = (-row_T * tile.scale).unsqueeze(1)
    grad_hidden_TD = torch.zeros_like(hidden_TD, dtype=tile.dtype) if hidden_needs_grad else None
    grad_weight_VD = torch.empty_like(weight_VD) if weight_needs_grad else None
    scaled_TD = (hidden_TD * row_T1).to(hidden_TD.dtype) if weight_needs_grad else hidden_TD
    windows = _windows(len(hidden_TD), tile.tokens)
    whole = tile.fused and len(windows) == 1  # then one matmul gives a window of weight's gradient, rounded once
    for v in _windows(len(weight_VD), tile.vocabulary):
        window_VD = None if whole or grad_weight_VD is None else torch.zeros_like(weight_VD[v], dtype=tile.dtype)
        for t in windows:
            product_TV = _part(kept_logits, len(hidden_TD), t, v)
            if product_TV is None:
                product_TV = tile.multiply(hidden_TD[t], weight_VD[v])
            descent_TV = tile.descent(product_TV, incoming.at(t, v.start))
            if grad_hidden_TD is not None:
                tile.add_product(grad_hidden_TD[t], descent_TV, weight_VD[v])
            if window_VD is not None:
                tile.add_product(window_VD, descent_TV.T, scaled_TD[t])
            elif grad_weight_VD is not None:
                torch.mm(descent_TV.T, scaled_TD, out=grad_weight_VD[v])
        if grad_weight_VD is not None and window_VD is not None:
            grad_weight_VD[v] = window_VD
    if grad_hidden_TD is not None:
        grad_hidden_TD.mul_(row_T1)
    return grad_hidden_TD, grad_weight_VD


class _Options(NamedTuple):
    temperature: float
    group: dist.ProcessGroup | None
    with_entropy_grad: bool
    float32_logits: bool
    keep_logits: bool
    cap: float = 0.0


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_T: torch.Tensor,
        kept_TB: torch.Tensor | None,
        others_TK: torch.Tensor | None,
        options: _Options,
    ) -> tuple[torch.Tensor, ...]:
        tile = _tile(hidden_TD, weight_VD, options, plain=others_TK is not None)
        logits = None
        if options.keep_logits:
            logits = hidden_TD.new_empty(len(hidden_TD) * len(weight_VD), dtype=tile.logit_dtype)
        sums = softmax_sums(tile, hidden_TD, weight_VD, targets_T, kept_TB, others_TK, logits)
        if options.group is not None:
            sums = sums.over_group(options.group)
        lse_T, entropy_T = sums.lse_T, sums.entropy_T
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, lse_T, entropy_T, kept_TB, others_TK, logits)
        ctx.options = options
        ctx.set_materialize_grads(False)
        if not options.with_entropy_grad:
            ctx.mark_non_differentiable(entropy_T)
        if sums.others_TK is None:
            return sums.logprob_T, entropy_T
        others_TK = (sums.others_TK - sums.max_T.unsqueeze(1)) - sums.mass_T.log().unsqueeze(1)
        return sums.logprob_T, entropy_T, others_TK

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator makes ctx positional
        ctx: Any, *grad_outputs: torch.Tensor | None
    ) -> Any:
        hidden_TD, weight_VD, targets_T, lse_T, entropy_T, kept_TB, others_TK, logits = ctx.saved_tensors
        options: _Options = ctx.options
        logprob_grad_T, entropy_grad_T, *others_grad = grad_outputs
        if logprob_grad_T is None:
            logprob_grad_T = torch.zeros_like(lse_T)
        others = (others_TK, others_grad[0]) if others_grad and others_grad[0] is not None else None
        if others and entropy_grad_T is None:  # p then has another factor than the target's onehot
            entropy_grad_T = torch.zeros_like(lse_T)
        incoming = Incoming(targets_T, lse_T, entropy_T, logprob_grad_T, entropy_grad_T, kept_TB, others)
        tile = _tile(hidden_TD, weight_VD, options, plain=others_TK is not None)  # the forward's: so are its windows
        hidden, weight = _gradients(tile, hidden_TD, weight_VD, incoming, logits, *ctx.needs_input_grad[:2])
        if hidden is not None:
            if options.group is not None:
                dist.all_reduce(hidden, dist.ReduceOp.SUM, options.group)
            hidden = hidden.to(hidden_TD.dtype)
        return hidden, weight, None, None, None, None


def token_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float = 1.0,
    *,
    shard: tuple[dist.ProcessGroup, int] | None = None,
    with_entropy_grad: bool = False,
    float32_logits: bool = False,
    keep_logits: bool = False,
    kept: torch.Tensor | None = None,
    others: torch.Tensor | None = None,
    cap: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Return the log-prob of each target and the entropy, fp32 (fp64 for fp64 inputs), in the targets' shape; and with
    the ids of `others`, [T, K], their log-probs. An id outside the vocabulary has any number.

    Hidden is [.., D] and targets [..]. Gradients flow to hidden and weight from the log-prob, and with
    `with_entropy_grad` from the entropy; otherwise the entropy is detached, and the backward pass is cheaper.

    With a `shard` (a group of ranks, and an id), weight holds this rank's rows of the vocabulary, from that id on (any
    number of rows, also none), targets are global ids, and hidden, the results and their gradients are the same on all
    ranks. Weight's gradient covers this rank's rows. Hidden's is the full gradient: the backward pass sums it over the
    group, so callers must not.

    `kept` has the tokens' masks over weight's rows, [T, ceil(rows / 8)] uint8 (kept_bits.py). With `keep_logits` a
    forward that a backward may follow keeps T x rows logits for it. `cap` is the largest
    logit before the temperature, approached by tanh; 0: there is none.
    """
    if hidden_TD.shape[:-1] != targets_T.shape:
        raise ValueError(
            f"expected targets {list(hidden_TD.shape[:-1])} for hidden {list(hidden_TD.shape)}, "
            f"found {list(targets_T.shape)}"
        )
    flat_T, (group, start) = targets_T.reshape(-1), shard or (None, 0)
    # A GPU would have to wait for the result, and a rank of a group does not know the size of the vocabulary.
    if group is None and flat_T.device.type == "cpu" and ((flat_T < 0) | (flat_T >= len(weight_VD))).any():
        raise IndexError(f"expected targets in 0..{len(weight_VD) - 1}, found {flat_T.min()}..{flat_T.max()}")
    if kept is not None and group is None and flat_T.device.type == "cpu" and not keeps(kept, flat_T).all():
        place = int(keeps(kept, flat_T).logical_not().nonzero()[0])
        raise IndexError(f"expected each target in its kept set, found token {flat_T[place]} of place {place} dropped")
    follows = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    logprob_T, entropy_T, *others_TK = _TokenLogprob.apply(
        hidden_TD.reshape(-1, hidden_TD.shape[-1]),
        weight_VD,
        flat_T - start,
        kept,
        None if others is None else others - start,
        _Options(temperature, group, with_entropy_grad, float32_logits, keep_logits and follows, cap),
    )
    return logprob_T.view(targets_T.shape), entropy_T.view(targets_T.shape), *others_TK


@torch.no_grad()
def most_likely(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, k: int, shard: tuple[dist.ProcessGroup, int] | None = None
) -> torch.Tensor:
    """Return the ids of the k largest logits of each token, [T, K]. Of a `shard` as token_logprob has it."""
    (group, start), width = shard or (None, 0), min(k, len(weight_VD))
    windows = _windows(len(hidden_TD), max(1, LOGITS // max(1, len(weight_VD))))
    parts = [(hidden_TD[t] @ weight_VD.T).topk(width) for t in windows] or [hidden_TD.new_empty(0, width).topk(width)]
    logits_TK = F.pad(torch.cat([part.values for part in parts]), (0, k - width), value=-torch.inf)
    ids_TK = F.pad(torch.cat([part.indices for part in parts]) + start, (0, k - width))
    if group is None:
        return ids_TK
    own_2TK = torch.stack([logits_TK.double(), ids_TK.double()])
    every = [torch.empty_like(own_2TK) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own_2TK, group=group)
    logits_TN, ids_TN = torch.cat(every, -1)
    return ids_TN.gather(1, logits_TN.topk(k).indices).long()


def _tile(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, options: _Options, *, plain: bool = False
) -> "Tile | FusedTile":
    """Return a FusedTile for a GPU's tensors, or else a Tile, whose methods are the same; it alone reads other ids."""
    fused = None if plain else _triton(hidden_TD)
    kind = fused.FusedTile if fused else Tile
    return kind(hidden_TD, weight_VD, options.temperature, options.float32_logits, options.cap)


def _triton(hidden_TD: torch.Tensor) -> Any:
    """Return the module of Triton kernels if this tensor can use it."""
    if hidden_TD.is_cuda and hidden_TD.dtype != torch.float64:  # the kernels compute in fp32
        return triton_kernels("token_logprob", "token log-probs run as separate torch operations")
    return None


def _windows(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def _accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
