"""Checks of [hosts], [placement] and [launch]: hosts, room on them for the ranks, and the job that starts a run."""

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path

from titan_rl.config.sections import Config, HostsSection
from titan_rl.config.toml import as_toml
from titan_rl.preflight.placement import Unplaceable, numbers, place, slots_per_host
from titan_rl.preflight.refusal import problem
from titan_rl.wire.certificates import CERT, certificate_problems, certified_names
from titan_rl.wire.program import command_of
from titan_rl.wire.worker_address import port_range, route_to, split_address, unreachable

MOUNT = re.compile(r"(/[^:,]*|(pvc|secret)/[a-z0-9.-]+):/[^:,]*(:ro)?")
MOST_PROCESSES = 64  # hosts on one machine
STOP_SECONDS = 30  # on top of fault.stop_grace_seconds: ranks end, and schedulers signal late
HOSTS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", re.ASCII)


def check_hosts(config: Config, gpus: int) -> Iterator[str]:
    """`gpus`: of one host, or of this machine, which `processes` share."""
    if config.fault.min_trainers > (rows := config.parallelism.dp):
        yield problem(config, "fault.min_trainers", f"at most {rows}, the trainer's dp rows")
    if config.fault.min_replicas > (replicas := config.generator.replicas):
        yield problem(config, "fault.min_replicas", f"at most generator.replicas = {replicas}")
    unusable = [*_check_kind(config), *_check_roles(config)]
    yield from unusable
    if unusable or config.hosts.number == 1:
        return
    try:
        place(config, slots_per_host(config, gpus))
    except Unplaceable as error:
        yield str(error)


def _check_kind(config: Config) -> Iterator[str]:
    wrong, hosts = partial(problem, config), config.hosts
    kind = f'with hosts.kind = "{hosts.kind}"'
    if not hosts.at_addresses and hosts.addresses:
        yield wrong("hosts.addresses", f"none {kind}")
    if not hosts.at_addresses and hosts.ports:
        yield wrong("hosts.ports", f'"" {kind}')
    if hosts.at_addresses:
        yield from _check_addresses(hosts)
    if hosts.kind == "ssh":
        yield from _check_ssh(hosts)
    if hosts.kind == "local" and hosts.count > 1:
        yield wrong("hosts.count", f"1 {kind}") + '; "processes" has several here'
    if hosts.kind == "processes" and hosts.count > MOST_PROCESSES:
        yield wrong("hosts.count", f"at most {MOST_PROCESSES} {kind}")


def _check_addresses(hosts: HostsSection) -> Iterator[str]:
    if hosts.isolation == "require":
        yield f'hosts.isolation: expected "auto" or "off" with hosts.kind = "{hosts.kind}", found "require"'
    if hosts.addresses and hosts.count not in (0, len(hosts.addresses)):
        yield from missing_addresses(hosts)
    if not hosts.addresses and not hosts.count:
        yield "hosts.addresses: expected some, or hosts.count for the plan of a dry run, found none"
    if len(set(hosts.addresses)) < len(hosts.addresses):
        yield f"hosts.addresses: expected each address once, found {as_toml(hosts.addresses)}"
    try:
        port_range(hosts.ports)
    except ValueError as error:
        yield f"hosts.ports: {error}"
    schemes = set[str]()
    for address in hosts.addresses:
        try:
            schemes.add(split_address(address)[0])
        except ValueError:
            yield f'hosts.addresses: expected addresses such as "tls://node1:26600", found {as_toml(address)}'
    if len(schemes) > 1:
        yield "hosts.addresses: expected all of them with tls://, or all with tcp://, found both"
    if "tcp" in schemes and not hosts.insecure:
        why = "because tcp:// has no encryption, and every client that reaches a port executes code as you"
        yield f"hosts.insecure: expected true, {why}, found false; tls:// needs certificates (docs/security.md)"
    if "tls" in schemes and not hosts.tls:
        yield f'hosts.tls: expected a folder with a certificate ({command_of("worker")} --init-tls), found ""'
    elif "tls" in schemes:
        yield from (f"hosts.tls: {problem}" for problem in certificate_problems(Path(hosts.tls)))


