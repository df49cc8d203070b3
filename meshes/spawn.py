"""Spawn processes with all of their settings in the launch environment, and kill them."""

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh, ProcMesh

from titan_rl.meshes import deaths, zygotes
from titan_rl.meshes.faults import label
from titan_rl.wire.errors import DeadlinePassed

SHIM = str(Path(__file__).with_name("zygote_shim.py"))
COLD = [sys.executable, "-m", "monarch._src.actor.bootstrap_main"]  # as Monarch's own default_bootstrap_cmd

FORK_SECONDS = 15.0  # then a rank starts cold; Monarch gives a process 30 s to answer
KILL_SECONDS = 10.0  # a process in an uninterruptible wait does not end sooner
LET_GO_SECONDS = 30.0


async def spawn(
    host: HostMesh,
    *,
    name: str,
    shape: Mapping[str, int],
    kind: zygotes.Kind | None = None,
    env: Mapping[str, str] | None = None,
    env_of: Callable[[dict[str, int]], Mapping[str, str]] | None = None,
) -> ProcMesh:
    """Spawn one process per point of `shape`, forked from the zygote of its `kind` if there is one. `env_of` adds what
    differs by point (a GPU, for example)."""
    zygote = await zygotes.find(kind) if kind else ""
    points = [dict(zip(shape, point, strict=True)) for point in product(*(range(size) for size in shape.values()))]
    expected = deaths.follow([label(name, point) for point in points])

    def command(point: Mapping[str, int]) -> BootstrapCommand:
        at = {axis: point[axis] for axis in shape}
        own = {**expected[label(name, at)], "TITAN_RL_CONTROLLER": str(os.getpid())}
        if zygote:
            own |= {"TITAN_RL_ZYGOTE": zygote, "TITAN_RL_FORK_SECONDS": str(FORK_SECONDS)}
        own = {**zygotes.WORKER_ENV, **(env or {}), **(env_of(at) if env_of else {}), **own}
        return BootstrapCommand(sys.executable, None, ["-I", "-S", SHIM, *COLD], own)

    def begin() -> None:  # in the new process, before any actor
        import os

        os.setpgid(0, 0)  # Ctrl-C in the terminal reaches the controller only, which then stops the others

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
