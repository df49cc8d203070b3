"""Lists what each rank of a run needs of its GPU, each host of its memory, and a weight sync of the network."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_rl.config.sections import BYTES, Config, ParallelismSection
from titan_rl.preflight.checks.gpu_memory import Need, needs, role_shapes
from titan_rl.preflight.device_memory import cache_bytes_per_token
from titan_rl.preflight.placement import Unplaceable, place, slots_per_host
from titan_rl.preflight.quantities import GIB, count, gib, size
from titan_rl.preflight.setup import Setup
from titan_rl.record.plan_view import PartTable
from titan_rl.wire.model_shape import ModelShape, ShardedModel
from titan_rl.wire.snapshot import KEPT, TENSORS, peer_of, snapshot_bytes
from titan_rl.wire.weight_source import SLOTS

Row = tuple[str, str, str]  # part, size, formula
Cut = Mapping[str, ShardedModel]  # by mesh; empty: TorchTitan was not asked


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Bytes that one host holds besides what its GPUs do, and that a weight sync moves over its link."""

    held: Mapping[str, int]
    received: int
    sent: int

    @property
    def total(self) -> int:
        return sum(self.held.values())


def memory_tables(setup: Setup, sharded: Cut) -> list[PartTable]:
    """Return a table for each mesh, and for hosts and the network; none on a CPU, or on GPUs of unknown size."""
    config, shape, nbytes = setup.resolved, setup.shape, setup.gpus.nbytes
    if setup.device != "cuda" or not nbytes:
        return []
    found = needs(config, shape, nbytes, role_shapes(config, shape), sharded)
    tables = [PartTable(f"{name}, each rank", mesh_rows(need), fullness(need)) for name, need in found.items()]
    if "generator" in found:
        cache = found["generator"].own.kept["KV cache"].nbytes
        tables[list(found).index("generator")].rows.append(concurrency(config, shape, cache))
    loads = host_loads(config, shape, sharded, setup.gpus.count)
    if loads:
        tables += [hosts_table(config, loads), sync_table(config, shape, loads)]
    return tables


def mesh_rows(need: Need) -> list[Row]:
    rows = [(name, f"{gib(part.nbytes)} GiB", part.formula) for name, part in need.own.parts.items()]
    rows += [(name, f"{gib(nbytes)} GiB", "on the same GPU") for name, nbytes in need.others.items()]
    overhead = need.own.overhead
    return [*rows, ("CUDA, fragmentation", f"{gib(overhead.nbytes)} GiB", overhead.formula)]


def fullness(need: Need) -> str:
    return f"{gib(need.nbytes)} of {gib(need.limit)} GiB by estimate"


def concurrency(config: Config, shape: ModelShape, cache: int) -> Row:
    """Return how many sequences of full length the KV cache of a generator holds."""
    g = config.generator
    longest = g.max_model_len or config.training.seq_len
    whole = cache // cache_bytes_per_token(config, shape) // longest
    return "concurrency", str(whole), f"sequences of {longest:,} tokens fit the KV cache; max_num_seqs {g.max_num_seqs}"


def host_loads(config: Config, shape: ModelShape, sharded: Cut, gpus: int) -> list[HostLoad]:
    """Return the load of every host; none if it is not known how the models are cut, or they do not fit the hosts."""
    try:
        placed = place(config, slots_per_host(config, gpus))
    except Unplaceable:
        return []
    if "trainer" not in sharded:
        return []
    hosts = {mesh: [share.host for share in shares for _ in share.slots] for mesh, shares in placed.items()}
    sent, each = sharded["trainer"].sent, BYTES[config.generator.dtype]
    held = [Counter[str]() for _ in range(config.hosts.number)]
    arriving, leaving = [0] * len(held), [0] * len(held)
    own = [0] * len(held)  # bytes that the trainers of a host send
    for host, runs in zip(hosts["trainer"], sent, strict=True):
        own[host] += sum(runs) * each
    homes = {places[0] for mesh, places in hosts.items() if mesh.startswith("generator")}
    for host, nbytes in enumerate(own):
        if nbytes:
            held[host]["staged weights"] += SLOTS * nbytes
            leaving[host] = nbytes * (len(homes) - (host in homes))
    for home in homes:
        arriving[home] = sum(own) - own[home]
        if arriving[home]:
            held[home]["received weights"] += arriving[home]  # once: its replicas share what one of them reads
    for name, p in trained_meshes(config).items():
        if config.fault.snapshot_interval:
            whole = snapshot_bytes(shape.parameters, config.training.dtype, p.data_parallel_replicate_degree)
            for host in hosts[name]:
                held[host]["snapshots"] += whole // p.world_size
            for host in hosts[name] if config.hosts.at_addresses else ():
                if (peer := peer_of(host, [f"machine {number}" for number in range(len(held))])) is not None:
                    held[peer]["peers' snapshots"] += whole // p.world_size
        if config.training.enable_cpu_offload:
            for host in hosts[name]:
                held[host]["offloaded states"] += 4 * sharded[name].held * BYTES[config.training.dtype]
    return [HostLoad(*load) for load in zip(held, arriving, leaving, strict=True)]


