"""Tables of the plan: ranks by host, the effect of losing a host, memory of ranks and hosts, bytes of a weight sync."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from titan_rl.config.sections import BYTES, Config
from titan_rl.preflight.added_parameters import added_parameters
from titan_rl.preflight.memory import Cut, HostLoad, cache_bytes_per_token, count, gib, host_loads, needs, size
from titan_rl.preflight.placement import Placement, Unplaceable, environment_host, place_again, slots_of
from titan_rl.preflight.plan import Setup
from titan_rl.preflight.snapshot_sizes import snapshot_sizes
from titan_rl.record.plan_view import PartTable
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.parts import needed_part
from titan_rl.wire.weight_source import SLOTS

MOST_ROWS = 2  # for neighbouring hosts that are alike; more hosts share one row, so that a hundred stay readable
NAMED = 2  # hosts whose loss has one outcome
ROOM = "the ranks of any host fit on the others"
FITS = "its ranks fit on the others"
Row = tuple[str, str, str]  # part, size, formula


@dataclass(slots=True)
class _Part:
    """What a host has of one role: consecutive ranks of a model, or consecutive replicas."""

    role: str
    first: int
    count: int
    note: str = ""  # the ranks of a replica, if it has several
    number: bool = True  # the role has more than this one rank

    @property
    def kind(self) -> tuple[str, int, str]:
        return self.role, self.count, self.note

    def text(self, hosts: int = 1) -> str:
        """Write what one host has, or what several have together, beginning with this one."""
        last = self.first + self.count * hosts - 1
        if self.role == "environment":
            return f"environment{self.first}" if self.count == hosts == 1 else f"{self.count} environments"
        if self.role == "generator":
            span = f"generator{self.first}" if last == self.first else f"generators {self.first}-{last}"
        else:
            span = f"{self.role} {self.first}-{last}" if last > self.first else f"{self.role} {self.first}"
        span = (span if self.number else self.role) + self.note
        return f"{span}, {self.count} on each" if hosts > 1 else span


def host_rows(config: Config, placed: Placement, slots: int) -> list[tuple[str, str, str]]:
    """Return name, ranks and taken slots of each host. Neighbours with alike shares of the same meshes are one row."""
    names = config.hosts.addresses or [f"host{i}" for i in range(config.hosts.number)]
    parts, rows, first = _parts(config, placed), list[tuple[str, str, str]](), 0
    taken = Counter(host for host, _ in set[tuple[int, int]]().union(*map(slots_of, placed.values())))
    for host in range(1, len(parts) + 1):
        if host < len(parts) and _continues(parts[host - 1], parts[host]):
            continue
        count, used = host - first, f"{taken[first]} of {slots}"
        if count <= MOST_ROWS:
            rows += [(names[i], ", ".join(p.text() for p in parts[i]) or "nothing", used) for i in range(first, host)]
        else:
            each = "; ".join(part.text(count) for part in parts[first]) or "nothing"
            rows.append((f"{names[first]} to {names[host - 1]}", each, f"{used} each"))
        first = host
    return rows


def _parts(config: Config, placed: Placement) -> list[list[_Part]]:
    """Return the parts of each host."""
    parts: list[list[_Part]] = [[] for _ in range(config.hosts.number)]
    for mesh, shares in placed.items():
        first, total = 0, sum(len(share.slots) for share in shares)
        for share in shares:
            here, count = parts[share.host], len(share.slots)
            if mesh.startswith("generator"):
                _append(here, _Part("generator", int(mesh[9:]), 1, f" of {count} ranks" * (count > 1)))
            else:
                here.append(_Part(mesh, first, count, number=total > 1))
            first += count
    if config.samples_rollouts and config.rollout_code:
        for number in range(config.environment.processes):
            _append(parts[environment_host(config, number)], _Part("environment", number, 1), anywhere=True)
    return parts


def _append(here: list[_Part], part: _Part, *, anywhere: bool = False) -> None:
    """Add a part to a host, merged into its last part if it has the next number; `anywhere`: or any number."""
    last = here[-1] if here else None
    if last and last.role == part.role and (anywhere or last.first + last.count == part.first):
        last.count += 1
    else:
        here.append(part)


def _continues(before: Sequence[_Part], here: Sequence[_Part]) -> bool:
    """Return True if a host has as much as the one before it, and what comes directly after that."""
    if [part.kind for part in before] != [part.kind for part in here]:
        return False
    pairs = zip(before, here, strict=True)
    return all(own.first == earlier.first + earlier.count for earlier, own in pairs if own.role != "environment")


def after_loss(config: Config, placed: Placement, slots: int) -> str:
    """Describe the effect of losing one host of each kind. Hosts with equal numbers of ranks of the same roles are of
    one kind."""
    if not config.fault.max_restarts:
        return "the run ends, resumable: fault.max_restarts = 0"
    kinds, outcomes = dict[tuple[tuple[str, int, str], ...], int](), dict[str, list[str]]()
    for host, parts in enumerate(_parts(config, placed)):
        if kind := tuple(part.kind for part in parts if part.role != "environment"):
            kinds.setdefault(kind, host)
    for host in kinds.values():
        name = config.hosts.addresses[host] if config.hosts.addresses else f"host{host}"
        outcomes.setdefault(_outcome(config, placed, slots, host), []).append(name)
    if set(outcomes) == {FITS}:
        return ROOM
    named = {", ".join(hosts[:NAMED]) + " ..." * (len(hosts) > NAMED): outcome for outcome, hosts in outcomes.items()}
    return "; ".join(f"without {hosts}: {outcome}" for hosts, outcome in named.items())


def _outcome(config: Config, placed: Placement, slots: int, lost: int) -> str:
    """Place again what a host has, and return what there is less of then."""
    now, missing, given_up = {**placed}, list[str](), list[str]()
    for mesh in [name for name, shares in placed.items() if any(share.host == lost for share in shares)]:
        try:
            now[mesh] = place_again(config, mesh, now, slots, [lost])
        except Unplaceable:
            (given_up if mesh.startswith("generator") else missing).append(mesh)
    if given_up and config.generator.replicas - len(given_up) < config.fault.min_replicas:
        missing += given_up
    if missing:
        fewer = " or fault.min_trainers" if missing == ["trainer"] and config.parallelism.dp > 1 else ""
        return f"the run ends, resumable: no room for {', '.join(missing)} (it needs a spare host{fewer})"
    losses = []
    rows = config.parallelism.dp
    if (rows_left := len(slots_of(now["trainer"])) // config.parallelism.row_ranks) < rows:
        losses.append(f"the trainer has {rows_left} of {rows} dp rows until there is room")
    if given_up:
        losses.append(f"no {' and no '.join(given_up)} until there is room")
    return ", ".join(losses) or FITS


def memory_tables(setup: Setup, sharded: Cut) -> list[PartTable]:
    """Return a table for each mesh, and for hosts and the network; none on a CPU, or on GPUs of unknown size."""
    config, shape, nbytes = setup.resolved, setup.shape, setup.gpus.nbytes
    if setup.device != "cuda" or not nbytes:
        return []
    tables = list[PartTable]()
    needed = [(name, need, setup) for name, need in needs(config, shape, nbytes, sharded, setup.adapters).items()]
    for name, own in models_of_seats(setup).items():
        needed.append((name, needs(own.resolved, own.shape, nbytes)["generator"], own))
    for name, need, of in needed:
        overhead = need.own.overhead
        rows = [(part, f"{gib(own.nbytes)} GiB", own.formula) for part, own in need.own.parts.items()]
        rows += [
            (other, f"{gib(nbytes_beside)} GiB", "on the same GPU") for other, nbytes_beside in need.others.items()
        ]
        rows.append(("CUDA, fragmentation", f"{gib(overhead.nbytes)} GiB", overhead.formula))
        if "KV cache" in need.own.kept:
            g, cache = of.resolved.generator, need.own.kept["KV cache"].nbytes
            longest = g.max_model_len or config.training.seq_len
            fits = f"sequences of {longest:,} tokens fit the KV cache; max_num_seqs {g.max_num_seqs}"
            rows.append(("concurrency", str(cache // cache_bytes_per_token(of.resolved, of.shape) // longest), fits))
        full = f"{gib(need.nbytes)} of {gib(need.limit)} GiB by estimate"
        tables.append(PartTable(f"{name}, each rank", rows, full))
    if loads := host_loads(config, shape, sharded, setup.gpus.count, setup.adapters):
        tables += [hosts_table(config, loads), sync_table(config, shape, loads)]
    return tables


def models_of_seats(setup: Setup) -> Mapping[str, Setup]:
    """Return the setups of the models that the run starts to play seats, by the name of the engine."""
    if not setup.config.environment.folders:
        return {}
    return needed_part("models of seats", "environment.endpoints")(setup)


def hosts_table(config: Config, loads: list[HostLoad]) -> PartTable:
    peers = max(load.held.get("peers' snapshots", 0) for load in loads)
    formulas = {
        "staged weights": f"{SLOTS} slots x what its trainer ranks send, pinned",
        "received weights": "what its generators read from other hosts, once for all replicas",
        **snapshot_sizes(config).formulas(peers),
        "offloaded states": "weights, gradients, optimizer",
        "block inputs": "of two microbatches, one per layer, each rounded up to a power of two, pinned",
    }
    by_rows: dict[tuple[tuple[str, str], ...], list[int]] = {}  # as they are written
    for host, load in enumerate(loads):
        by_rows.setdefault(tuple((name, f"{gib(nbytes)} GiB") for name, nbytes in load.held.items()), []).append(host)
    rows = [
        (f"{named(hosts)}: {name}", nbytes, formulas[name])
        for parts, hosts in by_rows.items()
        for name, nbytes in parts
    ]
    of = f" of {config.hosts.memory_gb:g}" if config.hosts.memory_gb else ""
    total = f"at most {gib(max(load.total for load in loads))}{of} GiB, besides processes"
    return PartTable("memory of hosts", rows, total)


def named(hosts: Sequence[int]) -> str:
    """Write consecutive numbers as ranges: "0-3,5"."""
    runs = [[host for _, host in run] for _, run in groupby(enumerate(hosts), lambda each: each[1] - each[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def sync_table(config: Config, shape: ModelShape, loads: list[HostLoad]) -> PartTable:
    link, version = config.hosts.link_gbps, shape.parameters * BYTES[config.generator.dtype]
    rows: list[Row] = [("one version", size(version), f"{count(shape.parameters)} x {BYTES[config.generator.dtype]}")]
    if config.lora.in_vllm:
        adapters = added_parameters(config.lora, shape).number()
        each = BYTES[config.generator.dtype]
        rows.append(("adapters alone", size(adapters * each), f"{count(adapters)} x {each}: after the first version"))
    busiest = max(max(load.received, load.sent) for load in loads)
    if not busiest:
        return PartTable("weight sync, each step", rows, "through shared memory: no byte leaves its host")
    passed_on = any(load.sent and "staged weights" not in load.held for load in loads)
    to_whom = "as hosts pass it on (weight_sync.relay)" if passed_on else "to all hosts with generators"
    rows += [
        ("into a host", size(max(load.received for load in loads)), "at most, each byte once for all its replicas"),
        ("out of a host", size(max(load.sent for load in loads)), f"at most, {to_whom}"),
    ]
    if not link:
        return PartTable("weight sync, each step", rows, "hosts.link_gbps is not given: no lower bound")
    seconds = 8 * busiest / (link * 1e9)
    return PartTable("weight sync, each step", rows, f"at least {seconds:.2g} s at {link:g} Gbit/s per host")
