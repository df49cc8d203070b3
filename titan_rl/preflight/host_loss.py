"""Says in the plan what a run does when it loses a host: what moves, and what the others have no room for."""

from titan_rl.config.sections import Config
from titan_rl.preflight.placement import Placement, Unplaceable, place, place_again, slots_of

NAMED = 2  # hosts of one outcome
ROOM = "what any host has fits on the others"
FITS = "what it has fits on the others"


def after_loss(config: Config, slots: int) -> str:
    """Return what the loss of each kind of host comes to. Hosts with as many ranks of the same roles are of one kind,
    and the first of them is looked at."""
    if not config.fault.max_restarts:
        return "the run ends, resumable: fault.max_restarts = 0"
    placed = place(config, slots)
    kinds = dict[tuple[tuple[str, int], ...], int]()
    for host in range(config.hosts.number):
        if kind := _kind(placed, host):
            kinds.setdefault(kind, host)
    outcomes = dict[str, list[str]]()
    for host in kinds.values():
        name = config.hosts.addresses[host] if config.hosts.addresses else f"host{host}"
        outcomes.setdefault(_outcome(config, placed, slots, host), []).append(name)
    if set(outcomes) == {FITS}:
        return ROOM
    named = {", ".join(hosts[:NAMED]) + " ..." * (len(hosts) > NAMED): outcome for outcome, hosts in outcomes.items()}
    return "; ".join(f"without {hosts}: {outcome}" for hosts, outcome in named.items())


def _kind(placed: Placement, host: int) -> tuple[tuple[str, int], ...]:
    return tuple(
        (mesh.rstrip("0123456789"), len(share.slots))
        for mesh, shares in placed.items()
        for share in shares
        if share.host == host
    )


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
    found = []
    rows, tp = config.parallelism.dp, config.parallelism.tensor_parallel_degree
    if (left := len(slots_of(now["trainer"])) // tp) < rows:
        found.append(f"the trainer has {left} of {rows} dp rows until there is room")
    if given_up:
        found.append(f"no {' and no '.join(given_up)} until there is room")
    return ", ".join(found) or FITS
