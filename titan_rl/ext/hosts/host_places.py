"""Assigns the meshes of a run to the hosts that it joins."""

import os
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

from monarch.actor import enable_transport

from titan_rl.config.sections import HostsSection
from titan_rl.ext.hosts.checks import own_address
from titan_rl.ext.hosts.remote_host import Joining, attached
from titan_rl.ext.hosts.ssh_workers import ssh_workers
from titan_rl.ext.hosts.worker_address import address_of, split_address
from titan_rl.ext.hosts.worker_processes import worker_processes
from titan_rl.meshes import deaths
from titan_rl.meshes.hosts import Host, RankPlace, local_host
from titan_rl.preflight.placement import Share, Unplaceable, environment_host, place, place_again, slots_of
from titan_rl.preflight.plan import Setup
from titan_rl.train.rank_places import RankPlaces
from titan_rl.wire.errors import RunError
from titan_rl.wire.gpus import visible_devices
from titan_rl.wire.ports import free_port, port_range


class HostPlaces(RankPlaces):
    """Assigns each mesh of a run its place on several hosts. A mesh that has lost a host moves to others."""

    def __init__(self, setup: Setup, hosts: Sequence[Host]) -> None:
        super().__init__(setup, hosts)
        machines = {host.facts.machine: host.facts.cores for host in hosts if host and host.facts}
        self._cores = sum(machines.values()) or self._cores
        self._left_out = defaultdict[str, list[Host]](list)  # by mesh: hosts on which it did not start
        self._before: set[int] = set()  # hosts of the trainer before it was placed last

    def of_replica(self, index: int, elsewhere: bool = False) -> RankPlace:
        """`elsewhere` is a host on which none of its starts failed, if one has room."""
        name = f"generator{index}"
        if elsewhere:
            self._left_out[name] += [self.hosts[share.host] for share in self._placement[name]]
        try:
            return super().of_replica(index)
        except RunError:
            if not self._left_out.pop(name, None):
                raise
            return super().of_replica(index)

    def of_environment(self, number: int) -> Host:
        first = environment_host(self._setup.config, number)
        return next((h for h in (*self.hosts[first:], *self.hosts[:first]) if not h.lost()), self.hosts[first])

    def _shares(self, mesh: str) -> Sequence[Share]:
        """Return a mesh's shares. If one of its hosts is lost, it moves to free slots on the others; it also moves if
        it has fewer rows than in the config, because there may be room again."""
        lost = self._unusable(mesh)
        own_slots = slots_of(self._placement[mesh])
        fewer = mesh == "trainer" and len(own_slots) < self._setup.config.parallelism.world_size
        added = mesh not in place(self._setup.config, self._slots)  # where a mesh may have moved meanwhile
        others = {slot for name, shares in self._placement.items() if name != mesh for slot in slots_of(shares)}
        if fewer or any(host in lost for host, _ in own_slots) or (added and own_slots & others):
            try:
                self._placement[mesh] = place_again(self._setup.config, mesh, self._placement, self._slots, lost)
            except Unplaceable as error:
                names = ", ".join(self.hosts[number].name for number in lost)
                raise RunError(f"{mesh} cannot be started again without {names}: {error}") from None
            if mesh == "trainer":
                self._before = {host for host, _ in own_slots}
        return self._placement[mesh]

    def _unusable(self, mesh: str, seconds: float = 0) -> list[int]:
        """Return the hosts on which a mesh cannot be started, and other hosts that joined within the last `seconds`."""
        own_hosts, since = {share.host for share in self._placement[mesh]}, time.monotonic() - seconds
        left_out = self._left_out[mesh]
        return [
            number
            for number, host in enumerate(self.hosts)
            if host and (host.lost() or host in left_out or (number not in own_hosts and host.joined > since))
        ]

    def rows(self, seconds: float = 0) -> int:
        unusable = self._unusable("trainer", seconds)
        try:
            shares = place_again(self._setup.config, "trainer", self._placement, self._slots, unusable)
        except Unplaceable:  # it has just lost a host
            return 0
        return len(slots_of(shares)) // self._setup.config.parallelism.row_ranks

    def leave_out(self) -> list[str]:
        present = {share.host for share in self._placement["trainer"]}
        if any(self.hosts[number].lost() for number in present):
            return []
        excluded = [self.hosts[number] for number in sorted(present - self._before)]
        self._left_out["trainer"] += excluded
        return [host.name for host in excluded]

    def _gpus(self, share: Share) -> tuple[Sequence[str], int]:
        host, keys = self.hosts[share.host], self._setup.config.hosts
        if host.facts and keys.at_addresses:
            return host.facts.gpus, 0
        return visible_devices(), share.host * self._slots if keys.kind == "processes" else 0  # they divide them


@asynccontextmanager
async def joined_hosts(setup: Setup, say: Callable[[str], None], back: Callable[[], None]) -> AsyncIterator[HostPlaces]:
    """Yield the places of a run on the hosts that it joins. When a lost host joins again, `say` shows it and `back` is
    called. At the end, remaining ranks are killed, and workers that were started here."""
    keys, detect_seconds = setup.config.hosts, setup.config.fault.detect_seconds
    if keys.at_addresses:
        enable_transport(own_place(keys))
    local_host()  # Monarch starts here, with this transport
    logs = setup.folder / "hosts"
    started = ssh_workers(keys, logs, say) if keys.kind == "ssh" else nullcontext()
    if keys.at_addresses:
        run = f"the run in {setup.folder.absolute()} (process {os.getpid()} on {socket.gethostname()})"
        joining = Joining(keys.join_seconds, keys.orphan_seconds, detect_seconds, keys.tls, run)
        joined = attached(keys.addresses, joining, say, back)
    else:
        joined = worker_processes(keys.number, Path(os.environ["TMPDIR"]), logs, keys.join_seconds)
    async with started, joined as run_hosts:
        try:
            yield HostPlaces(setup, run_hosts)
        finally:
            await deaths.kill(deaths.living())


def own_place(keys: HostsSection) -> str:
    """Return the one address at which this process listens for the workers: a free port, of hosts.ports if given."""
    scheme, _, _ = split_address(keys.addresses[0])
    host, ports = own_address(keys), port_range(keys.ports)
    try:
        return address_of(scheme, host, free_port(host, ports) if ports else 0)
    except OSError as error:
        raise RunError(f"hosts.ports: expected a free port at {host}, found: {error.strerror or error}") from None
