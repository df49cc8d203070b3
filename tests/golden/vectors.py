"""Random inputs and file format of the golden vectors."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
LENGTHS = (8, 5, 7, 3, 6, 8, 4, 2)  # answers: two prompts with four each
HOLES = ((0, 2), (0, 3), (2, 3), (4, 0), (5, 4), (5, 5), (6, 1))  # tokens written by a tool: (sequence, place)
EMPTY = 3  # the sequence without a trained token, with `empty`


def answers(seed: int, *, empty: bool, spread: float = 0.3) -> dict[str, torch.Tensor]:
    """Draw log-probs etc. of ragged answers, [N, L], 0 after an answer's end; `spread` moves the policies apart."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        drawn = scale * torch.randn(len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64)
        return (drawn * 1e4).round() / 1e4

    inside = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask = inside.long()
    for sequence, place in HOLES:
        mask[sequence, place] = 0
    if empty:
        mask[EMPTY] = 0

    def logprob(moved: torch.Tensor) -> torch.Tensor:
        return (old + moved).clamp(max=-0.01)

    old = -normal(1.0).abs() - 0.3
    drawn = {
        "logprob": logprob(normal(spread)),
        "old": old,
        "behaviour": logprob(normal(spread)),
        "reference": logprob(normal(1.5 * spread)),
        "entropy": normal(0.5).abs(),
        "advantage": normal(1.0),
        "reward": normal(1.0),
        "value": normal(1.0),
        "old_value": normal(1.0),
        "return": normal(1.0),
    }
    rounded = {name: (values * 1e4).round() / 1e4 * inside for name, values in drawn.items()}
    return {"mask": mask, "length": torch.tensor(LENGTHS), **rounded}


def rewards(seed: int, count: int = len(LENGTHS)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8, (count,), generator=generator).double() / 4


def case(
    name: str,
    function: str,
    *,
    settings: dict[str, Any],
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    leaves: dict[str, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Return a case as JSON. `leaves` are the inputs that hold a gradient."""

    def plain(tensors: dict[str, Any]) -> dict[str, Any]:
        return {key: values.detach().tolist() for key, values in tensors.items()}

    return {
        "name": name,
        "function": function,
        "settings": settings,
        "inputs": plain(inputs),
        "outputs": plain(outputs),
        "gradients": plain({key: leaf.grad for key, leaf in (leaves or {}).items()}),
    }


def write(file: str, *, peer: str, version: str, made_by: str, cases: Iterable[dict[str, Any]]) -> None:
    """Write one case per line, so that a change of one case changes one line."""
    head = {"peer": peer, "version": version, "made_by": made_by, "torch": torch.__version__}
    start = json.dumps(head)[:-1]
    lines = ",\n".join(json.dumps(case, allow_nan=False) for case in cases)
    (HERE / file).write_text(f'{start}, "cases": [\n{lines}\n]}}\n')