def _check_ssh(hosts: HostsSection) -> Iterator[str]:
    try:
        program = shlex.split(hosts.ssh)
    except ValueError as error:
        yield f"hosts.ssh: expected a command, found {as_toml(hosts.ssh)} ({error})"
        return
    if not program or not shutil.which(program[0]):
        yield f"hosts.ssh: expected a program on PATH, found none named by {as_toml(hosts.ssh)}"
    for address in hosts.addresses if hosts.tls else ():
        with suppress(ValueError):  # _check_addresses has named it
            scheme, host, _ = split_address(address)
            folder = Path(hosts.tls).absolute().parent / host
            if scheme == "tls" and not (folder / CERT).is_file():
                yield f"hosts.tls: expected the certificate of {host} in {folder}, next to this machine's, found none"


def missing_addresses(hosts: HostsSection) -> Iterator[str]:
    """Yield a problem if addresses are missing. A dry run needs none."""
    if hosts.at_addresses and hosts.number != len(hosts.addresses):
        where = f"where workers wait ({command_of('worker')})"
        if hosts.kind == "ssh":
            where = "where workers shall listen, such as tls://node1:26600"
        expected = f"{hosts.count or 'at least one'}, {where}"
        yield f"hosts.addresses: expected {expected}, found {len(hosts.addresses)}"


def own_address(keys: HostsSection) -> str:
    """Return where workers reach this process: hosts.own_address, the name in this host's certificate, or the address
    from which the first worker is reached."""
    if keys.own_address or not keys.tls:
        return keys.own_address or route_to(keys.addresses[0])
    return certified_names(Path(keys.tls))[0]


def unreachable_controller(hosts: HostsSection) -> Iterator[str]:
    """Yield a problem if the workers cannot reach this process. A dry run may be for another machine."""
    named = hosts.at_addresses and (hosts.own_address or hosts.tls)
    if named and (why := unreachable(own_address(hosts), "set it to an IP of this host")):
        yield f"hosts.own_address: {why}"


def attach_warnings(config: Config) -> Iterator[str]:
    """Yield the risks of a run across hosts."""
    hosts = config.hosts
    if not hosts.at_addresses:
        return
    if any(address.startswith("tcp://") for address in hosts.addresses):
        yield (
            "hosts.insecure: every client that reaches a worker or this run over the network executes code as you, and "
            "reads weights and prompts; use it only on a network without other users"
        )
    yield (
        "collectives of a mesh that spans hosts (gloo, NCCL), and the port at which its ranks meet, are not encrypted: "
        "keep them on a network that you trust"
    )


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


def stop_seconds(config: Config) -> int:
    """Return how long before its end a job must be signalled, so that the run can save."""
    return int(config.fault.stop_grace_seconds) + STOP_SECONDS


def check_launch(config: Config) -> Iterator[str]:
    launch = config.launch
    for key in fields(launch):
        value = getattr(launch, key.name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and key.name != "setup" and not text.isprintable():
                yield f"launch.{key.name}: expected one line of printable text, found {as_toml(text)}"
    for mount in launch.mounts:
        if not MOUNT.fullmatch(mount):
            expected = '"/folder:/path", "pvc/claim:/path" or "secret/name:/path", each also with ":ro"'
            yield f"launch.mounts: expected {expected}, found {as_toml(mount)}"
    for argument in launch.extra_args:
        if not argument.startswith("-"):
            yield f"launch.extra_args: expected arguments of sbatch, such as --constraint=h100, found {argument!r}"
    if launch.minutes and 60 * launch.minutes <= stop_seconds(config):
        grace = f"fault.stop_grace_seconds = {config.fault.stop_grace_seconds:g}"
        yield problem(config, "launch.minutes", f"at least {stop_seconds(config) // 60 + 1} with {grace}")
