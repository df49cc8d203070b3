"""A model's parts, computed so that a row's bits depend on that row alone, whatever else is in its batch. CPU only.

A matrix product adds up in an order that depends on the number of rows; an elementwise function computes the last few
numbers of a tensor by other instructions. So a sampled token's log-prob differs by rounding from the one that a trainer
computes for the same token in a packed row. Here every product has one shape per weight, BLOCK rows, and attention
takes BLOCK queries and KEYS keys at a time, whatever there is to compute. Trainer and generator both call these
functions (exact mode, docs/exactness.md), and their log-probs are then equal to the last bit.

block_linear           F.linear
block_silu             F.silu
block_attention        causal attention over segments with a prefix, softmax in float32
block_token_logprob    token_logprob

Only the forward is computed in blocks. The backward is that of the plain operation on the same inputs.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from titan_rl.kernels.softmax_sums import SoftmaxSums
from titan_rl.kernels.token_logprob import Tile, softmax_sums, token_logprob

BLOCK = 16
KEYS = 128
VECTORS = 64  # elements: a multiple of what two vector registers hold, in float32 and bfloat16, on every CPU
LOGPROBS = 32  # tokens: log-probs of a multiple of these have no remainder that is computed without vectors
_LOWEST = -1e30  # finite: a row may be masked in all keys of a block


def _product(x_BK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Multiply by oneDNN: MKL adds up small products differently by row, and by the alignment of their memory."""
    if x_BK.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x_BK, weight_NK, None, "none", [], "")
    return F.linear(x_BK, weight_NK)  # bfloat16: oneDNN's where the CPU has its instructions


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        ctx.biased = bias_N is not None
        count = len(x_TK)
        padded_TK = F.pad(x_TK, (0, 0, 0, -count % BLOCK)).contiguous()
        y_TN = x_TK.new_empty(len(padded_TK), len(weight_NK))
        for at in range(0, len(padded_TK), BLOCK):
            y_TN[at : at + BLOCK] = _product(padded_TK[at : at + BLOCK], weight_NK)
        return y_TN[:count] if bias_N is None else y_TN[:count] + bias_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad_TN,) = grads
        x_TK, weight_NK = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        return (
            grad_TN @ weight_NK if of_x else None,
            grad_TN.T @ x_TK if of_weight else None,
            grad_TN.sum(0) if ctx.biased else None,
        )


def block_linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    y_TN: Any = _BlockLinear.apply(x.reshape(-1, x.shape[-1]), weight_NK, bias_N)
    return y_TN.view(*x.shape[:-1], len(weight_NK))


def block_silu(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1)
    return F.silu(F.pad(flat, (0, -len(flat) % VECTORS)))[: len(flat)].view(x.shape)


class Segment(NamedTuple):
    """Consecutive queries, which see the keys before them: those of `prefix` places and, causally, their own."""

    queries: int  # where its queries begin
    length: int
    keys: int  # where its keys begin: prefix, then its own
    prefix: int


