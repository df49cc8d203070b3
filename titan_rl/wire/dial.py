"""Says why nothing answers at an address, by plain means: Monarch tells only that nothing did."""

import socket
import ssl
from contextlib import suppress
from pathlib import Path

from titan_rl.wire.certificates import CA, CERT, KEY

SECONDS = 3.0


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
