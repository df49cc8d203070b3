"""What a lookup at a worker's address returns, and how other listeners are refused."""

import errno
import os
import resource
import socket
import threading
import time

import pytest

from titan_rl.ext.hosts.worker_address import (
    NotAWorker,
    address_of,
    answer_lookups,
    listen_at,
    look_up,
    split_address,
    unreachable,
)
from titan_rl.wire.ports import free_port


def test_a_lookup_returns_where_the_worker_serves_now() -> None:
    address = f"tls://127.0.0.1:{free_port('127.0.0.1')}"
    with pytest.raises(ConnectionRefusedError):
        look_up(address)
    serves = [""]
    answer_lookups(listen_at(address), lambda: serves[0], pytest.fail)
    assert look_up(address) == "", "it does not serve yet"
    for port in (4711, 4712):
        serves[0] = f"tls://127.0.0.1:{port}"
        assert look_up(address) == f"tls://127.0.0.1:{port}"
    socket.create_connection(("127.0.0.1", split_address(address)[2])).close()  # it looks whether anything listens
    assert look_up(address) == "tls://127.0.0.1:4712"
    with pytest.raises(NotAWorker, match="its worker does not answer tcp://, but tls://"):
        look_up(address.replace("tls", "tcp"))


def test_lookups_survive_that_no_more_files_can_be_opened() -> None:
    said = list[str]()
    address = f"tls://127.0.0.1:{free_port('127.0.0.1')}"
    answer_lookups(listen_at(address), lambda: "tls://127.0.0.1:4711", said.append)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as first, socket.socket() as second:
        for caller in (first, second):
            caller.settimeout(60)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        try:
            for caller in (first, second):  # the kernel may have a file in hand for the first
                caller.connect(("127.0.0.1", split_address(address)[2]))
            deadline = time.monotonic() + 60
            while not said and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for caller in (first, second):
            assert caller.recv(64) == b"titan_rl tls 4711\n", "it was kept waiting"
    assert look_up(address) == "tls://127.0.0.1:4711"
    assert said == [
        f"a run that asks where this worker serves is not answered, and waits: {os.strerror(errno.EMFILE)}"
    ], "the reason is said once"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"titan_rl tls port\n", b"x" * 1000])
def test_another_listener_is_named(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def speak() -> None:
            caller, _ = other.accept()
            with caller:
                caller.sendall(said)

        threading.Thread(target=speak).start()
        with pytest.raises(NotAWorker, match="does not answer as a worker"):
            look_up(f"tls://127.0.0.1:{other.getsockname()[1]}", 5)


def test_a_silent_listener_may_only_be_busy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(TimeoutError):
        look_up(f"tls://127.0.0.1:{other.getsockname()[1]}", 0.1)


@pytest.mark.parametrize("address", ["tls://node1:26600", "tcp://10.0.0.7:1", "tls://[fd00::1]:26600"])
def test_an_address_is_put_together_as_it_was_taken_apart(address: str) -> None:
    assert address_of(*split_address(address)) == address


@pytest.mark.parametrize(
    ("host", "resolved", "found"),
    [
        (
            "node2",
            "127.0.1.1",
            "an address that other hosts reach, found node2 -> 127.0.1.1 (/etc/hosts); use an IP, or",
        ),
        ("node2.cluster", "127.0.1.1", "an address that other hosts reach, found node2.cluster -> 127.0.1.1"),
        ("node3", "192.0.2.3", "a name or an address of this host, found node3 -> 192.0.2.3, where it cannot listen"),
        ("192.0.2.3", "192.0.2.3", "a name or an address of this host, found 192.0.2.3, where it cannot listen"),
        ("node2", "127.0.0.1", "an address that other hosts reach"),
        ("localhost", "127.0.0.1", ""),
        ("127.0.0.1", "127.0.0.1", ""),
        ("one-machine", "127.0.0.1", ""),
    ],
)
def test_an_address_that_other_hosts_cannot_reach_is_refused(
    host: str, resolved: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On node2, as Debian's installer names it in /etc/hosts."""
    lookup = socket.getaddrinfo
    monkeypatch.setattr(socket, "gethostname", lambda: "node2")
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest, **options: lookup(resolved, *rest, **options))
    assert unreachable(host, "use an IP").startswith(f"expected {found}" if found else "")
    assert bool(unreachable(host, "use an IP")) == bool(found)
