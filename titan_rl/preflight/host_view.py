"""Lists where the ranks of a run are, host by host. Neighbouring hosts with alike shares of the same meshes are one
row, so that the plan of a hundred hosts stays readable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_rl.config.sections import Config
from titan_rl.preflight.placement import Share, environment_host, place

MOST_ROWS = 2  # of neighbours that are alike; more of them are one row


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


def host_rows(config: Config, slots: int) -> list[tuple[str, str, str]]:
    """Return name, ranks and taken slots of each host, or of several hosts that are alike."""
    placed, names = place(config, slots), config.hosts.addresses
    parts = _parts(config, placed)
    taken: list[set[int]] = [set() for _ in parts]
    for share in (share for shares in placed.values() for share in shares):
        taken[share.host] |= set(share.slots)
    rows: list[tuple[str, str, str]] = []
    first = 0
    for host in range(1, len(parts) + 1):
        if host < len(parts) and _continues(parts[host - 1], parts[host]):
            continue
        alike, used = range(first, host), f"{len(taken[first])} of {slots}"
        if len(alike) <= MOST_ROWS:
            rows += [
                (names[i] if names else f"host{i}", ", ".join(p.text() for p in parts[i]) or "nothing", used)
                for i in alike
            ]
        else:
            name = f"{names[first]} to {names[host - 1]}" if names else f"host{first} to host{host - 1}"
            each = "; ".join(part.text(len(alike)) for part in parts[first]) or "nothing"
            rows.append((name, each, f"{used} each"))
        first = host
    return rows


def _parts(config: Config, placed: Mapping[str, Sequence[Share]]) -> list[list[_Part]]:
    """Return what each host has."""
    found: list[list[_Part]] = [[] for _ in range(config.hosts.number)]
    for mesh, shares in placed.items():
        first, total = 0, sum(len(share.slots) for share in shares)
        for share in shares:
            here, count = found[share.host], len(share.slots)
            if not mesh.startswith("generator"):
                here.append(_Part(mesh, first, count, number=total > 1))
            else:
                _append(here, _Part("generator", int(mesh[9:]), 1, f" of {count} ranks" * (count > 1)))
            first += count
    if config.samples_rollouts and config.rollout_code:
        for number in range(config.environment.processes):
            here = found[environment_host(config, number)]
            if here and here[-1].role == "environment":
                here[-1].count += 1
            else:
                here.append(_Part("environment", number, 1))
    return found


def _append(here: list[_Part], replica: _Part) -> None:
    if here and here[-1].role == "generator" and here[-1].first + here[-1].count == replica.first:
        here[-1].count += 1
    else:
        here.append(replica)


def _continues(before: Sequence[_Part], here: Sequence[_Part]) -> bool:
    """Return True if a host has as much as the one before it, and what comes directly after that."""
    if [part.kind for part in before] != [part.kind for part in here]:
        return False
    pairs = [pair for pair in zip(before, here, strict=True) if pair[0].role != "environment"]
    return all(own.first == left.first + left.count for left, own in pairs)
