"""Certificates of a small cluster: `make_certificates` issues them, `certificate_problems` checks a host's.

    FOLDER/ca.key                            signs certificates; keep it off the hosts
    FOLDER/HOST/{ca,cert,key}.pem            to copy to each host: hosts.tls, or --tls of its worker

Both ends of each connection show a certificate, and refuse one that another CA signed or that has expired.
"""

import ipaddress
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"
CLOCK_TOLERANCE = timedelta(days=1)  # a host's clock may be slow, by hours if its time zone is wrong


def make_certificates(folder: Path, hosts: Sequence[str], days: float = 365) -> None:
    """Make a CA in `folder` unless it has one, and a certificate for each host: a name or an IP address."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / "ca.key").exists():
        key = ec.generate_private_key(ec.SECP256R1())
        name = _named("titan_rl CA")
        ca = _signed(name, name, key, key, days, [x509.BasicConstraints(ca=True, path_length=0)])
        _write(folder / "ca.key", _pem_of(key))
        _write(folder / CA, ca.public_bytes(serialization.Encoding.PEM))
    key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    ca = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    for host in hosts:
        host_key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_general(host)])
        uses = x509.ExtendedKeyUsage([x509.OID_SERVER_AUTH, x509.OID_CLIENT_AUTH])
        signed = _signed(_named(host), ca.subject, host_key, key, days, [names, uses])
        (folder / host).mkdir(mode=0o700, exist_ok=True)
        _write(folder / host / KEY, _pem_of(host_key))
        _write(folder / host / CERT, signed.public_bytes(serialization.Encoding.PEM))
        _write(folder / host / CA, ca.public_bytes(serialization.Encoding.PEM))


def certified_names(folder: Path) -> list[str]:
    """Return the names and IP addresses that a host's certificate is for."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate((folder / CERT).read_bytes())
    found = (each.value for each in certificate.extensions if isinstance(each.value, x509.SubjectAlternativeName))
    return [str(name.value) for names in found for name in names]


def is_certified(host: str, names: Sequence[str]) -> bool:
    """Return True if these names of a certificate, or one that begins with "*.", cover a host."""
    host = host.lower()
    return bool({host, f"*.{host.partition('.')[2]}"} & {name.lower() for name in names})


def certificate_problems(folder: Path, now: datetime | None = None, host: str = "") -> Iterator[str]:
    """Yield the problems of a host's files: one is missing, expired, or has another CA or key, or is another host's."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization

    now = now or datetime.now(UTC)
    try:
        certificate, ca = (x509.load_pem_x509_certificate((folder / file).read_bytes()) for file in (CERT, CA))
        key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        found = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        yield f"expected {CA}, {CERT} and {KEY} as PEM in {folder}, found {found}"
        return
    for file, each in ((CERT, certificate), (CA, ca)):
        if not each.not_valid_before_utc <= now <= each.not_valid_after_utc:
            valid = f"{each.not_valid_before_utc:%Y-%m-%d} to {each.not_valid_after_utc:%Y-%m-%d}"
            yield f"expected {folder / file} to be valid now, found {valid}"
    names = certified_names(folder)
    if not names or (host and not is_certified(host, names)):
        found = " and ".join(names) or "no host"
        yield f"expected {folder / CERT} to be the certificate of {host or 'a host'}, found one of {found}"
    if key.public_key() != certificate.public_key():
        yield f"expected the key of {folder / CERT} in {folder / KEY}, found another"
    try:
        certificate.verify_directly_issued_by(ca)
    except (InvalidSignature, ValueError, TypeError):
        yield f"expected {folder / CERT} to be signed by {folder / CA}, found another CA"
    if (folder / KEY).stat().st_mode & 0o077 or (folder / KEY).stat().st_uid != os.getuid():
        yield f"expected {folder / KEY} to be this user's, with mode 0600, found a file that others may read"


def _named(name: str) -> "x509.Name":
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.OID_COMMON_NAME, name[:64])])


def _general(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _signed(
    subject: "x509.Name",
    issuer: "x509.Name",
    key: "EllipticCurvePrivateKey",
    by: "EllipticCurvePrivateKey",
    days: float,
    extensions: "Iterable[x509.ExtensionType]",
) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(min(now, now + timedelta(days=days)) - CLOCK_TOLERANCE)
    builder = builder.not_valid_after(now + timedelta(days=days))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return builder.sign(by, hashes.SHA256())


def _pem_of(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


def _write(path: Path, pem: bytes) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(pem)
