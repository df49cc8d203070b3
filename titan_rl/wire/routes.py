"""Routes: of each token that a model reads, the experts that its layers sent it to, [layers, K].

An id is one byte, or two if there are more than 255 experts. The largest value of its dtype means unknown: a row is
known in all layers, or in none. Where a row is unknown, the router of the trainer chooses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
