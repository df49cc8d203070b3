"""The order in which prompts of several sources are drawn, by torchdata's nodes, in a separate process: torchdata
imports torch, which the controller never does.

    RowOrder of each source -> MultiNodeWeightedSampler -> chunks, each with the state of the nodes at its beginning

For each line that it reads, {"state": ...} or {}, the process writes the next chunk. It ends with its connection.
"""

import base64
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchdata.nodes import BaseNode, MultiNodeWeightedSampler, StopCriteria

from titan_rl.wire.seeds import derive, shuffled

CHUNK = 1000  # the number of draws that MultiNodeWeightedSampler makes at once
TENSOR = "tensor/uint8"  # no source can have this name


class RowOrder(BaseNode[int]):
    """The rows of one source without end, each epoch in a new order. Rows are counted over all sources."""

    def __init__(self, first: int, size: int, seed: int) -> None:
        super().__init__()
        self._first, self._size, self._seed = first, size, seed
        self._place = 0
        self._epoch, self._order = -1, shuffled(0, 0)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._place = initial_state["place"] if initial_state else 0

    def next(self) -> int:
        epoch, place = divmod(self._place, self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(self._size, self._seed, epoch)
        self._place += 1
        return self._first + int(self._order[place])

    def get_state(self) -> dict[str, Any]:
        return {"place": self._place}


def mixture(sources: Sequence[tuple[str, int, float]], seed: int) -> MultiNodeWeightedSampler[int]:
    """Return the draws from sources of this many rows, with these weights."""
    first, nodes = 0, dict[str, BaseNode[int]]()
    for name, size, _ in sources:
        nodes[name] = RowOrder(first, size, derive(seed, "source", name))
        first += size
    weights = {name: float(weight) for name, _, weight in sources}
    criteria = StopCriteria.CYCLE_FOREVER
    return MultiNodeWeightedSampler(
        nodes, weights, criteria, rank=0, world_size=1, seed=derive(seed, "mixture") % 2**31
    )


def serve(descriptor: int, sources: Sequence[tuple[str, int, float]], seed: int) -> None:
    node = mixture(sources, seed)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            if "state" in (request := json.loads(line)):
                node = mixture(sources, seed)  # one that has been used would begin its next epoch
                node.reset(decoded(request["state"]) if request["state"] else None)
            state = encoded(node.state_dict())
            lines.write(json.dumps({"state": state, "rows": [next(node) for _ in range(CHUNK)]}) + "\n")
            lines.flush()


def encoded(state: Any) -> Any:
    """Return the state of nodes as JSON has it: a tensor of bytes becomes text."""
    if isinstance(state, Mapping):
        return {key: encoded(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        return {TENSOR: base64.b64encode(bytes(state.tolist())).decode()}
    return state


def decoded(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if TENSOR in state:
        return torch.tensor(list(base64.b64decode(state[TENSOR])), dtype=torch.uint8)
    return {key: decoded(value) for key, value in state.items()}
