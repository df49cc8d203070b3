"""Chooses the host on which each rank starts, and the variables of its process. This machine is the default."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from titan_rl.config.auto import threads
from titan_rl.config.sections import Config
from titan_rl.meshes.hosts import Host, RankPlace, local_host
from titan_rl.meshes.starter import Kind
from titan_rl.preflight.placement import Share, place, slots_per_host
from titan_rl.preflight.plan import Setup
from titan_rl.wire.cores import usable_cores
from titan_rl.wire.errors import RunError
from titan_rl.wire.gpus import PLANNED, visible_devices
from titan_rl.wire.parts import needed_part


class RankPlaces:
    """Assigns each mesh of a run its place on the hosts: on this machine, unless a part has several hosts."""

    def __init__(self, setup: Setup, hosts: Sequence[Host]) -> None:
        self._setup, self.hosts = setup, hosts
        self._slots = slots_per_host(setup.config, len(visible_devices()) if setup.device == "cuda" else 0)
        self._placement = place(setup.config, self._slots)
        self._cores = usable_cores()

    def of_model(self, role: str) -> list[RankPlace]:
        return [self._rank_place(share, "model") for share in self._shares(role)]

    def of_replica(self, index: int, elsewhere: bool = False) -> RankPlace:
        """Return the place of a replica. One that is added during a run gets free slots. One whose last start failed
        goes `elsewhere`, if another host has room."""
        name = f"generator{index}"
        if name not in self._placement:
            self._placement |= {name: place(self._setup.config, self._slots, index + 1)[name]}
        (share,) = self._shares(name)
        return self._rank_place(share, "generator")

    def of_environment(self, number: int) -> Host:
        return self.hosts[0]

    def rows(self, seconds: float = 0) -> int:
        """Return the number of dp rows that the trainer would get now, on its hosts and hosts that joined at least
        `seconds` ago."""
        return self._setup.config.parallelism.dp

    def leave_out(self) -> list[str]:
        """Exclude the hosts that the trainer got last, until they join again. Return their names; none if the trainer
        has lost a host."""
        return []

    def _shares(self, mesh: str) -> Sequence[Share]:
        return self._placement[mesh]

    def _gpus(self, share: Share) -> tuple[Sequence[str], int]:
        """Return the GPUs of a share's host, and which of them is in its slot 0."""
        return visible_devices(), 0

    def _rank_place(self, share: Share, kind: Kind) -> RankPlace:
        environment = resources(self._setup, kind, self._devices(share), self._cores)
        return RankPlace(self.hosts[share.host], len(share.slots), environment)

    def _devices(self, share: Share) -> list[str]:
        """Return the GPUs of a share, in rank order."""
        if self._setup.device != "cuda":
            return []
        gpus, first = self._gpus(share)
        if len(gpus) <= first + max(share.slots):
            name = self.hosts[share.host].name
            raise RunError(f"{name}: expected {first + max(share.slots) + 1} GPUs, found {len(gpus)}")
        return [gpus[first + slot] for slot in share.slots]


def joined_places(
    setup: Setup, say: Callable[[str], None], back: Callable[[], None]
) -> AbstractAsyncContextManager[RankPlaces]:
    """Return the places of a run, on this machine or on hosts that join it. When a lost host joins again, `say` shows
    it and `back` is called."""
    if setup.config.hosts.kind == "local":
        return nullcontext(RankPlaces(setup, [local_host()]))
    return needed_part("several hosts", "hosts.kind")(setup, say, back)


def resources(setup: Setup, kind: Kind, devices: Sequence[str] = (), cores: int = 0) -> dict[str, str]:
    """Return the environment of processes on a host: their GPUs, in rank order (none on CPU), and threads. Only this
    process's visible GPUs are assigned: the others may be another user's."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "OMP_NUM_THREADS": str(threads(setup.config, kind, setup.device, cores or usable_cores())),
        PLANNED: setup.device,
        **(cuda_environment(setup.config) if setup.device == "cuda" else {}),
    }


def cuda_environment(config: Config) -> dict[str, str]:
    """Return the variables that CUDA's libraries read once, before a rank could set them."""
    variables = {}
    if config.generator.dtype == "float32":
        variables["TRITON_F32_DEFAULT"] = "ieee"  # else vLLM's float32 attention uses TF32
    if config.debug.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return variables
