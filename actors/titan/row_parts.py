"""The places of packed rows that a rank computes: all of them, or a part, if ranks share rows.

The optional part context_parallel cuts rows. Each rank of a group gets whole rows and computes a part of each; the
losses see the log-probs of whole rows.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from titan_rl.actors.titan.document_masks import Attended
from titan_rl.config.sections import ParallelismSection
from titan_rl.wire.parts import needed_part
from titan_rl.wire.types import Rows


class PartOfRows(NamedTuple):
    tokens: np.ndarray  # [B, P]
    positions: np.ndarray  # [B, P]
    own: np.ndarray | None  # [B, T] bool: the targets that this part predicts; None: all
    places: np.ndarray  # [B, T]: where, in the part's flattened rows; 0 if not own
    attended: Attended
    cut: Callable[[np.ndarray, int], np.ndarray]  # [B, L, ...] and its padding -> [B, P, ...]


class RowParts(Protocol):
    """Cuts rows over the ranks of a group, and joins the results of all parts."""

    @property
    def count(self) -> int:
        """Return the number of parts."""
        ...

    def cut(self, rows: Rows) -> PartOfRows:
        """Return this rank's part."""
        ...

    def of_whole_rows(self, k_BPNH: torch.Tensor, v_BPNH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values of all parts."""
        ...

    def of_all_parts(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Add up what parts have of the same targets, each 0 where a target is not its own."""
        ...


def row_parts(p: ParallelismSection, device_type: str) -> RowParts | None:
    """Return this rank's part of rows; None if it computes whole rows. Every rank of the mesh calls this."""
    if p.context_parallel_degree == 1:
        return None
    return needed_part("context parallelism", "parallelism.context_parallel_degree").of(p, device_type)


def whole_rows(rows: Rows) -> PartOfRows:
    whole = Attended.whole(rows.segments)
    return PartOfRows(rows.tokens, rows.positions, None, rows.places, whole, lambda x_BL, padding: x_BL)
