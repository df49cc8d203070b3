"""Spawn processes with all of their settings in the launch environment, and kill them."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import product

from monarch.actor import HostMesh, ProcMesh, default_bootstrap_cmd

from titan_rl.meshes import deaths
from titan_rl.meshes.faults import label
from titan_rl.wire.errors import DeadlinePassed

WORKER_ENV = {
    "OMP_NUM_THREADS": "1",  # processes share the cores; two OpenMP teams that spin on them are extremely slow
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a run never downloads
    "PYTHONUNBUFFERED": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

KILL_SECONDS = 10.0  # a process in an uninterruptible wait does not end sooner
LET_GO_SECONDS = 30.0


def spawn(
    host: HostMesh,
    *,
    name: str,
    shape: Mapping[str, int],
    env: Mapping[str, str] | None = None,
    env_of: Callable[[dict[str, int]], Mapping[str, str]] | None = None,
) -> ProcMesh:
    """Spawn one process per point of `shape`. `env_of` adds what differs by point (a GPU, for example)."""

    def command(point: Mapping[str, int]):  # noqa: ANN202 (Monarch's own type)
        at = {axis: point[axis] for axis in shape}
        own = {deaths.PROC_NAME: label(name, at)}  # `ps e` shows it
        return default_bootstrap_cmd().with_env({**WORKER_ENV, **(env or {}), **(env_of(at) if env_of else {}), **own})

    def begin() -> None:  # in the new process, before any actor
        import os

        os.setpgid(0, 0)  # Ctrl-C in the terminal reaches the controller only, which then stops the others

    points = product(*(range(size) for size in shape.values()))
    deaths.follow([label(name, dict(zip(shape, point, strict=True))) for point in points])
    return host.spawn_procs(per_host=dict(shape), name=name, bootstrap=begin, bootstrap_command=command)


_endings: set[asyncio.Task[None]] = set()


async def end(names: Collection[str], procs: ProcMesh) -> None:
    """Kill these processes, whatever their state. Monarch releases dead ones in the background, which takes seconds."""
    if left := await deaths.kill(names, KILL_SECONDS):
        raise DeadlinePassed(f"{', '.join(left)} did not end within {KILL_SECONDS:g} s of SIGKILL")

    async def let_go() -> None:
        with suppress(Exception):  # they are dead already; only Monarch's bookkeeping is lost
            await asyncio.wait_for(procs.stop().as_asyncio(), LET_GO_SECONDS)

    task = asyncio.create_task(let_go())
    _endings.add(task)
    task.add_done_callback(_endings.discard)
