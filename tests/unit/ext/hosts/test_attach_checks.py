"""What is refused before a run joins workers: addresses, and transport that is not safe."""

from pathlib import Path
from typing import Any

import pytest

from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load
from titan_rl.ext.hosts.certificates import make_certificates
from titan_rl.ext.hosts.checks import missing_addresses
from titan_rl.preflight.checks import checked_run, problems, warnings
from titan_rl.run import check_and_run


def attached(addresses: str, **keys: object) -> Config:
    flags = [(key.replace("__", "."), str(value)) for key, value in keys.items()]
    return load(find("grpo_llama"), [("hosts.kind", "attach"), ("hosts.addresses", addresses), *flags])


@pytest.mark.parametrize(
    ("addresses", "keys", "expected"),
    [
        ("tls://a:1,tls://b:1", {"hosts__count": 3}, "hosts.addresses: expected 3, where workers wait"),
        ("tls://a:1,tls://a:1", {}, "hosts.addresses: expected each address once"),
        ("a:1", {}, 'expected addresses such as "tls://node1:26600", found "a:1"'),
        ("ipc://a:1", {}, 'expected addresses such as "tls://node1:26600", found "ipc://a:1"'),
        ("tcp://a:1", {}, "hosts.insecure: expected true, because tcp:// has no encryption"),
        ("tls://a:1,tcp://b:1", {"hosts__insecure": True}, "expected all of them with tls://, or all with tcp://"),
        ("tls://a:1", {"hosts__ports": "26700"}, "hosts.ports: expected at least 6 ports from 1 to 65535, such as"),
        ("", {"hosts__kind": "local", "hosts__ports": "1-9"}, 'hosts.ports: expected "" with hosts.kind = "local"'),
        ("tcp://a:1", {"hosts__insecure": True, "hosts__isolation": "require"}, 'hosts.isolation: expected "auto" or'),
    ],
)
def test_one_problem(tmp_path: Path, addresses: str, keys: dict[str, object], expected: str) -> None:
    make_certificates(tmp_path, ["head"])
    (problem,) = problems(attached(addresses, hosts__tls=tmp_path / "head", **keys))
    assert expected in problem


def test_without_a_sound_certificate_there_is_no_run(tmp_path: Path) -> None:
    (problem,) = problems(attached("tls://a:1"))
    assert problem.startswith("hosts.tls: expected a folder with a certificate")
    (problem,) = problems(attached("tls://a:1", hosts__tls=tmp_path))
    assert problem.startswith("hosts.tls: expected ca.pem, cert.pem and key.pem as PEM in")
    make_certificates(tmp_path, ["head"], days=-1)
    expired = list(problems(attached("tls://a:1", hosts__tls=tmp_path / "head")))
    assert ["to be valid now" in problem for problem in expired] == [True, True], "the certificate, and the CA"
    make_certificates(tmp_path / "sound", ["head"])
    assert problems(attached("tls://a:1", hosts__tls=tmp_path / "sound" / "head")) == []


def test_workers_that_ssh_shall_start_need_ssh_and_certificates(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["head", "a"])
    keys = {"hosts__kind": "ssh", "hosts__tls": tmp_path / "head", "hosts__ssh": "sh -c"}
    assert problems(attached("tls://a:1", **keys)) == []
    (problem,) = problems(attached("tls://a:1,tls://b:1", **keys))
    assert problem.startswith(f"hosts.tls: expected the certificate of b in {tmp_path}/b, next to this machine's")
    (problem,) = problems(attached("tls://a:1", **keys | {"hosts__ssh": "no-such-ssh -p 22"}))
    assert problem == 'hosts.ssh: expected a program on PATH, found none named by "no-such-ssh -p 22"'
    (problem,) = problems(attached("tls://a:1", **keys | {"hosts__ssh": "ssh '"}))
    assert problem.startswith("hosts.ssh: expected a command")
    (missing,) = missing_addresses(attached("", **keys | {"hosts__count": 2}).hosts)
    assert missing == "hosts.addresses: expected 2, where workers shall listen, such as tls://node1:26600, found 0"


def test_what_is_not_encrypted_is_said() -> None:
    plain = " ".join(warnings(attached("tcp://a:1", hosts__insecure=True)))
    assert "executes code as you" in plain
    assert "gloo, NCCL" in plain
    safe = " ".join(warnings(attached("tls://a:1")))
    assert "executes code as you" not in safe
    assert "gloo, NCCL" in safe
    assert "gloo" not in " ".join(warnings(load(find("grpo_llama"))))


def test_a_dry_run_needs_no_workers(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", "grpo_llama", "--hosts.kind", "attach", "--hosts.count", "2"]
    assert checked_run([*argv, "--dry-run"]).config.hosts.number == 2
    nothing: Any = object()  # fork servers, which a refused run does not use
    with pytest.raises(SystemExit):
        check_and_run(argv, nothing)
    assert "hosts.addresses: expected 2, where workers wait" in capsys.readouterr().err
    assert list(missing_addresses(attached("tls://a:1").hosts)) == []