def block_attention(
    q_QNH: torch.Tensor,
    k_KGH: torch.Tensor,
    v_KGH: torch.Tensor,
    segments: Sequence[Segment],
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Return [Q, N, H] in q's dtype. With a `window`, a query sees that many places, its own included."""
    heads, groups, width = q_QNH.shape[1], k_KGH.shape[1], q_QNH.shape[2]
    row_BM, inside_BM, place_BM, keys_B1, end_B1, left_of = _plan(tuple(segments))
    size, rows, ratio = len(row_BM), heads // groups * BLOCK, heads // groups
    q_B = q_QNH[row_BM].float().unflatten(2, (groups, ratio)).permute(0, 2, 3, 1, 4)
    q_B = q_B.reshape(size * groups, rows, width).contiguous()
    shape = (size, groups, ratio, BLOCK, 1)
    most = torch.full(shape, _LOWEST)
    mass, sums = torch.zeros(shape), torch.zeros(*shape[:-1], width)
    for number, left in enumerate(left_of):
        place_mK = number * KEYS + torch.arange(KEYS)
        index_mK = torch.minimum(keys_B1[:left] + place_mK, end_B1[:left])
        k_m, v_m = (x[index_mK].float().transpose(1, 2).reshape(left * groups, KEYS, width) for x in (k_KGH, v_KGH))
        score = torch.bmm(q_B[: left * groups], k_m.transpose(1, 2)) * scale  # selective recomputation keeps a product
        score = score.view(left, groups, ratio, BLOCK, KEYS)
        hidden_mMK = place_mK > place_BM[:left, :, None]
        if window:
            hidden_mMK |= place_mK <= place_BM[:left, :, None] - window
        score = score.masked_fill_(hidden_mMK[:, None, None], -torch.inf)
        highest = torch.maximum(most[:left], score.amax(-1, keepdim=True))
        weight = score.sub_(highest).exp_()
        kept = (most[:left] - highest).exp_()
        mass[:left] = mass[:left] * kept + weight.sum(-1, keepdim=True)
        found = torch.bmm(weight.view(left * groups, rows, KEYS), v_m).view(left, groups, ratio, BLOCK, width)
        sums[:left] = sums[:left] * kept + found
        most[:left] = highest
    attended_BMNH = (sums / mass).permute(0, 3, 1, 2, 4).flatten(2, 3)
    out_QNH = torch.empty_like(q_QNH, memory_format=torch.contiguous_format)
    out_QNH[row_BM[inside_BM]] = attended_BMNH[inside_BM].to(q_QNH.dtype)
    return out_QNH


class _Plan(NamedTuple):
    """Blocks of at most BLOCK queries, those with the most keys first."""

    row_BM: torch.Tensor  # queries; a short block repeats its last one
    inside_BM: torch.Tensor  # False where it does
    place_BM: torch.Tensor  # of the queries in their segment, prefix included
    keys_B1: torch.Tensor  # where the segment's keys begin
    end_B1: torch.Tensor  # the last of them
    left: tuple[int, ...]  # of each round, of KEYS keys: blocks that have so many


@lru_cache(maxsize=2)  # all layers of a forward share it
def _plan(segments: tuple[Segment, ...]) -> _Plan:
    blocks = [
        (-(-(s.prefix + min(at + BLOCK, s.length)) // KEYS), s, at)
        for s in segments
        for at in range(0, s.length, BLOCK)
    ]
    blocks.sort(key=lambda block: -block[0])
    first, last, place, keys, end = (
        torch.tensor(column).unsqueeze(1)
        for column in zip(
            *(
                (s.queries + at, s.queries + s.length - 1, s.prefix + at, s.keys, s.keys + s.prefix + s.length - 1)
                for _, s, at in blocks
            ),
            strict=True,
        )
    )
    every, rounds = first + torch.arange(BLOCK), [block[0] for block in blocks]
    left = tuple(sum(r > number for r in rounds) for number in range(rounds[0]))
    return _Plan(torch.minimum(every, last), every <= last, place + torch.arange(BLOCK), keys, end, left)


class _BlockTile(Tile):
    """LOGPROBS rows of the logits and a window of the vocabulary."""

    def logits_and_scratch(self, hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kind = self.product.dtype
        logits_TV = block_linear(hidden_TD.to(kind), weight_VD.to(kind)).to(self.dtype)
        return logits_TV.mul_(self.scale), torch.empty_like(logits_TV)


class _ForwardInBlocks(torch.autograd.Function):
    """Runs `exact` forward and differentiates `plain`, which computes the same, to rounding."""

    @staticmethod
    def forward(
        ctx: Any, exact: Callable[..., Any], plain: Callable[..., Any], *inputs: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(wanted) for x, wanted in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            outputs = ctx.plain(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        outs, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outs, [x for x, n in zip(inputs, needed, strict=True) if n], given))
        return None, None, *(next(found) if wanted else None for wanted in needed)


def forward_in_blocks(exact: Callable[..., Any], plain: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """Return exact(*inputs), with the gradient of plain(*inputs)."""
    return _ForwardInBlocks.apply(exact, plain, *inputs)


def block_token_logprob(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    temperature: float = 1.0,
    *,
    with_entropy_grad: bool = False,
    float32_logits: bool = False,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob and entropy of each target, [T] float32, as token_logprob does."""
    temperature = torch.tensor(temperature, dtype=torch.float32).item()  # as an engine keeps it

    def exact(hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, more = len(hidden_TD), -len(hidden_TD) % LOGPROBS
        hidden_TD, target_T = F.pad(hidden_TD, (0, 0, 0, more)), F.pad(targets_T, (0, more))
        kept_TB = None if kept is None else F.pad(kept, (0, 0, 0, more), value=255)
        found = [hidden_TD.new_empty(2, 0, dtype=torch.float32)]
        for at in range(0, len(hidden_TD), LOGPROBS):
            rows_TD = hidden_TD[at : at + LOGPROBS]
            tile = _BlockTile(rows_TD, weight_VD, temperature, float32_logits)
            kept_rB = None if kept_TB is None else kept_TB[at : at + LOGPROBS]
            sums: SoftmaxSums = softmax_sums(tile, rows_TD, weight_VD, target_T[at : at + LOGPROBS], kept_rB)
            found.append(torch.stack([sums.logprob_T, sums.entropy_T]))
        logprob_T, entropy_T = torch.cat(found, 1)[:, :count]
        return logprob_T.contiguous(), entropy_T.contiguous()

    def plain(hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprob(
            hidden_TD,
            weight_VD,
            targets_T,
            temperature,
            with_entropy_grad=with_entropy_grad,
            float32_logits=float32_logits,
            kept=kept,
        )

    if not len(targets_T):
        return plain(hidden_TD, weight_VD)
    return forward_in_blocks(exact, plain, hidden_TD, weight_VD)
