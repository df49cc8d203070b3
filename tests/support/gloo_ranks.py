"""Run a function on ranks of a gloo group, in processes without Monarch, and return rank 0's answer."""

import faulthandler
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from titan_rl.actors.imports import use_given_threads
from titan_rl.actors.meeting import MEETING

PRELOAD = ["titan_rl.actors.titan.role_model", "torch._dynamo", "torch._functorch.aot_autograd", "transformers"]
"""What ranks are forked with, because importing it takes longer than most of them live. It starts no thread."""
multiprocessing.set_forkserver_preload(PRELOAD)

LINES = 60  # an error shows this much of the output of a rank that died
Program = Callable[..., Any]  # called with (folder, *arguments); the processes import its module


def on_ranks(size: int, program: Program, *arguments: Any) -> Any:
    """Return what rank 0 returns, as JSON carries it. A rank that fails raises here, with its traceback, and one that
    dies with the end of its output."""
    with tempfile.TemporaryDirectory(prefix="gloo-ranks-") as folder:
        try:
            start_processes(_rank, (size, program, folder, arguments), nprocs=size, start_method="forkserver")
        except ProcessExitedException as died:
            output = Path(folder, f"rank-{died.error_index}").read_text(errors="replace").splitlines()
            raise AssertionError("\n".join([f"rank {died.error_index}: {died}", *output[-LINES:]])) from None
        return json.loads(Path(folder, "answer.json").read_text())


def _rank(rank: int, size: int, program: Program, folder: str, arguments: tuple[Any, ...]) -> None:
    output = os.open(f"{folder}/rank-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(all_threads=False)  # after an abort in native code, its stack is printed
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in launched.items()}, **{MEETING: f"{folder}/meeting"})
    use_given_threads()  # OpenMP has read the variable of the process that forked this one
    answer = program(Path(folder), *arguments)
    if rank == 0:
        Path(folder, "answer.json").write_text(json.dumps(answer))
    _leave()


def _leave() -> None:
    """End together with the other ranks. One that ends first closes gloo's connections while others use them, and
    threads of gloo and autograd that are still there when the interpreter ends can abort the process."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)
