"""A worker's address: how a run finds the port that serves it, and which run has the host.

    run ── connects to tls://node1:26600 ──> "titan_rl tls 40173" ── attaches to ──> tls://node1:40173

Each run is served at another port: Monarch keeps one connection per address for as long as a process lives, so a worker
that was started again cannot be reached at its earlier address. Anyone who connects may read the port; TLS decides who
may use it.
"""

import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from titan_rl.ext.hosts.certificates import CA, CERT, KEY
from titan_rl.wire.ports import listener

WORD = "titan_rl"
SECONDS = 3.0  # limit of a lookup
RETRY_SECONDS = 0.2  # after a caller could not be accepted
MAX_ANSWER_BYTES = 64


class NotAWorker(OSError):
    """Another program, or another kind of worker, listens at an address."""


def listen_at(address: str) -> socket.socket:
    """Listen at a worker's address only, not at this host's other addresses."""
    _, host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def answer_lookups(listening: socket.socket, serves: Callable[[], str], say: Callable[[str], None]) -> None:
    """Send each caller the address that `serves` returns, as long as the process lives; "": none yet. A caller that
    cannot be accepted, because no more files can be opened for example, waits; `say` shows each reason once."""

    def answer() -> None:
        reasons = set[int | None]()
        while True:
            try:
                caller, _ = listening.accept()
            except OSError as error:
                if error.errno not in reasons:
                    reasons.add(error.errno)
                    say(f"a run that asks where this worker serves is not answered, and waits: {error.strerror}")
                time.sleep(RETRY_SECONDS)
                continue
            with caller:
                scheme, _, port = split_address(served) if (served := serves()) else ("", "", 0)
                caller.settimeout(SECONDS)
                with suppress(OSError):  # the caller only checked whether anything listens
                    caller.sendall(f"{WORD} {scheme or 'none'} {port}\n".encode())

    threading.Thread(target=answer, name="lookups", daemon=True).start()


def look_up(address: str, seconds: float = SECONDS) -> str:
    """Return the address at which a worker serves. "": it does not serve yet. Raise OSError if nothing listens or
    answers, NotAWorker if something else answers, or a worker with another scheme."""
    scheme, host, port = split_address(address)
    with socket.create_connection((host, port), seconds) as worker:
        answer = b""
        while not answer.endswith(b"\n") and len(answer) < MAX_ANSWER_BYTES and (more := worker.recv(MAX_ANSWER_BYTES)):
            answer += more
    words = answer.decode(errors="replace").split()
    if len(words) != 3 or words[0] != WORD or not words[2].isdecimal():
        raise NotAWorker("something listens there, but does not answer as a worker of this version")
    _, theirs, inner = words
    if inner == "0":
        return ""
    if theirs != scheme:
        raise NotAWorker(f"its worker does not answer {scheme}://, but {theirs}://")
    return address_of(scheme, host, int(inner))


def split_address(address: str) -> tuple[str, str, int]:
    """Return scheme, host and port of "tls://node1:26600", or raise ValueError."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme not in ("tls", "tcp") or not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
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


def unreachable(host: str, instead: str) -> str:
    """Return why other hosts cannot reach this one by a name or an IP, or "". A loopback address is right only where it
    is meant: an IP, or localhost. `instead` is the remedy for this host's name."""
    expected = "expected a name or an address of this host, found"
    try:
        found = [str(each[4][0]) for each in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        return f"{expected} {host} ({error})"
    address = next((each for each in found if ":" not in each), found[0])
    place = host if host == address else f"{host} -> {address}"
    own = host.partition(".")[0] == socket.gethostname().partition(".")[0]
    if own and host not in (address, "localhost") and ip_address(address).is_loopback:
        return (
            f"expected an address that other hosts reach, found {place} (/etc/hosts); {instead}, or correct /etc/hosts"
        )
    try:
        listener(address).close()
    except OSError:
        return f"{expected} {place}, where it cannot listen"
    return ""


def takes_connections(address: str, seconds: float) -> bool:
    """Return whether something listens at an address: the kernel answers, however busy the host is."""
    return _failure(address, seconds) is None


def refuses_connections(address: str, seconds: float) -> bool:
    """Return whether a host's kernel refuses connections to an address. Silence is no refusal."""
    return isinstance(_failure(address, seconds), ConnectionRefusedError)


def _failure(address: str, seconds: float) -> OSError | None:
    """Return how a plain connection to an address fails, or None."""
    _, host, port = split_address(address)
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:
        return error
    return None


def why_untrusted(address: str, tls: str) -> str:
    """Return why the certificate that is shown at an address is refused, or "" also if none is shown."""
    _, host, port = split_address(address)
    context = ssl.create_default_context(cafile=str(Path(tls) / CA))
    context.load_cert_chain(Path(tls) / CERT, Path(tls) / KEY)
    try:
        with socket.create_connection((host, port), SECONDS) as connection:
            context.wrap_socket(connection, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return f"TLS fails: {error.verify_message}"
    except OSError:  # a deadline ends the wait for it
        pass
    return ""


def why_silent(address: str, tls: str = "") -> str:
    """Connect as Monarch does, and return the reason of the failure."""
    _, host, port = split_address(address)
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"the name {host} resolves to nothing ({getattr(error, 'strerror', None) or error})"
    try:
        connection = socket.create_connection((host, port), SECONDS)
    except OSError as error:
        return f"nothing listens at {addresses[0][4][0]}:{port} ({error.strerror or error})"
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
            reason = f"{getattr(error, 'verify_message', '') or getattr(error, 'reason', '') or error}"
            when = "expired" in reason or "not yet valid" in reason
            return f"TLS fails: {reason}{' (are the clocks of both hosts right?)' if when else ''}"
    return "it is reached, and the certificates are accepted, but it does not answer: is it of other versions?"


RUN = "run"  # name of the file


class Holder(NamedTuple):
    """The run that has a host. Times are of the host's monotonic clock."""

    run: str
    again: float  # when a live controller will have called the agent again
    ends: float  # when the agent ends the run unless the controller calls again

    @property
    def silent(self) -> bool:
        return time.monotonic() > self.again

    @property
    def how_silent(self) -> str:
        return "is silent" if self.silent else "may be silent"


def holder_in(folder: Path) -> Holder:
    """Return which run has the host of the worker whose folder this is."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads((folder / RUN).read_text())
        return Holder(str(record["run"]), float(record["again"]), float(record["ends"]))
    return Holder("another run", 0.0, 0.0)
