"""Which host, and which slot of it, each rank gets. A slot is a GPU where there are GPUs. Pure: no host is needed.

Trainer, generators and other roles are placed in this order. Each unit of them has one host: a dp row of a model, a
replica of the generators. A mesh fills the hosts in order, so neighbouring ranks share a host.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
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
    index: int = 0  # number of a replica


def units_of(config: Config) -> list[Units]:
    """Return the units of all meshes in the order in which slots are dealt."""
    g, trainer = config.generator, config.parallelism
    units = [Units("trainer", "trainer", trainer.dp, trainer.row_ranks)]
    if config.samples_rollouts:
        units += [_replica(config, index) for index in range(g.replicas)]
    for role, own in config.roles.items():
        units.append(Units(role, role, own.parallelism.dp, own.parallelism.row_ranks))
    return units


def _replica(config: Config, index: int) -> Units:
    return Units(f"generator{index}", "generator", 1, config.generator.tensor_parallel_degree, index)


def slots_per_host(config: Config, gpus: int) -> int:
    """Return how many ranks a host takes: hosts.slots, or the GPUs of a host; on a CPU as few as fit. The last GPUs
    belong to the models that play seats."""
    hosts, seated = config.hosts, len(config.environment.folders)
    if hosts.slots:
        return hosts.slots - seated
    if gpus and hosts.device != "cpu":
        return gpus // hosts.number if hosts.kind == "processes" else gpus - seated
    if hosts.number == 1 or config.placement.hosts:
        return CPU_SLOTS
    units = units_of(config)
    total = sum(each.count * each.ranks for each in units)
    return max(-(-total // hosts.number), *(each.ranks for each in units))


def place(config: Config, slots: int, replicas: int = 0) -> dict[str, list[Share]]:
    """Place every mesh on hosts of `slots` slots each, or raise Unplaceable. Colocated generators have the slots that
    the trainer has. If there are more `replicas` than generator.replicas, they come last and share with no mesh."""
    used, shared = [0] * config.hosts.number, [0] * config.hosts.number
    placed = dict[str, list[Share]]()
    for units in units_of(config):
        if units.role == "generator" and config.placement.kind == "colocated":
            placed[units.mesh] = list(_dealt(config, units, shared, slots))
            used[:] = map(max, used, shared)
        else:
            placed[units.mesh] = list(_dealt(config, units, used, slots))
    for index in range(config.generator.replicas, replicas):
        placed[f"generator{index}"] = list(_dealt(config, _replica(config, index), used, slots))
    return placed


def _dealt(config: Config, units: Units, used: list[int], slots: int) -> Iterator[Share]:
    named = str(config.placement.hosts.get(units.role, ""))
    hosts, most, unplaced = range(config.hosts.number), FULL, units.count
    if named:
        hosts = numbers(named)
        most = -(-units.count // len(hosts))
        first = units.index % len(hosts)
        hosts = hosts[first : first + units.count]
    for host in hosts:
        units_here = min(unplaced, most, (slots - used[host]) // units.ranks)
        if units_here > 0:
            first, ranks = used[host], units_here * units.ranks
            used[host] += ranks
            unplaced -= units_here
            yield Share(host, tuple(range(first, first + ranks)))
    if unplaced:
        where = f"host {named} (placement.hosts)" if named else f"{config.hosts.number} hosts"
        whose, last = units.mesh, config.generator.replicas - 1
        if units.role == "generator" and not named and last > units.index:  # the later ones do not fit either
            unplaced, whose = last - units.index + 1, f"{units.mesh} to generator{last}"
        raise Unplaceable(
            f"hosts.slots: expected room for {unplaced * units.ranks} more ranks of {whose}, {units.ranks} of them on "
            f"one host, found {where} of {slots} slots; raise hosts.slots or the number of hosts, or lower the "
            "parallel degrees"
        )


def numbers(text: str) -> list[int]:
    """Return the host numbers of "0-2,5"."""
    hosts = list[int]()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        hosts += range(int(first), int(last) + 1) if dash else [int(first)]
    return hosts


def environment_host(config: Config, number: int) -> int:
    """Return the host of an environment process, which needs no slot."""
    return number % config.hosts.number


def place_again(config: Config, mesh: str, placement: Placement, slots: int, lost: Collection[int]) -> list[Share]:
    """Place a mesh again, on slots that no other mesh has, of hosts that are not lost; or raise Unplaceable. If there
    is no room for all rows of the trainer, it gets fewer, but at least fault.min_trainers. Colocated trainers and
    generators share slots, which are dealt first."""
    others = {name: slots_of(shares) for name, shares in placement.items() if name != mesh}
    partners = {name for name in others if takes_turns(config, mesh, name)}
    taken = set[tuple[int, int]]().union(*(others[name] for name in others.keys() - partners))
    shared = set[tuple[int, int]]().union(*(others[name] for name in partners))
    row = ranks = config.generator.tensor_parallel_degree
    if not mesh.startswith("generator"):
        own = config.parallelism if mesh == "trainer" else config.roles[mesh].parallelism
        row, ranks = own.row_ranks, own.world_size
    least = config.fault.min_trainers * row if mesh == "trainer" and config.fault.min_trainers else ranks
    free = {
        host: [slot for slot in range(slots) if (host, slot) not in taken]
        for host in range(config.hosts.number)
        if host not in lost
    }
    if mesh.startswith("generator"):  # stable: without a partner the hosts stay in order
        free = dict(sorted(free.items(), key=lambda each: sum((each[0], s) in shared for s in each[1]) < ranks))
    unplaced, shares = ranks, list[Share]()
    for host, own in free.items():
        if taking := min(unplaced, len(own) // row * row):
            own.sort(key=lambda slot, host=host: (host, slot) not in shared)
            shares.append(Share(host, tuple(sorted(own[:taking]))))
            unplaced -= taking
    if (missing := unplaced - (ranks - least)) > 0:
        raise Unplaceable(f"hosts.slots: expected {missing} more free slots on the other hosts, of {slots} each")
    return shares


def slots_of(shares: Sequence[Share]) -> set[tuple[int, int]]:
    """Return the host and slot of each rank."""
    return {(share.host, slot) for share in shares for slot in share.slots}


def takes_turns(config: Config, mesh: str, other: str) -> bool:
    """Return True if these two meshes take turns on the same slots."""
    pair = {name.rstrip("0123456789") for name in (mesh, other)}
    return config.placement.kind == "colocated" and pair == {"trainer", "generator"}


def most_replicas(config: Config, slots: int) -> int:
    """Return how many replicas there can be next to all other meshes."""
    fits = config.generator.replicas
    if config.placement.kind == "colocated":
        return fits  # they share the trainers' devices, one each
    too_many = MOST_RANKS + 1
    while too_many - fits > 1:
        replicas = (fits + too_many) // 2
        try:
            place(config, slots, replicas)
            fits = replicas
        except Unplaceable:
            too_many = replicas
    return fits


def gpus_needed(config: Config) -> int:
    """Return how many GPUs the run takes: one for each process, which colocated trainers and generators share."""
    g, trainers = config.generator, config.parallelism.world_size
    generators = g.replicas * g.tensor_parallel_degree if config.samples_rollouts else 0
    shared = min(trainers, generators) if config.placement.kind == "colocated" else 0
    seated = len(config.environment.folders) if config.samples_rollouts else 0
    return trainers + generators - shared + seated + sum(r.parallelism.world_size for r in config.roles.values())


def gpus_of_hosts(config: Config, gpus: int) -> int:
    """Return the GPUs of all hosts, from the number on one host; `processes` share the GPUs of this machine."""
    return gpus if config.hosts.kind == "processes" else gpus * config.hosts.number
