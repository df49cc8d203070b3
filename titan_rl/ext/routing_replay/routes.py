"""Routes: of each token that a model reads, the experts that its layers sent it to, [layers, K].

An id is one byte, or two if there are more than 255 experts. The largest value of its dtype means unknown: a row is
known in all layers, or in none. Where a row is unknown, the router of the trainer chooses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.side_columns import Places, RankPart, SideColumn, check_lengths
from titan_rl.wire.types import Branch, Rollout, Rows, Sample, ranges

BLOCK = 16  # tokens: a prefix cache has whole blocks of a multiple of it


def id_type(experts: int) -> type[np.unsignedinteger]:
    return np.uint8 if experts <= 255 else np.uint16


def unknown_rows(count: int, like: np.ndarray) -> np.ndarray:
    """Return `count` unknown rows for the layers and experts per token of other ones, [N, layers, K]."""
    return np.full((count, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def known(rows: np.ndarray) -> np.ndarray:
    """Return which rows are known, [N] bool."""
    return rows[:, 0, 0] != np.iinfo(rows.dtype).max


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a sequence's tokens that were read, without the leading ones that were in a prefix cache."""

    cached: int  # leading tokens without a row
    ids: np.ndarray  # [N, layers, K], of the tokens after them; all are known

    def __len__(self) -> int:
        """Return the number of tokens that were read."""
        return self.cached + len(self.ids)

    def rows(self, begin: int = 0) -> np.ndarray:
        """Return a row for each token that was read from token `begin` on, unknown for cached ones."""
        unknown = unknown_rows(max(self.cached - begin, 0), self.ids)
        return np.concatenate([unknown, self.ids[max(begin - self.cached, 0) :]])


def joined(parts: Sequence[tuple[int, np.ndarray | None]]) -> np.ndarray | None:
    """Return the rows of all tokens, and an unknown one. A part has its number of tokens, and their rows, or None if
    they are unknown. None if no part has any."""
    like = next((rows for _, rows in parts if rows is not None), None)
    if like is None:
        return None
    every = (unknown_rows(count, like) if rows is None else rows for count, rows in [*parts, (1, None)])
    return np.concatenate([*every])


def signed(rows: np.ndarray) -> np.ndarray:
    """Return rows in int16, with -1 for unknown ids."""
    return np.where(rows == np.iinfo(rows.dtype).max, np.int16(-1), rows.astype(np.int16))


def fill_cached(samples: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write, in place, the rows of leading tokens that were in a prefix cache, from another sample that begins with the
    same tokens. A sample has its tokens, [N], and their rows."""
    nodes: dict[tuple[int, bytes], int] = {}  # a tree: (node, next block of tokens) -> node
    there: dict[int, np.ndarray] = {}  # a node's rows
    missing: list[tuple[int, np.ndarray]] = []
    for tokens, rows in samples:
        first, node = int(known(rows).argmax()), -1
        words = np.ascontiguousarray(tokens, np.int64)
        for begin in range(0, len(tokens) - BLOCK, BLOCK):
            node = nodes.setdefault((node, words[begin : begin + BLOCK].tobytes()), len(nodes))
            block = rows[begin : begin + BLOCK]
            if begin < first:
                missing.append((node, block))
            else:
                there.setdefault(node, block)
    for node, block in missing:
        if node in there:
            block[:] = there[node]


class RoutesColumn(SideColumn):
    """Of completions the `Routes` of each token of context and sample but the last. Of samples a row for each token,
    [N, layers, K], unknown for the last one. Of rows the experts that each place's token is sent to, [B, L, layers, K]
    int16; -1: the router's own."""

    of_policy = True  # other weights take their own

    def of_branches(self, branches: Sequence[Branch]) -> list[np.ndarray | None]:
        found = [rows_of(branch) for branch in branches]
        fill_cached([(np.asarray(b.tokens), rows) for b, rows in zip(branches, found, strict=True) if rows is not None])
        return found

    def packed(self, samples: Sequence[Sample]) -> Callable[[Places], np.ndarray]:
        check_lengths("routes", samples)
        rows = _joined(samples)
        return lambda places: signed(rows[places.reads])

    def on_device(self, value: np.ndarray, part: RankPart) -> tuple[Any, Any]:
        """Return the experts to replay, and where there is a token, [B, L] bool."""
        return part.to(part.cut(value, -1)), part.to(part.cut(filled_places(part.rows), 0))

    def arrays(self, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
        return {"routes": _joined(samples)[:-1]}

    def of_arrays(self, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return np.split(arrays["routes"], arrays["length"].cumsum()[:-1])

    def bytes_of_token(self, shape: ModelShape) -> int:
        return shape.routed_layers * shape.experts_per_token * np.dtype(id_type(shape.experts)).itemsize

    def logged(self, rollout: Rollout) -> list[int]:
        """Return for how many tokens of each turn the engine recorded experts: for all that it read but the cached
        ones."""
        return [
            len(turn.completion.extras["routes"].ids) for turn in rollout.turns if "routes" in turn.completion.extras
        ]


def rows_of(branch: Branch) -> np.ndarray | None:
    """Return a branch's experts, [N, layers, K], unknown for the last token. None if none were recorded. A token has
    the experts of the turn that sampled it, or that first read it.

    Raise ValueError if a turn does not have a row for each token that its engine read."""
    if not any(turn.completion.extras.get("routes") for turn in branch.turns):
        return None
    parts, length = list[np.ndarray](), 0
    for turn in branch.turns:
        before, length = length, length + len(turn.context) + len(turn.completion.tokens)
        routes: Routes | None = turn.completion.extras.get("routes")
        if routes is None or len(routes) != length - 1:
            found = len(routes) if routes else "none"
            raise ValueError(f"turn {turn.index}: expected the experts of {length - 1} tokens, found {found}")
        parts.append(routes.rows(max(before - 1, 0)))
    return np.concatenate([*parts, unknown_rows(1, parts[0])])


def filled_places(rows: Rows) -> np.ndarray:
    """Return which places read a token of a sample, [B, L] bool. Places of shared prompts may predict no target."""
    filled = np.zeros(rows.tokens.size, bool)
    filled[rows.places[rows.sequences >= 0]] = True
    filled[ranges(rows.segments[:, 2], rows.segments[:, 3])] = True
    return filled.reshape(rows.tokens.shape)


def _joined(samples: Sequence[Sample]) -> np.ndarray:
    rows = joined([(len(s.tokens), s.extras.get("routes")) for s in samples])
    assert rows is not None, "a sample has routes"
    return rows


ROUTES = RoutesColumn()
