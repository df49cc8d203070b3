"""Spawning processes: every setting that a process must be born with is in its launch environment."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import product

from monarch.actor import HostMesh, ProcMesh, default_bootstrap_cmd

from titan_rl.meshes import deaths
from titan_rl.meshes.faults import label
from titan_rl.wire.errors import DeadlinePassed

WORKER_ENV = {
    "OMP_NUM_THREADS": "1",  # processes share the cores; two OpenMP teams spinning on them is a collapse
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a run never downloads
    "PYTHONUNBUFFERED": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

KILL_SECONDS = 10.0  # a process in an uninterruptible wait does not end
LET_GO_SECONDS = 30.0


def spawn(
    host: HostMesh,
    *,
    name: str,
    shape: Mapping[str, int],
    env: Mapping[str, str] | None = None,
    env_of: Callable[[dict[str, int]], Mapping[str, str]] | None = None,
) -> ProcMesh:
    """One process per point of `shape`. `env_of` adds what differs by point (a GPU, say)."""

    def command(point: Mapping[str, int]):  # noqa: ANN202 (Monarch's own type)
        at = {axis: point[axis] for axis in shape}
        who = {deaths.PROC_NAME: label(name, at)}  # `ps e` tells which process is which
        return default_bootstrap_cmd().with_env({**WORKER_ENV, **(env or {}), **(env_of(at) if env_of else {}), **who})

    def begin() -> None:  # in the new process, before any actor
        import os

        os.setpgid(0, 0)  # Ctrl-C in the terminal reaches the controller alone, which stops the others

    points = product(*(range(size) for size in shape.values()))
    deaths.follow([label(name, dict(zip(shape, point, strict=True))) for point in points])
    return host.spawn_procs(per_host=dict(shape), name=name, bootstrap=begin, bootstrap_command=command)


_endings: set[asyncio.Task[None]] = set()


async def end(names: Collection[str], procs: ProcMesh) -> None:
    """Kill these processes, whatever they are at. Monarch takes seconds to let go of dead ones, and does so later."""
    if left := await deaths.kill(names, KILL_SECONDS):
        raise DeadlinePassed(f"{', '.join(left)} did not end within {KILL_SECONDS:g} s of SIGKILL")

    async def let_go() -> None:
        with suppress(Exception):  # they are dead: all that is lost is Monarch's account of them
            await asyncio.wait_for(procs.stop().as_asyncio(), LET_GO_SECONDS)

    task = asyncio.create_task(let_go())
    _endings.add(task)
    task.add_done_callback(_endings.discard)
