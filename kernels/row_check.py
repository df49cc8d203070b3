"""Checks on this machine that rows computed in blocks do not depend on each other, at a model's own sizes."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from titan_rl.kernels.row_blocks import (
    KEYS,
    Segment,
    block_attention,
    block_linear,
    block_silu,
    block_token_logprob,
)
from titan_rl.kernels.token_logprob import TILE
from titan_rl.wire.model_shape import ModelShape

ROWS = 37  # two blocks and a part of one
PLACES = KEYS + 5

Rows = Callable[[torch.Tensor], torch.Tensor]


def require_independent_rows(shape: ModelShape, dtype: torch.dtype) -> None:
    """Raise RuntimeError, naming each operation of the model whose rows depend on their batch."""
    with torch.no_grad():
        found = [name for name, depends in _checks(shape, dtype) if depends]
    if found:
        raise RuntimeError(
            f"debug.exact: expected rows that do not depend on their batch on this machine, found that "
            f"{', '.join(found)} in {str(dtype).removeprefix('torch.')} do: run without debug.exact"
        )


def _checks(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, bool]]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.empty(size).uniform_(-1, 1, generator=generator).to(dtype)

    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    products = {(shape.dim, q), (shape.dim, kv), (q, shape.dim), (shape.dim, shape.hidden_dim)}
    for width, out in sorted(products | {(shape.hidden_dim, shape.dim)}):
        weight = drawn(out, width)
        yield f"products {width} x {out}", _depends(lambda x, w=weight: block_linear(x, w), drawn(ROWS, width))
    for width in sorted({shape.dim, shape.head_dim}):
        scale = drawn(width)
        yield (
            f"norms of {width}",
            _depends(lambda x, s=scale: F.rms_norm(x, s.shape, s, shape.norm_eps), drawn(ROWS, width)),
        )
    yield "silu", _depends(block_silu, drawn(ROWS, shape.hidden_dim))
    yield "attention", _attention_depends(shape, drawn)
    vocabulary = min(shape.vocab_size, TILE[1] + shape.vocab_size % TILE[1])
    weight, target = drawn(vocabulary, shape.dim), torch.arange(ROWS) % vocabulary
    hidden = torch.cat([drawn(ROWS, shape.dim).float(), target[:, None]], 1).double()  # each row with its target

    def logprobs(x: torch.Tensor) -> torch.Tensor:
        found = block_token_logprob(x[:, :-1].to(dtype), weight, x[:, -1].long(), 0.7)
        return torch.stack(found, 1)

    yield "log-probs", _depends(logprobs, hidden)


def _depends(rows: Rows, x: torch.Tensor) -> bool:
    """Return whether a row's bits change with its place, or with what else is computed."""
    whole = rows(x)
    turned = torch.arange(len(x)).roll(5).flip(0)
    alone = torch.cat([rows(x[at : at + 1].clone()) for at in (0, 15, 16, len(x) - 1)])
    return not (
        torch.equal(rows(x[turned]), whole[turned])
        and torch.equal(alone, whole[[0, 15, 16, len(x) - 1]])
        and torch.equal(rows(x[:3].clone()), whole[:3])
    )


def _attention_depends(shape: ModelShape, drawn: Callable[..., torch.Tensor]) -> bool:
    """Return whether decoding gives other bits than a prefill, or a prefill after a prefix."""
    q = drawn(PLACES, shape.n_heads, shape.head_dim)
    k, v = drawn(2, PLACES, shape.n_kv_heads, shape.head_dim)
    scale = shape.head_dim**-0.5
    whole = block_attention(q, k, v, [Segment(0, PLACES, 0, 0)], scale)
    places = (0, 9, KEYS - 1, KEYS, PLACES - 1)
    decoded, begin = list[Segment](), 0
    for at, place in enumerate(places):
        decoded.append(Segment(at, 1, begin, place))
        begin += place + 1
    keys = [torch.cat([x[: place + 1] for place in places]) for x in (k, v)]
    together = block_attention(q[list(places)], keys[0], keys[1], decoded, scale)
    after = block_attention(q[KEYS - 3 :], k, v, [Segment(0, PLACES - KEYS + 3, 0, KEYS - 3)], scale)
    return not (torch.equal(together, whole[list(places)]) and torch.equal(after, whole[KEYS - 3 :]))
