"""The same run on one host and on several: workers on this machine that stand for hosts."""

import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.outputs import losses, same, sampled
from support.running import Run, Runs
from support.worker_hosts import hosts_of
from titan_rl.ext.hosts.certificates import make_certificates
from titan_rl.ext.hosts.worker_address import split_address, takes_connections
from titan_rl.train.regrowth import STEADY

KEYS: dict[str, Any] = {
    "cold_start__steps": 3,
    "training__steps": 8,
    "generator__replicas": 2,
    "hosts__threads": 0,  # they follow from the cores
}
THREE = {"hosts__count": 3, "placement__hosts": '{trainer = "0-1", generator = "1-2"}'}
TOGETHER = {"hosts__count": 3, "hosts__slots": 1, "placement__kind": "colocated"}


@dataclass
class Cluster:
    folder: Path
    addresses: list[str]
    workers: "list[subprocess.Popen[str]]"

    @property
    def keys(self) -> dict[str, Any]:
        return {
            "hosts__kind": "attach",
            "hosts__addresses": ",".join(self.addresses),
            "hosts__tls": str(self.folder / "127.0.0.1"),
            "hosts__orphan_seconds": 4,
            "placement__hosts": THREE["placement__hosts"],
        }

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of runs on these hosts."""
        serving = [child for worker in self.workers for child in psutil.Process(worker.pid).children()]
        return [each for child in serving for each in child.children(recursive=True)]

    def joined(self, number: int) -> bool:
        """Return True if a run has an agent on this host."""
        return any(serving.children() for serving in psutil.Process(self.workers[number].pid).children())

    def listening(self, run: Run) -> set[str]:
        """Return the addresses, as the kernel writes them, at which a process of the run or the workers listens."""
        pids = [run.process.pid, *(worker.pid for worker in self.workers), *(each.pid for each in self.ranks())]
        pids += [child.pid for worker in self.workers for child in psutil.Process(worker.pid).children()]
        inodes = {os.readlink(path) for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
        found = set[str]()
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.add(fields[1].partition(":")[0])
        assert len(found) >= len(self.workers), "the workers' own"
        return found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Runs().finish(tmp_path_factory.mktemp("local") / "run", **KEYS)


def test_three_processes_as_hosts_change_no_bit(runs: Runs, local: Run, tmp_path: Path) -> None:
    keys = {**KEYS, "hosts__kind": "processes", **THREE}
    run = runs.finish(tmp_path / "run", **keys)
    assert same(run, local)
    assert {path.name for path in (run.folder / "hosts").iterdir()} == {"host0.log", "host1.log", "host2.log"}


def back(run: Run) -> set[str]:
    """Return what the run has lost and got back."""
    path = run.folder / "faults.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["who"] for line in lines if line["outcome"] == "back"}


@pytest.mark.parametrize(
    ("placed", "lost", "ranks"),
    [(TOGETHER, 0, ["trainer[dp=0 tp=0]", "generator0[tp=0]"]), (THREE, 2, ["generator1[tp=0]"])],
)
def test_a_lost_host_costs_no_bit(
    runs: Runs,
    local: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    placed: dict[str, Any],
    lost: int,
    ranks: list[str],
) -> None:
    """Its ranks are started again on the others, and the run continues from a snapshot in
    memory."""
    held = tmp_path / "held"
    monkeypatch.setenv("HELD_REWARD", str(held))
    keys = {**KEYS, "hosts__kind": "processes", **placed, "fault__snapshot_interval": 1}
    run = runs.start(tmp_path / "run", **keys, task__reward="held_reward:exact")
    run.wait_for_step(1)
    held.touch()
    workers = [each for each in psutil.Process(run.process.pid).children() if "titan_rl.worker" in each.cmdline()]
    (worker,) = (each for each in workers if f"/h{lost}/" in " ".join(each.cmdline()))
    worker.kill()
    while not {rank.partition("[")[0] for rank in ranks} <= back(run):
        assert run.process.poll() is None, run.finish()
        time.sleep(0.1)
    held.unlink()
    out = run.finish()
    assert run.code == 0, out
    for rank in ranks:
        assert f"{rank} died" in out, out
    assert same(run, local, accuracy=1e-5)  # fewer replicas have larger batches


def test_ranks_are_where_the_plan_says_and_end_with_the_controller(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run", **{**KEYS, "training__steps": 1000, "hosts__kind": "processes", **THREE})
    run.wait_for_step(1)
    mine = psutil.Process(run.process.pid).children(recursive=True)
    assert hosts_of(run.process.pid) == {
        "trainer[dp=0 tp=0]": "h0",
        "trainer[dp=1 tp=0]": "h1",
        "generator0[tp=0]": "h1",
        "generator1[tp=0]": "h2",
    }
    run.process.kill()
    run.finish()
    _, left = psutil.wait_procs(mine, timeout=60)
    assert not left


def start_worker(folder: Path, address: str, tls: Path | None) -> "subprocess.Popen[str]":
    """Start a worker as a user does, and return once it waits."""
    command = [sys.executable, "-m", "titan_rl.worker", "--address", address]
    command += ["--tls", str(tls)] if tls else ["--insecure"]
    log = folder / f"worker-{address.rpartition(':')[2]}.log"
    with open(log, "w") as output:
        worker = subprocess.Popen(command, stdout=output, stderr=output, text=True)
    deadline = time.monotonic() + 120
    while "worker at" not in log.read_text() or not takes_connections(address, 5):
        assert worker.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return worker


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts on the loopback device, each with an address and a certificate."""
    folder = tmp_path_factory.mktemp("cluster")
    names = [f"127.0.0.{n}" for n in (1, 2, 3, 4)]
    make_certificates(folder, names)
    addresses = []
    workers = []
    try:
        for name in names[1:]:
            with socket.create_server((name, 0)) as free:
                addresses.append(f"tls://{name}:{free.getsockname()[1]}")
            workers.append(start_worker(folder, addresses[-1], folder / name))
        yield Cluster(folder, addresses, workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_attached_workers_change_no_bit_and_serve_the_next_run(
    runs: Runs, local: Run, cluster: Cluster, tmp_path: Path
) -> None:
    """And nothing of it listens at any other address than the hosts' own."""
    run = runs.start(tmp_path / "run", **{**KEYS, **cluster.keys})
    run.wait_for_step(1)
    hosts = {socket.inet_ntoa(struct.pack("=I", int(address, 16))) for address in cluster.listening(run)}
    assert hosts <= {"127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"}
    out = run.finish()
    assert run.code == 0, out
    assert same(run, local)
    killed = runs.start(tmp_path / "killed", **{**KEYS, **cluster.keys, "training__steps": 1000})
    killed.wait_for_step(1)
    mine = cluster.ranks()
    assert len(mine) >= 4
    killed.process.kill()
    killed.finish()
    _, left = psutil.wait_procs(mine, timeout=60)
    assert not left, "ranks outlive their run by hosts.orphan_seconds at most"


def restart_worker(cluster: Cluster, run: Run) -> None:
    """Kill the first worker, start it again at the same address, and wait until the run has joined it."""
    cluster.workers[0].kill()
    cluster.workers[0].wait()
    address = cluster.addresses[0]
    cluster.workers[0] = start_worker(cluster.folder, address, cluster.folder / split_address(address)[1])
    while not cluster.joined(0):
        assert run.process.poll() is None, run.finish()
        time.sleep(0.1)


def test_an_attached_host_that_is_lost_is_done_without_and_taken_back(
    runs: Runs, local: Run, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with a trainer, whose mesh moves. Its worker is started again at the same address."""
    held = tmp_path / "held"
    monkeypatch.setenv("HELD_REWARD", str(held))
    keys = {**KEYS, **cluster.keys, "fault__snapshot_interval": 1, "task__reward": "held_reward:exact"}
    run = runs.start(tmp_path / "run", **keys)
    run.wait_for_step(1)
    held.touch()
    restart_worker(cluster, run)
    address = cluster.addresses[0]
    held.unlink()
    out = run.finish()
    assert run.code == 0, out
    assert f"its host {address} does not answer" in " ".join(out.split()), out
    assert "trainer is back after" in out, out
    assert f"{address} is back: its slots are free" in " ".join(out.split()), out
    assert same(run, local, accuracy=1e-5)  # fewer replicas have larger batches


def test_a_trainer_without_room_for_all_rows_continues_with_fewer_until_its_host_is_back(
    runs: Runs, local: Run, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two hosts have room for the trainer and the replica only."""
    held = tmp_path / "held"
    monkeypatch.setenv("HELD_REWARD", str(held))
    detect_seconds = 1.0
    own = {"hosts__addresses": ",".join(cluster.addresses[:2]), "hosts__slots": 2, "generator__replicas": 1}
    placed = {"placement__hosts": '{trainer = "0-1", generator = "1"}', "fault__min_trainers": 1}
    keys = {**KEYS, **cluster.keys, **own, **placed, "fault__detect_seconds": detect_seconds}
    run = runs.start(tmp_path / "run", **keys, task__reward="held_reward:exact", fault__snapshot_interval=1)
    run.wait_for_step(3)
    held.touch()
    restart_worker(cluster, run)
    time.sleep(STEADY * detect_seconds)  # while the run waits for its rewards: then the host counts as one that stays
    held.unlink()
    out = " ".join(run.finish().split())
    assert run.code == 0, out
    shrunk = re.search(r"trainer is back after \S+ s: the run continues after step \d+ with 1 of 2 dp rows", out)
    grown = re.findall(r"trainer: started again after step (\d+), with 2 instead of 1 dp rows", out)
    assert shrunk, out
    assert len(grown) == 1, out
    (saved,) = (line for line in run.lines("metrics.jsonl") if line["step"] == int(grown[0]))
    assert all(line["time"] < saved["time"] for line in run.lines("metrics.superseded.jsonl")), "no step is repeated"
    found, expected = losses(run), losses(local)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), "sums of floats in another order"
    assert [each[:3] for each in sampled(run)] == [each[:3] for each in sampled(local)], "the same rollouts"
    audit = subprocess.run([sys.executable, "-m", "titan_rl", "audit", str(run.folder)], capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_a_peer_without_a_certificate_of_this_ca_gets_nothing(runs: Runs, cluster: Cluster, tmp_path: Path) -> None:
    make_certificates(tmp_path / "strange", ["127.0.0.1"])
    keys = {**KEYS, **cluster.keys, "placement__hosts": "{}"}
    strange = runs.start(tmp_path / "run", **{**keys, "hosts__tls": str(tmp_path / "strange" / "127.0.0.1")})
    out = strange.finish()
    assert strange.code == 1, out
    number = len(cluster.addresses)
    assert f"{number} of {number} hosts did not join" in out
    assert "cannot be joined: TLS fails: certificate signature failure" in " ".join(out.split()), "at once"
    elsewhere = runs.start(tmp_path / "elsewhere", **{**keys, "hosts__own_address": "192.0.2.1"})
    out = elsewhere.finish()
    assert elsewhere.code == 2, out
    assert "  - hosts.own_address: expected a name or an address of this host, found 192.0.2.1" in out
    assert "Traceback" not in out
    plain = cluster.addresses[0].replace("tls://", "tcp://")
    keys |= {"hosts__addresses": plain, "hosts__insecure": True, "hosts__tls": ""}
    run = runs.start(tmp_path / "plain", **keys)
    out = run.finish()
    assert run.code == 1, out
    assert "its worker does not answer tcp://, but tls://" in " ".join(out.split())


def test_a_run_starts_its_workers_through_ssh_and_ends_them(
    runs: Runs, local: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ssh here runs on this machine what a shell on the host would run."""
    addresses = []
    make_certificates(tmp_path / "tls", ["127.0.0.1", "127.0.0.2", "127.0.0.3"])
    for name in ("127.0.0.2", "127.0.0.3"):
        with socket.create_server((name, 0)) as free:
            addresses.append(f"tls://{name}:{free.getsockname()[1]}")
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n[ "$1" != "$REFUSES" ] || { echo "Permission denied (publickey)." >&2; exit 255; }\n')
    with open(ssh, "a") as script:
        script.write('cd / && exec sh -c "$2"\n')
    ssh.chmod(0o700)
    keys = {
        **KEYS,
        "hosts__kind": "ssh",
        "hosts__ssh": str(ssh),
        "hosts__addresses": ",".join(addresses),
        "hosts__tls": str(tmp_path / "tls" / "127.0.0.1"),
        "placement__hosts": '{trainer = "0-1", generator = "0-1"}',
    }
    run = runs.start(tmp_path / "run", **keys)
    run.wait_for_step(1)
    mine = [each for each in psutil.process_iter() if str(tmp_path / "tls" / "127.0.0.") in " ".join(cmdline(each))]
    workers = [each for each in mine if "titan_rl.worker" in cmdline(each)]
    assert len(workers) == 2
    everything = [*workers, *(child for worker in workers for child in worker.children(recursive=True))]
    out = run.finish()
    assert run.code == 0, out
    assert same(run, local)
    _, left = psutil.wait_procs(everything, timeout=60)
    assert not left, "the run's end is theirs"

    monkeypatch.setenv("REFUSES", "127.0.0.3")
    refused = runs.start(tmp_path / "refused", **keys)
    out = " ".join(refused.finish().split())
    assert refused.code == 1, out
    assert f"1 of 2 workers did not start: {addresses[1]}: {ssh} 127.0.0.3 ended with exit code 255" in out
    assert f"{addresses[1]}: Permission denied (publickey)." in out


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it ended
        return []
