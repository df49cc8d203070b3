"""Spawn processes with all of their settings in the launch environment, and kill them."""

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import product

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh, ProcMesh

from titan_rl.actors.meeting import MEETING
from titan_rl.meshes import deaths
from titan_rl.meshes.faults import label
from titan_rl.meshes.hosts import Host, host_of
from titan_rl.meshes.starter import WORKER_ENV, Kind, starter
from titan_rl.wire.errors import DeadlinePassed

COLD = [sys.executable, "-m", "monarch._src.actor.bootstrap_main"]  # as Monarch's own default_bootstrap_cmd

RELEASE_SECONDS = 30.0
HOST_SECONDS = 0.2  # for a worker on this machine to end after its ranks; until then its host seems to have room


async def spawn(
    host: HostMesh | Host,
    *,
    name: str,
    shape: Mapping[str, int],
    first: int = 0,
    kind: Kind | None = None,
    env: Mapping[str, str] | None = None,
    members: Sequence[Mapping[str, str]] | None = None,
) -> ProcMesh:
    """Spawn one process per point of `shape`, started in the way of its `kind` (starter.py). Their names count the
    first axis from `first`: a mesh may have processes on several hosts. `members`, by point, adds what
    torch.distributed needs to make them one process group (see process_group)."""
    host = host_of(host)
    launcher, started_by = await starter().launcher(kind, host.facts and host.facts.fork_servers)
    points = [dict(zip(shape, point, strict=True)) for point in product(*(range(size) for size in shape.values()))]
    names = [label(name, {**point, (axis := next(iter(shape))): point[axis] + first}) for point in points]
    expected = deaths.follow(names, host.facts.report if host.facts else "", host.name)
    if host.lost():
        deaths.host_lost(host.name, f"{deaths.GONE}: its host {host.name} was lost before")

    def command(point: Mapping[str, int]) -> BootstrapCommand:
        at = points.index({axis: point[axis] for axis in shape})
        variables = {**expected[names[at]], "TITAN_RL_CONTROLLER": str(host.parent or os.getpid())}
        variables = {**WORKER_ENV, **(env or {}), **(members[at] if members else {}), **variables, **started_by}
        return BootstrapCommand(sys.executable, None, ["-I", "-S", launcher, *COLD], variables)

    def begin() -> None:  # in the new process, before any actor
        import ctypes
        import os
        import signal
        from contextlib import suppress
        from pathlib import Path

        from titan_rl.wire.program import outlive_readers

        os.setpgid(0, 0)  # Ctrl-C in the terminal reaches the controller only, which then stops the others
        libc = ctypes.CDLL(None)  # signal.signal() is for main threads
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # so do signals to every process of a job
            libc.signal(number, int(signal.SIG_IGN))
        outlive_readers()
        with suppress(OSError):  # /proc is read-only: ps and top show "python"
            Path("/proc/self/comm").write_text(os.environ["TITAN_RL_PROC"])  # the kernel keeps 15 bytes

    return host.mesh.spawn_procs(per_host=dict(shape), name=name, bootstrap=begin, bootstrap_command=command)


def process_group(*shares: int) -> list[dict[str, str]]:
    """Return torchrun's variables for the ranks of a group, except their meeting place. `shares`: ranks on each
    host."""
    local = [(n, size) for size in shares for n in range(size)]
    return [
        {"RANK": f"{rank}", "LOCAL_RANK": f"{n}", "WORLD_SIZE": f"{sum(shares)}", "LOCAL_WORLD_SIZE": f"{size}"}
        for rank, (n, size) in enumerate(local)
    ]


def meeting_file(host: Host) -> dict[str, str]:
    """Return where the ranks of a group meet if all are on the machine of `host`: in a file, not at a port."""
    folder = host.facts.private if host.facts else tempfile.gettempdir()
    return {MEETING: f"{folder}/ranks-{secrets.token_hex(8)}"}


_endings: set[asyncio.Task[None]] = set()


async def end(names: Collection[str], *meshes: ProcMesh, host: Host | None = None) -> None:
    """Kill these processes, in any state. Monarch releases dead ones in the background, which takes seconds. If their
    `host` is lost, that waits until they have ended there: Monarch fails an actor that answers one which it has stopped
    in a living process, and a trainer's answers to a reader that is cut off arrive once the link is whole."""
    if alive := await deaths.kill(names):
        raise DeadlinePassed(f"{', '.join(alive)} did not end within {deaths.kill_seconds:g} s of SIGKILL")
    if any(deaths.ended(name) == deaths.GONE for name in names):
        await asyncio.sleep(HOST_SECONDS)

    async def release(procs: ProcMesh) -> None:
        if host is not None and host.lost():
            await host.silenced()
        with suppress(Exception):  # they are dead already; only Monarch's bookkeeping is lost
            await asyncio.wait_for(procs.stop().as_asyncio(), RELEASE_SECONDS)

    for procs in meshes:
        task = asyncio.create_task(release(procs))
        _endings.add(task)
        task.add_done_callback(_endings.discard)
