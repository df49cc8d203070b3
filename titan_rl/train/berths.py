"""Where each mesh of a run goes, and what its processes are launched with there."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from titan_rl.actors.endpoint import without_lines
from titan_rl.config.auto import threads
from titan_rl.config.sections import Config
from titan_rl.meshes import deaths, hosts
from titan_rl.meshes.hosts import Berth, Host
from titan_rl.meshes.zygotes import Kind
from titan_rl.preflight.placement import Share, environment_host, place, slots_per_host
from titan_rl.preflight.setup import Setup
from titan_rl.wire.cores import usable_cores
from titan_rl.wire.gpus import PLANNED, visible_devices


class Berths:
    """The berths of a run on `joined` hosts."""

    def __init__(self, setup: Setup, joined: Sequence[Host]) -> None:
        self._setup, self._hosts = setup, joined
        self._slots = slots_per_host(setup.config, len(visible_devices()) if setup.device == "cuda" else 0)
        self._placement = place(setup.config, self._slots)

    def of_model(self, role: str) -> list[Berth]:
        return [self._berth(share, "model") for share in self._placement[role]]

    def of_replica(self, index: int) -> Berth:
        """Return where a replica goes. One that is added during a run goes where slots are left."""
        name = f"generator{index}"
        if name not in self._placement:
            self._placement |= {name: place(self._setup.config, self._slots, index + 1)[name]}
        (share,) = self._placement[name]
        return self._berth(share, "generator")

    def of_environment(self, number: int) -> Host:
        return self._hosts[environment_host(self._setup.config, number)]

    def _berth(self, share: Share, kind: Kind) -> Berth:
        return Berth(self._hosts[share.host], len(share.slots), resources(self._setup, kind, self._devices(share)))

    def _devices(self, share: Share) -> list[str]:
        """Return the GPUs of a share, in rank order. The hosts of `processes` divide those of this machine."""
        if self._setup.device != "cuda":
            return []
        first = share.host * self._slots if self._setup.config.hosts.kind == "processes" else 0
        visible = visible_devices()
        return [visible[first + slot] for slot in share.slots]


def resources(setup: Setup, kind: Kind, devices: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of processes on a host: the GPUs they see, in rank order (none on CPU), and threads. Only
    GPUs that this process was given are dealt: the others may be another user's."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "OMP_NUM_THREADS": str(threads(setup.config, kind, setup.device, usable_cores())),
        PLANNED: setup.device,
        **(cuda_environment(setup.config) if setup.device == "cuda" else {}),
    }


def cuda_environment(config: Config) -> dict[str, str]:
    """Return what CUDA's libraries read once, before a rank could set it."""
    found = {}
    if config.generator.dtype == "float32":
        found["TRITON_F32_DEFAULT"] = "ieee"  # vLLM's float32 attention would multiply in TF32, which has three digits
    if config.debug.deterministic:
        found["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return found


@asynccontextmanager
async def joined_hosts(setup: Setup) -> AsyncIterator[Sequence[Host]]:
    """Yield the hosts of a run. Ranks that are left at the end are killed, and workers that were started here."""
    keys = setup.config.hosts
    with without_lines(b"Monarch internal logs are being written"):
        local = hosts.local_hosts()
    if keys.kind == "local":
        yield local
        return
    sockets, logs = Path(os.environ["TMPDIR"]), setup.folder / "hosts"
    async with hosts.worker_processes(keys.number, sockets, logs, keys.join_seconds) as joined:
        try:
            yield joined
        finally:
            await deaths.kill(deaths.alive())
