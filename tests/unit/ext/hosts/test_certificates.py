"""Certificates that `--init-tls` makes, and their problems."""

import shutil
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from titan_rl.ext.hosts.certificates import certificate_problems, certified_names, is_certified, make_certificates
from titan_rl.ext.hosts.host_worker import refusals
from titan_rl.ext.hosts.worker_address import split_address, takes_connections, why_silent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of 127.0.0.1 and another host; one that has expired; one of another CA."""
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder, ["127.0.0.1", "node1"])
    (folder / "expired").mkdir()
    for file in ("ca.pem", "ca.key"):
        shutil.copy(folder / file, folder / "expired" / file)
    make_certificates(folder / "expired", ["127.0.0.1"], days=-1)
    make_certificates(folder / "strange", ["127.0.0.1"])
    return folder


def test_a_host_gets_its_certificate_and_key_which_no_other_user_reads(folder: Path) -> None:
    for name in ("127.0.0.1", "node1"):
        assert list(certificate_problems(folder / name)) == []
        assert certified_names(folder / name) == [name]
        assert {path.name for path in (folder / name).iterdir()} == {"ca.pem", "cert.pem", "key.pem"}
    assert (folder / "ca.key").stat().st_mode & 0o077 == 0
    assert (folder / "node1" / "cert.pem").read_bytes() != (folder / "127.0.0.1" / "cert.pem").read_bytes()


def test_a_second_call_keeps_the_ca(folder: Path) -> None:
    before = (folder / "ca.pem").read_bytes()
    make_certificates(folder, ["node2"])
    assert (folder / "ca.pem").read_bytes() == before
    assert list(certificate_problems(folder / "node2")) == []


def test_each_thing_that_is_wrong_is_named(folder: Path, tmp_path: Path) -> None:
    assert "to be valid now, found" in next(certificate_problems(folder / "expired/127.0.0.1"))
    later = datetime.now(UTC) + timedelta(days=400)
    assert len(list(certificate_problems(folder / "node1", later))) == 2, "the certificate, and the CA"
    assert "No such file" in next(certificate_problems(tmp_path / "none"))
    for name, source, expected in (
        ("key.pem", folder / "node1", "expected the key of"),
        ("ca.pem", folder / "strange" / "127.0.0.1", "found another CA"),
        ("cert.pem", Path(__file__).parent, "as PEM in"),
    ):
        mixed = tmp_path / name
        mixed.mkdir()
        for file in ("ca.pem", "cert.pem", "key.pem"):
            (mixed / file).write_bytes((folder / "127.0.0.1" / file).read_bytes())
            (mixed / file).chmod(0o600)
        other = source / name if (source / name).exists() else Path(__file__)
        (mixed / name).write_bytes(other.read_bytes())
        assert expected in "".join(certificate_problems(mixed)), name
    open_key = folder / "node1" / "key.pem"
    open_key.chmod(0o644)
    assert "mode 0600" in next(certificate_problems(folder / "node1"))
    open_key.chmod(0o600)


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", "the certificates are accepted"),
        ("expired/127.0.0.1", "127.0.0.1", "certificate has expired"),
        ("strange/127.0.0.1", "127.0.0.1", "certificate signature failure"),
        ("node1", "127.0.0.1", "IP address mismatch"),
        ("127.0.0.1", "expired/127.0.0.1", "EXPIRED"),
        ("127.0.0.1", "strange/127.0.0.1", ""),
    ],
)
def test_why_a_worker_is_silent_is_found_out(folder: Path, theirs: str, ours: str, expected: str) -> None:
    """A server that asks for certificates as a worker does."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / theirs / "ca.pem"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / theirs / "cert.pem", folder / theirs / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                try:
                    secure = context.wrap_socket(connection, server_side=True)
                except (ssl.SSLError, OSError):
                    return
                secure.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        why = why_silent(f"tls://127.0.0.1:{server.getsockname()[1]}", str(folder / ours))
    assert expected in why
    if not expected:
        assert "accepted" not in why


def test_a_name_that_resolves_to_nothing_and_a_port_without_a_worker_are_told_apart() -> None:
    assert "resolves to nothing" in why_silent("tcp://-no-such-host-.:26600")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert takes_connections(f"tcp://127.0.0.1:{port}", 5), "the kernel accepts"
    assert not takes_connections(f"tcp://127.0.0.1:{port}", 5)
    assert "nothing listens at 127.0.0.1" in why_silent(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address", ["", "node1:26600", "tls://node1", "tls://:1", "tls://node1:0", "tls://node1:70000", "ipc://x:1"]
)
def test_odd_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match=address.replace("[", r"\[") or "^$"):
        split_address(address)
    (problem,) = refusals(address, "", insecure=True)
    assert "--address: expected tls://NAME:PORT" in problem


def test_a_worker_without_certificates_does_not_start(folder: Path) -> None:
    assert "--insecure" in refusals("tcp://127.0.0.1:26600", "", insecure=False)[0]
    assert refusals("tcp://127.0.0.1:26600", "", insecure=True) == []
    assert "--tls: expected the folder" in refusals("tls://127.0.0.1:26600", "", insecure=True)[0]
    assert refusals("tls://127.0.0.1:26600", str(folder / "127.0.0.1"), insecure=False) == []
    assert "valid now" in refusals("tls://127.0.0.1:26600", str(folder / "expired/127.0.0.1"), insecure=False)[0]
    assert "-no-such-host-." in refusals("tcp://-no-such-host-.:1", "", insecure=True)[0]
    (problem,) = refusals("tls://localhost:26600", str(folder / "127.0.0.1"), insecure=False)
    assert problem.startswith("--tls: expected ")
    assert problem.endswith("cert.pem to be the certificate of localhost, found one of 127.0.0.1")


@pytest.mark.parametrize(
    ("host", "names", "covered"),
    [
        ("node1", ["node1", "10.0.0.1"], True),
        ("10.0.0.1", ["node1", "10.0.0.1"], True),
        ("Node1.cluster", ["*.cluster"], True),
        ("a.node1.cluster", ["*.cluster"], False),
        ("node1", ["node2"], False),
        ("node1", [], False),
    ],
)
def test_a_certificate_is_for_its_names(host: str, names: list[str], covered: bool) -> None:
    assert is_certified(host, names) == covered
