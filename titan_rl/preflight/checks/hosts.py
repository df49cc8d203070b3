"""Checks of [placement], and of room on the hosts for the ranks."""

import re
from collections.abc import Iterator

from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.preflight.placement import Unplaceable, numbers, place, slots_per_host
from titan_rl.preflight.refusal import problem

HOSTS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", re.ASCII)


def check_hosts(config: Config, gpus: int) -> Iterator[str]:
    """`gpus`: of one host, or of this machine, which `processes` share."""
    if config.fault.min_trainers > (rows := config.parallelism.dp):
        yield problem(config, "fault.min_trainers", f"at most {rows}, the trainer's dp rows")
    if config.fault.min_replicas > (replicas := config.generator.replicas):
        yield problem(config, "fault.min_replicas", f"at most generator.replicas = {replicas}")
    unusable = list(_check_roles(config))
    yield from unusable
    if unusable or config.hosts.kind == "local" or config.hosts.number == 1:
        return
    try:
        place(config, slots_per_host(config, gpus))
    except Unplaceable as error:
        yield str(error)


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
