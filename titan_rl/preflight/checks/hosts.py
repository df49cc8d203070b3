"""Checks of the hosts of a run, and of what is placed on them."""

import re
from collections.abc import Iterator

from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.preflight.placement import Unplaceable, numbers, place, slots_per_host

MOST_PROCESSES = 64  # hosts on one machine
HOSTS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


def check_hosts(config: Config, gpus: int) -> Iterator[str]:
    """`gpus`: of one host, or of this machine, which `processes` share."""
    unusable = [*_check_kind(config), *_check_roles(config)]
    yield from unusable
    if unusable or config.hosts.number == 1:
        return
    try:
        place(config, slots_per_host(config, gpus))
    except Unplaceable as error:
        yield str(error)


def _check_kind(config: Config) -> Iterator[str]:
    hosts = config.hosts
    if hosts.kind != "attach" and hosts.addresses:
        why = f'with hosts.kind = "{hosts.kind}"'
        yield f"hosts.addresses: expected none {why}, found {as_toml(hosts.addresses)}"
    if hosts.kind == "local" and hosts.count > 1:
        yield f'hosts.count: expected 1 with hosts.kind = "local", found {hosts.count}; "processes" has several here'
    if hosts.kind == "processes" and hosts.count > MOST_PROCESSES:
        yield f'hosts.count: expected at most {MOST_PROCESSES} with hosts.kind = "processes", found {hosts.count}'


def _check_roles(config: Config) -> Iterator[str]:
    roles = ["trainer", *(["generator"] if config.samples_rollouts else []), *config.roles]
    for role, given in config.placement.hosts.items():
        if role not in roles:
            yield f"placement.hosts: expected roles of this run ({', '.join(roles)}), found {as_toml(role)}"
        elif not HOSTS.fullmatch(str(given)):
            yield f'placement.hosts: expected numbers of hosts for {role}, such as "0-3,6", found {as_toml(given)}'
        elif not (found := numbers(str(given))) or max(found) >= config.hosts.number or len(set(found)) < len(found):
            most = config.hosts.number - 1
            yield f"placement.hosts: expected each of the hosts 0 to {most} once for {role}, found {as_toml(given)}"
