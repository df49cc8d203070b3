"""Which host, and which slot of it, each rank gets. A slot is a GPU where there are GPUs. Pure: no host is needed.

Trainer, generators and other roles are placed in this order. Each unit of them has one host: a dp row of a model, a
replica of the generators. A mesh fills the hosts in order, so neighbouring ranks share a host.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from titan_rl.config.choices import MOST_RANKS
from titan_rl.config.sections import Config

CPU_SLOTS = 16
FULL = 10**9


@dataclass(frozen=True, slots=True)
class Share:
    """Consecutive ranks of a mesh that are on one host."""

    host: int
    slots: tuple[int, ...]  # by rank


Placement = Mapping[str, Sequence[Share]]
"""By mesh ("trainer", "generator0", "critic"): its shares, in rank order."""


class Unplaceable(ValueError):
    """The hosts have no room: str() names the key to change."""


@dataclass(frozen=True, slots=True)
class Units:
    """What is placed under one name: `count` times `ranks` ranks that must share a host."""

    mesh: str
    role: str  # its name in placement.hosts
    count: int
    ranks: int
    index: int = 0  # of a replica


def units_of(config: Config) -> list[Units]:
    """Return the units of all meshes in the order in which slots are dealt."""
    g, trainer = config.generator, config.parallelism
    found = [Units("trainer", "trainer", trainer.dp, trainer.tensor_parallel_degree)]
    if config.samples_rollouts:
        found += [_replica(config, index) for index in range(g.replicas)]
    for role, own in config.roles.items():
        found.append(Units(role, role, own.parallelism.dp, own.parallelism.tensor_parallel_degree))
    return found


def _replica(config: Config, index: int) -> Units:
    return Units(f"generator{index}", "generator", 1, config.generator.tensor_parallel_degree, index)


def slots_per_host(config: Config, gpus: int) -> int:
    """Return how many ranks a host takes: hosts.slots, or the GPUs of a host, or what is left to choose on a CPU."""
    hosts = config.hosts
    if hosts.slots:
        return hosts.slots
    if gpus and hosts.device != "cpu":
        return gpus // hosts.number if hosts.kind == "processes" else gpus
    if hosts.number == 1 or config.placement.hosts:
        return CPU_SLOTS
    units = units_of(config)
    total = sum(each.count * each.ranks for each in units)
    return max(-(-total // hosts.number), *(each.ranks for each in units))


def place(config: Config, slots: int, replicas: int = 0) -> dict[str, list[Share]]:
    """Place every mesh on hosts of `slots` slots each, or raise Unplaceable. Colocated generators have the slots that
    the trainer has. If there are more `replicas` than generator.replicas, they come last and share with no mesh."""
    used, shared = [0] * config.hosts.number, [0] * config.hosts.number
    found = dict[str, list[Share]]()
    for units in units_of(config):
        if units.role == "generator" and config.placement.kind == "colocated":
            found[units.mesh] = list(_dealt(config, units, shared, slots))
            used[:] = map(max, used, shared)
        else:
            found[units.mesh] = list(_dealt(config, units, used, slots))
    for index in range(config.generator.replicas, replicas):
        found[f"generator{index}"] = list(_dealt(config, _replica(config, index), used, slots))
    return found


def _dealt(config: Config, units: Units, used: list[int], slots: int) -> Iterator[Share]:
    given = str(config.placement.hosts.get(units.role, ""))
    hosts, most, left = range(config.hosts.number), FULL, units.count
    if given:
        hosts = numbers(given)
        most = -(-units.count // len(hosts))
        first = units.index % len(hosts)
        hosts = hosts[first : first + units.count]
    for host in hosts:
        taken = min(left, most, (slots - used[host]) // units.ranks)
        if taken > 0:
            first, ranks = used[host], taken * units.ranks
            used[host] += ranks
            left -= taken
            yield Share(host, tuple(range(first, first + ranks)))
    if left:
        where = f"host {given} (placement.hosts)" if given else f"{config.hosts.number} hosts"
        raise Unplaceable(
            f"hosts.slots: expected room for {left * units.ranks} more ranks of {units.mesh}, {units.ranks} of them on "
            f"one host, found {where} of {slots} slots; raise hosts.slots or the number of hosts, or lower the "
            "parallel degrees"
        )


def numbers(text: str) -> list[int]:
    """Return the host numbers of "0-2,5"."""
    found = list[int]()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        found += range(int(first), int(last) + 1) if dash else [int(first)]
    return found


def environment_host(config: Config, number: int) -> int:
    """Return the host of an environment process, which needs no slot."""
    return number % config.hosts.number


def place_again(config: Config, mesh: str, placement: Placement, slots: int, lost: Collection[int]) -> list[Share]:
    """Place a mesh again, on slots that no other mesh has, of hosts that are not lost; or raise Unplaceable."""
    if config.placement.kind == "colocated":
        raise Unplaceable('placement.kind: "colocated" meshes cannot be moved to other hosts')
    taken = {
        (share.host, slot)
        for name, found in placement.items()
        if name != mesh
        for share in found
        for slot in share.slots
    }
    tp = sum(len(share.slots) for share in placement[mesh])
    if not mesh.startswith("generator"):
        own = config.parallelism if mesh == "trainer" else config.roles[mesh].parallelism
        tp = own.tensor_parallel_degree
    left, found = sum(len(share.slots) for share in placement[mesh]), list[Share]()
    for host in range(config.hosts.number):
        free = [slot for slot in range(slots) if (host, slot) not in taken and host not in lost]
        if ranks := min(left, len(free) // tp * tp):
            found.append(Share(host, tuple(free[:ranks])))
            left -= ranks
    if left:
        raise Unplaceable(f"hosts.slots: expected {left} more free slots on the other hosts, of {slots} each")
    return found


def most_replicas(config: Config, slots: int) -> int:
    """Return how many replicas there can be next to all other meshes."""
    most = config.generator.replicas
    if config.placement.kind == "colocated":
        return most  # they share the trainers' devices, one each
    with suppress(Unplaceable):
        while most < MOST_RANKS:
            place(config, slots, most + 1)
            most += 1
    return most


def host_rows(config: Config, slots: int) -> list[tuple[str, str, str]]:
    """Return name, ranks and taken slots of each host."""
    found = place(config, slots)
    ranks: list[list[str]] = [[] for _ in range(config.hosts.number)]
    taken: list[set[int]] = [set() for _ in ranks]
    for mesh, shares in found.items():
        first = 0
        for share in shares:
            last = first + len(share.slots) - 1
            span = f" {first}-{last}" if last > first else f" {first}" if len(shares) > 1 else ""
            ranks[share.host].append(mesh + span)
            taken[share.host] |= set(share.slots)
            first = last + 1
    if config.samples_rollouts and config.rollout_code:
        for number in range(config.environment.processes):
            ranks[environment_host(config, number)].append(f"environment{number}")
    names = config.hosts.addresses or [f"host{number}" for number in range(config.hosts.number)]
    return [
        (name, ", ".join(here) or "nothing", f"{len(own)} of {slots}")
        for name, here, own in zip(names, ranks, taken, strict=True)
    ]
