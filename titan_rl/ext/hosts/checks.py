"""Checks of [hosts]: the workers that a run joins, and how they reach it."""

import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from titan_rl.config.sections import Config, HostsSection
from titan_rl.config.toml import as_toml
from titan_rl.ext.hosts.certificates import CERT, certificate_problems, certified_names
from titan_rl.ext.hosts.worker_address import route_to, split_address, unreachable
from titan_rl.preflight.refusal import problem
from titan_rl.wire.ports import port_range
from titan_rl.wire.program import command_of

MOST_PROCESSES = 64  # hosts on one machine


def problems(config: Config) -> Iterator[str]:
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


def unready(hosts: HostsSection) -> Iterator[str]:
    """Yield a problem if addresses are missing or the workers cannot reach this process, which a dry run does not
    need: it may be for another machine."""
    if missing := list(missing_addresses(hosts)):
        yield from missing
    elif (hosts.own_address or hosts.tls) and (why := unreachable(own_address(hosts), "set it to an IP of this host")):
        yield f"hosts.own_address: {why}"


def own_address(keys: HostsSection) -> str:
    """Return where workers reach this process: hosts.own_address, the name in this host's certificate, or the address
    from which the first worker is reached."""
    if keys.own_address or not keys.tls:
        return keys.own_address or route_to(keys.addresses[0])
    return certified_names(Path(keys.tls))[0]


def warnings(config: Config) -> Iterator[str]:
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
