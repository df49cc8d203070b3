"""Run a function on ranks of a gloo group, in processes without Monarch, and return rank 0's answer."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import spawn

from titan_rl.actors.meeting import MEETING

Program = Callable[..., Any]  # of (folder, *arguments): a function of a module, which the processes import


def on_ranks(size: int, program: Program, *arguments: Any) -> Any:
    """Return what rank 0 returns, as JSON carries it. A rank that fails raises here, with its traceback."""
    with tempfile.TemporaryDirectory(prefix="gloo-ranks-") as folder:
        spawn(_rank, (size, program, folder, arguments), nprocs=size)
        return json.loads(Path(folder, "answer.json").read_text())


def _rank(rank: int, size: int, program: Program, folder: str, arguments: tuple[Any, ...]) -> None:
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in launched.items()}, **{MEETING: f"{folder}/meeting"})
    answer = program(Path(folder), *arguments)
    if rank == 0:
        Path(folder, "answer.json").write_text(json.dumps(answer))