def trained_meshes(config: Config) -> dict[str, ParallelismSection]:
    return {"trainer": config.parallelism} | {n: r.parallelism for n, r in config.roles.items() if n == "critic"}


def hosts_table(config: Config, loads: list[HostLoad]) -> PartTable:
    moved = max(load.held.get("peers' snapshots", 0) for load in loads) // KEPT
    rate = min((gbps for gbps in (config.hosts.link_gbps, config.fault.snapshot_gbps) if gbps), default=0.0)
    seconds = f", at least {8 * moved / (rate * 1e9):.2g} s at {rate:g} Gbit/s" if rate else ""
    formulas = {
        "staged weights": f"{SLOTS} slots x what its trainer ranks send, pinned",
        "received weights": "what its generators read from other hosts, once for all replicas",
        "snapshots": f"{KEPT} x {TENSORS} x {BYTES[config.training.dtype]} per parameter, over the trainers' hosts",
        "peers' snapshots": f"of another host: each snapshot moves half of it{seconds}",
        "offloaded states": "weights, gradients, optimizer",
    }
    alike: dict[tuple[tuple[str, str], ...], list[int]] = {}  # as they are written
    for host, load in enumerate(loads):
        alike.setdefault(tuple((name, f"{gib(nbytes)} GiB") for name, nbytes in load.held.items()), []).append(host)
    rows = [
        (f"{named(hosts)}: {name}", nbytes, formulas[name]) for held, hosts in alike.items() for name, nbytes in held
    ]
    of = f" of {config.hosts.memory_gb:g}" if config.hosts.memory_gb else ""
    total = f"at most {gib(max(load.total for load in loads))}{of} GiB, besides processes"
    return PartTable("memory of hosts", rows, total)


def named(hosts: Sequence[int]) -> str:
    """Write consecutive numbers as ranges: "0-3,5"."""
    runs: list[list[int]] = []
    for host in hosts:
        if runs and host == runs[-1][-1] + 1:
            runs[-1].append(host)
        else:
            runs.append([host])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def sync_table(config: Config, shape: ModelShape, loads: list[HostLoad]) -> PartTable:
    link, version = config.hosts.link_gbps, shape.parameters * BYTES[config.generator.dtype]
    rows: list[Row] = [("one version", size(version), f"{count(shape.parameters)} x {BYTES[config.generator.dtype]}")]
    busiest = max(max(load.received, load.sent) for load in loads)
    if not busiest:
        return PartTable("weight sync, each step", rows, "through shared memory: no byte leaves its host")
    rows += [
        ("into a host", size(max(load.received for load in loads)), "at most, each byte once for all its replicas"),
        ("out of a host", size(max(load.sent for load in loads)), "at most, to all hosts with generators"),
    ]
    if not link:
        return PartTable("weight sync, each step", rows, "hosts.link_gbps is not given: no lower bound")
    seconds = 8 * busiest / (link * 1e9)
    return PartTable("weight sync, each step", rows, f"at least {seconds:.2g} s at {link:g} Gbit/s per host")


def check_host_memory(config: Config, shape: ModelShape, sharded: Cut, gpus: int) -> Iterator[str]:
    """Refuse what does not fit the stated memory of a host."""
    loads, memory = host_loads(config, shape, sharded, gpus), config.hosts.memory_gb * GIB
    fullest = max((load for load in loads), key=lambda load: load.total, default=None)
    if not memory or fullest is None or fullest.total <= memory:
        return
    parts = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in fullest.held.items())
    without = fullest.total - fullest.held.get("snapshots", 0) - fullest.held.get("peers' snapshots", 0)
    better = f"fault.snapshot_interval = 0 needs {gib(without)} GiB"
    if without > memory:
        better = "take hosts with more memory, or more of them"
    yield (
        f"hosts.memory_gb: expected {gib(fullest.total)} GiB on a host ({parts}), besides its processes, found "
        f"{config.hosts.memory_gb:g}; {better}"
    )
