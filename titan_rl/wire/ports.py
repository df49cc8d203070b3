"""Listens at free ports of a host's address, any, or within a range."""

import errno
import random
import re
import socket
from collections.abc import Sequence

MIN_PORTS = 6  # per worker: a run, its return, its ranks' meeting, its agent, and a waiting run with its agent


def port_range(text: str) -> range:
    """Return the ports of "26700-26799", or none of ""."""
    if not text:
        return range(0)
    match = re.fullmatch("([0-9]{1,5})-([0-9]{1,5})", text)
    ports = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if len(ports) < MIN_PORTS or ports[0] < 1 or ports[-1] >= 2**16:
        raise ValueError(f'expected at least {MIN_PORTS} ports from 1 to 65535, such as "26700-26799", found "{text}"')
    return ports


def listener(host: str, ports: Sequence[int] = (), used: Sequence[int] = ()) -> socket.socket:
    """Listen at a free port of this host's address: any, or one of `ports`. Ports that were `used` come last, the
    latest at the end: Monarch cannot reach a worker again at a port where it lost one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    fresh = [port for port in random.sample(ports, len(ports)) if port not in used]
    for port in [*fresh, *(port for port in used if port in ports)] if ports else (0,):
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"none of the ports {ports[0]}-{ports[-1]} of {host} is free")


def free_port(host: str, ports: Sequence[int] = (), used: Sequence[int] = ()) -> int:
    """Return a port of this host's address that is free now."""
    with listener(host, ports, used) as free:
        return free.getsockname()[1]
