"""A worker whose address another worker has, and the messages of its run."""

import errno
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_rl import worker
from titan_rl.config.sections import HostsSection
from titan_rl.ext.hosts.host_worker import listen_when_free, main
from titan_rl.ext.hosts.ssh_workers import ssh_workers
from titan_rl.ext.hosts.worker_address import RUN, Holder, holder_in
from titan_rl.wire.parts import PARTS
from titan_rl.wire.ports import free_port
from titan_rl.wire.program import USAGE

OTHER = """
import socket, subprocess, sys, time
sleeps = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()", "--parent"]
serves = subprocess.Popen(sleeps, env={"TMPDIR": sys.argv[2]}, stdin=subprocess.PIPE)
door = socket.create_server(("127.0.0.1", int(sys.argv[1])))
sys.stdin.read()
"""


class OtherWorker:
    """A process that looks like a worker; the file in its folder names the run that it serves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port("127.0.0.1")
        self.tell(again=-60, ends=600)
        command = [sys.executable, "-c", OTHER, str(self.port), str(folder), "titan_rl.worker"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def tell(self, again: float, ends: float) -> None:
        """Say when the run's controller will have asked again, and when the run ends, in seconds from now."""
        now = time.monotonic()
        draft = self.folder / "draft"
        draft.write_text(json.dumps(Holder("the run in /a", now + again, now + ends)._asdict()))
        draft.rename(self.folder / RUN)

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[OtherWorker]:
    worker = OtherWorker(tmp_path)
    yield worker
    worker.end()


def test_a_worker_waits_for_one_whose_controller_is_silent(other: OtherWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()  # capfd loses a line that another thread prints while it is read
    monkeypatch.setattr(sys, "stdout", printed)
    address = f"tcp://127.0.0.1:{other.port}"
    with pytest.raises(OSError, match="Address already in use"):
        listen_when_free(address, waits=False)
    opened = list[int]()

    def wait() -> None:
        with listen_when_free(address, waits=True) as door:
            opened.append(door.getsockname()[1])

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    deadline = time.monotonic() + 60
    while "\n" not in printed.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    whose = f"another worker, process {other.process.pid}, has it for the run in /a, whose controller is silent"
    other.end()
    waiting.join(60)
    assert opened == [other.port]
    assert printed.getvalue() == f"waiting for {address}: {whose}\n", "it is printed once"


def test_a_worker_does_not_wait_for_a_run_that_is_alive(other: OtherWorker) -> None:
    def ask_again() -> None:
        for again in range(200):
            if ended.wait(0.05):
                return
            other.tell(again, 600)

    ended = threading.Event()
    asking = threading.Thread(target=ask_again)
    asking.start()
    try:
        with pytest.raises(
            OSError, match="has it for the run in /a: wait for its end, stop it, or use another"
        ) as error:
            listen_when_free(f"tcp://127.0.0.1:{other.port}", waits=True)
        assert error.value.errno == errno.EADDRINUSE
    finally:
        ended.set()
        asking.join()


def test_what_cannot_be_read_of_a_run_is_another_one(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text('{"run": "the run in /a"}')
    assert holder_in(tmp_path) == Holder("another run", 0.0, 0.0)
    assert holder_in(tmp_path).silent


async def test_a_run_says_once_which_worker_that_it_started_waits(tmp_path: Path) -> None:
    """The ssh here is a script: its worker waits until the run has said so."""
    ssh, said = tmp_path / "ssh", list[str]()
    ssh.write_text(
        '#!/bin/sh\naddress=tcp://127.0.0.1:26600\necho "waiting for $address: process 7 has it"\n'
        f'while [ ! -e {tmp_path}/go ]; do sleep 0.05; done\necho "worker at $address"\ncat\n'
    )
    ssh.chmod(0o700)
    hosts = HostsSection(kind="ssh", ssh=str(ssh), addresses=["tcp://127.0.0.1:26600"], insecure=True)

    def say(message: str) -> None:
        said.append(message)
        (tmp_path / "go").touch()

    async with ssh_workers(hosts, tmp_path / "logs", say):
        pass
    (message,) = said
    assert message.startswith("waiting for tcp://127.0.0.1:26600, for at most "), message
    assert message.endswith(" s (hosts.join_seconds = 60): process 7 has it"), message


def test_certificates_are_made_for_named_hosts_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--init-tls", str(tmp_path / "tls")]) == USAGE
    assert "--hosts: expected the names or IPs of the hosts" in capsys.readouterr().err
    assert not (tmp_path / "tls").exists()


def test_without_the_part_no_worker_starts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(PARTS, "worker", "ext.gone.worker:main")
    assert worker.main() == USAGE
    assert "expected an installation with titan_rl/ext/gone (worker), found one without" in capsys.readouterr().err
