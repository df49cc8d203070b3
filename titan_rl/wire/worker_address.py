"""How a run reaches the worker of another host: the worker's address, the front door there, and which run has the host.

    run ── connects to tls://node1:26600 ──> "titan_rl tls 40173" ── attaches to ──> tls://node1:40173

Each run is served at another port. Monarch keeps one connection per address for as long as a process lives: a
worker that has ended a run, or was started again, is not reached again at an address where it was lost. The door says
nothing else, and whoever connects may hear it; who may use the port is decided there, by TLS.
"""

import errno
import json
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from titan_rl.wire.certificates import CA, CERT, KEY

WORD = "titan_rl"
SECONDS = 3.0
AGAIN_SECONDS = 0.2  # from a caller that could not be taken to the next try
FEWEST = 6  # ports of a worker: for a run, its return, its ranks to meet, its agent and that of a run which waits
LONGEST = 64  # bytes of an answer


class NoDoor(OSError):
    """What listens there is no worker's front door: str() says what it did."""


def open_door(address: str) -> socket.socket:
    """Listen at a worker's address, and at no other one of this host."""
    _, host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def answer(door: socket.socket, serves: Callable[[], str], say: Callable[[str], None]) -> None:
    """Tell each caller what address `serves` returns, as long as the process lives. Empty: none yet. A caller that the
    kernel does not hand over, because no more files can be opened for example, waits; `say` shows each reason once."""

    def answering() -> None:
        said = set[int | None]()
        while True:
            try:
                caller, _ = door.accept()
            except OSError as error:
                if error.errno not in said:
                    said.add(error.errno)
                    say(f"a run that asks where this worker serves is not answered, and waits: {error.strerror}")
                time.sleep(AGAIN_SECONDS)
                continue
            with caller:
                scheme, _, port = split_address(served) if (served := serves()) else ("", "", 0)
                caller.settimeout(SECONDS)
                try:
                    caller.sendall(f"{WORD} {scheme or 'none'} {port}\n".encode())
                except OSError:  # it only looked whether anything listens
                    continue

    threading.Thread(target=answering, name="front door", daemon=True).start()


def port_range(text: str) -> range:
    """Return the ports of "26700-26799", none of "", or raise ValueError, which says what is expected."""
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    ports = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    if len(ports) < FEWEST or ports[0] < 1 or ports[-1] >= 2**16:
        raise ValueError(f'expected at least {FEWEST} ports from 1 to 65535, such as "26700-26799", found "{text}"')
    return ports


def listener(host: str, ports: Sequence[int] = (), used: Sequence[int] = ()) -> socket.socket:
    """Listen at a free port of this host's address: any, or one of `ports`. Those that were `used` come last, the
    latest at the end: Monarch does not find a worker again at a port where it lost one."""
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


def ask_door(address: str, seconds: float = SECONDS) -> str:
    """Return the address at which a worker serves. "": it does not serve yet. Raise OSError if nothing listens or
    answers, NoDoor if something else answers, or a worker with another scheme."""
    scheme, host, port = split_address(address)
    with socket.create_connection((host, port), seconds) as door:
        said = b""
        while not said.endswith(b"\n") and len(said) < LONGEST and (more := door.recv(LONGEST)):
            said += more
    words = said.decode(errors="replace").split()
    if len(words) != 3 or words[0] != WORD or not words[2].isdecimal():
        raise NoDoor("something listens there, but does not answer as a worker of this version")
    _, theirs, inner = words
    if inner == "0":
        return ""
    if theirs != scheme:
        raise NoDoor(f"its worker does not answer {scheme}://, but {theirs}://")
    return address_of(scheme, host, int(inner))


def split_address(address: str) -> tuple[str, str, int]:
    """Return scheme, host and port of "tls://node1:26600", or raise ValueError."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme not in ("tls", "tcp") or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(address)
    return scheme, host.strip("[]"), int(port)


def address_of(scheme: str, host: str, port: int) -> str:
    """Return "tls://node1:26600": the reverse of split_address."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def route_to(address: str) -> str:
    """Return the address of this machine from which it reaches a host."""
    _, host, port = split_address(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.connect((host, port))
        return any_socket.getsockname()[0]


def takes_connections(address: str, seconds: float) -> bool:
    """Return whether something listens at an address: the kernel answers, however busy the host is."""
    return _failure(address, seconds) is None


def refuses_connections(address: str, seconds: float) -> bool:
    """Return whether a host's kernel says that nothing listens at an address. Silence is no refusal."""
    return isinstance(_failure(address, seconds), ConnectionRefusedError)


def _failure(address: str, seconds: float) -> OSError | None:
    """Return how a plain connection to an address fails, or None."""
    _, host, port = split_address(address)
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:
        return error
    return None


def why_silent(address: str, tls: str = "") -> str:
    """Connect as Monarch does, and return how that fails."""
    _, host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"the name {host} resolves to nothing ({getattr(error, 'strerror', None) or error})"
    try:
        connection = socket.create_connection((host, port), SECONDS)
    except OSError as error:
        return f"nothing listens at {found[0][4][0]}:{port} ({error.strerror or error})"
    with connection:
        if not tls:
            return "something listens there, but does not answer as a worker: it may expect tls://"
        try:
            context = ssl.create_default_context(cafile=str(Path(tls) / CA))
            context.load_cert_chain(Path(tls) / CERT, Path(tls) / KEY)
            with context.wrap_socket(connection, server_hostname=host) as secure:
                secure.settimeout(1.0)
                with suppress(TimeoutError):  # a peer that accepts us waits
                    if not secure.recv(1):
                        return "it closed the connection"
        except (ssl.SSLError, OSError) as error:
            why = f"{getattr(error, 'verify_message', '') or getattr(error, 'reason', '') or error}"
            when = "expired" in why or "not yet valid" in why
            return f"TLS fails: {why}{' (are the clocks of both hosts right?)' if when else ''}"
    return "it is reached, and the certificates are accepted, but it does not answer: is it of other versions?"


RUN = "run"  # the file's name


class Holder(NamedTuple):
    """The run that has a host. Times are of the host's monotonic clock."""

    run: str
    again: float  # its controller has asked again by then, if it is alive
    ends: float  # its agent ends it then, if the controller does not ask again

    @property
    def silent(self) -> bool:
        return time.monotonic() > self.again

    @property
    def how_silent(self) -> str:
        return "is silent" if self.silent else "may be silent"


def holder_in(folder: Path) -> Holder:
    """Return which run has the host of the worker whose folder this is."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / RUN).read_text())
        return Holder(str(found["run"]), float(found["again"]), float(found["ends"]))
    return Holder("another run", 0.0, 0.0)
