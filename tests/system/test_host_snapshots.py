"""Hosts that cannot map the controller's memory: workers in separate PID namespaces, as containers are.
Snapshot servers hold the snapshots of their trainers."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.outputs import same
from support.rank_launchers import launched
from support.running import Runs
from titan_rl.ext.fork_servers.fork_servers import OFF, VARIABLE
from titan_rl.ext.hosts.worker_address import takes_connections

pytestmark = pytest.mark.root

ALONE = ["unshare", "--kill-child", "--pid", "--fork", "--mount-proc"]
KEYS: dict[str, Any] = {
    "cold_start__steps": 2,
    "training__steps": 8,
    "eval__size": 0,
    "checkpoint__interval": 1000,
    "fault__snapshot_interval": 1,
}
SECONDS = 120.0


def why_not() -> str:
    """Return why no PID namespace can be made here, or ""."""
    tried = subprocess.run([*ALONE, "true"], capture_output=True, text=True)
    return f"needs root, for PID namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """A worker that is process 1 of a PID namespace, which ends with it."""

    def __init__(self, folder: Path, name: str) -> None:
        with socket.create_server((name, 0)) as free:
            self.address = f"tcp://{name}:{free.getsockname()[1]}"
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "titan_rl.worker", "--address", self.address, "--insecure"]
        with open(self.log, "w") as output:
            self.process = subprocess.Popen(
                [*ALONE, *command],
                stdout=output,
                stderr=output,
                env={**os.environ, VARIABLE: OFF},  # the fork servers of the tests are in another namespace
            )

    def joined(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not takes_connections(self.address, 5):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def lose(self) -> None:
        """Kill all of its processes."""
        self.process.kill()
        self.process.wait()

    def ranks(self, mesh: str) -> list[int]:
        """Return the pids, here, of a mesh's processes on this host."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        return [pid for _, name, pid in launched(started) if name.startswith(mesh)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:
        found: list[Host] = []
        for number in (2, 3, 4):
            found.append(Host(tmp_path, f"127.0.0.{number}"))
            stack.callback(found[-1].lose)
        for host in found:
            host.joined()
        yield found


def test_a_host_that_is_lost_with_its_trainer_costs_no_bit(runs: Runs, hosts: list[Host], tmp_path: Path) -> None:
    """Nothing is on disk: its rank is restored on another host, from the copy that a third one has. A server that died
    before has been replaced."""
    local = runs.start(tmp_path / "local", **KEYS)
    keys = {
        "hosts__kind": "attach",
        "hosts__addresses": ",".join(host.address for host in hosts),
        "hosts__insecure": True,
        "placement__hosts": '{trainer = "0-1", generator = "2"}',
    }
    run = runs.start(tmp_path / "run", **KEYS, **keys)
    run.wait_for_step(1)
    (server,) = hosts[0].ranks("snapshots")
    os.kill(server, signal.SIGKILL)
    run.wait_for_step(4)
    assert not list(run.folder.glob("checkpoint/step-*")), "none is due before the last step"
    hosts[1].lose()
    out = " ".join(run.finish().split())
    assert run.code == 0, out
    assert f"copies of {hosts[0].address}'s on {hosts[1].address}, of {hosts[1].address}'s on {hosts[2].address}" in out
    assert f"its host {hosts[1].address} does not answer" in out, out
    back = re.search(r"trainer is back after [\d.]+ s: the run continues after step (\d+)(?:; (\d+) step)?", out)
    assert back is not None, out
    assert int(back[1]) >= 1, out
    assert int(back[2] or 0) <= 1 or "is still being copied" in out, out
    undisturbed = local.finish()
    assert local.code == 0, undisturbed
    assert same(run, local)
    audit = [sys.executable, "-m", "titan_rl", "audit", str(run.folder)]
    audited = subprocess.run(audit, capture_output=True, text=True, timeout=SECONDS)
    assert audited.returncode == 0, audited.stdout
