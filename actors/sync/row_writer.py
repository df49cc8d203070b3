"""How a landing writes weights that are changed on their way into the parameters, as rows in 8 bits are."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from titan_rl.wire.weight_plan import Copy


class RowWriter(Protocol):
    """Writes groups of whole rows, each of which needs bytes of several runs. Groups have a `place`, for errors."""

    quantization: Literal["fp8", "int8"]
    planned: Mapping[str, Tensor]  # the live parameters, with the rows and columns of the weight plan

    def stored(self, param: str) -> torch.dtype | None:
        """Return the dtype of a parameter. None: it has the fetched one."""
        ...

    def connect(self, copies: Sequence[Iterable[Copy]], runs: Sequence[Sequence[Tensor]]) -> None:
        """Prepare to write. `copies`: by run. `runs`: their elements, by run and slot."""

    def of(self, copies: Iterable[Copy]) -> Sequence[Any]:
        """Return the groups that these copies fill, wholly or in part."""
        ...

    def write(self, groups: Iterable[Any], slots: Sequence[int]) -> None:
        """Write groups from these slots of the runs. A GPU may not have read them yet when this returns."""

    def different(self, slots: Sequence[int]) -> Sequence[Any]:
        """Return the groups that `write` would change."""
        ...
