"""Runs across hosts that share nothing but a kernel and a file system, and whose links can be cut."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.namespaces import SeparateHost, Switch, why_not
from support.outputs import same
from support.running import Run, Runs
from titan_rl.ext.fork_servers.fork_servers import VARIABLE
from titan_rl.ext.hosts.certificates import make_certificates

pytestmark = pytest.mark.root

HOSTS = ("node1", "node2", "node3")
HEAD = "head"
KEYS: dict[str, Any] = {
    "cold_start__steps": 3,
    "training__steps": 16,
    "generator__replicas": 2,
    "task__reward": "held_reward:exact",
}
PORT = 26600
PORTS, HEAD_PORTS = range(26700, 26710), range(26800, 26806)  # at which workers serve runs, and runs their workers
DETECT_SECONDS = 4
WIDE: dict[str, Any] = {"model__dim": 512, "model__n_layers": 4, "model__hidden_dim": 1536, "algorithm__kl_coef": 0}
READ_BYTES = 40 << 20  # fewer than a replica reads of a version of such weights
FIRST_BYTES = 600  # more than a host gets, in the seconds after a cut, from machines that only look for its address
HOLD = "HOLD_WRITE"  # names a file: while it exists, the second trainer rank stops inside its part of a checkpoint
HOLDING = f"""
import os, pathlib, time
opened, held = pathlib.Path.open, os.environ.get("{HOLD}", "")
def open(self, mode="r", *args, **options):
    file = opened(self, mode, *args, **options)
    if "w" in mode and self.name == "__1_0.distcp" and os.path.exists(held):
        os.rename(held, held + ".reached")
        file.write(b"half of it")
        file.flush()
        while os.path.exists(held + ".reached"):
            time.sleep(0.05)
    return file
pathlib.Path.open = open
"""


class Cluster:
    """Three hosts with a worker each, and one for the controller."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.folder = folder
        self.switch = Switch(stack, folder / "hosts", [*HOSTS, HEAD])
        make_certificates(folder, [*HOSTS, HEAD])
        (folder / "sitecustomize.py").write_text(HOLDING)
        self.hold = folder / "hold"
        workers = {name: self.start_worker(name, stack) for name in HOSTS}
        for name, worker in workers.items():
            log = folder / f"{name}.log"
            wait_for(lambda log=log: "worker at" in log.read_text(), f"{name}'s worker", worker.poll)

    def host(self, name: str) -> SeparateHost:
        return self.switch.hosts[name]

    def start_worker(self, name: str, stack: ExitStack) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "titan_rl.worker", "--address", f"tls://{name}:{PORT}"]
        env = {key: value for key, value in os.environ.items() if key != VARIABLE}  # this host forks its own
        env |= {HOLD: str(self.hold), "PYTHONPATH": os.pathsep.join([str(self.folder), os.getcwd()])}
        command += ["--ports", f"{PORTS[0]}-{PORTS[-1]}"]
        with open(self.folder / f"{name}.log", "wb") as log:
            inside = self.host(name).command(*command, "--tls", str(self.folder / name))
            worker = subprocess.Popen(inside, stdout=log, stderr=log, env=env)
        stack.callback(worker.wait)
        stack.callback(worker.kill)
        return worker

    @property
    def keys(self) -> dict[str, Any]:
        return {
            "hosts__kind": "attach",
            "hosts__addresses": ",".join(f"tls://{name}:{PORT}" for name in HOSTS),
            "hosts__tls": str(self.folder / HEAD),
            "hosts__ports": f"{HEAD_PORTS[0]}-{HEAD_PORTS[-1]}",
            "hosts__orphan_seconds": 4,
            "placement__hosts": '{trainer = "0-1", generator = "1-2"}',
        }


def wait_for(condition: Callable[[], Any], what: str, ended: Callable[[], int | None], timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert ended() is None, f"it ended before {what}"
        assert time.monotonic() < deadline, f"{what}: not within {timeout:g} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Runs().finish(tmp_path_factory.mktemp("local") / "run", **KEYS)


class LiveOutput:
    """A run of the cluster whose output is read while it runs."""

    def __init__(self, cluster: Cluster, folder: Path, **keys: object) -> None:
        runs = Runs(cluster.host(HEAD).command())
        self.run = runs.start(folder, **{**KEYS, **cluster.keys, **keys})
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.run.process.stdout is not None
        self.lines += self.run.process.stdout  # line by line

    @property
    def output(self) -> str:
        return " ".join(" ".join(self.lines).split())

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        try:
            wait_for(condition, what, self.run.process.poll)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{''.join(self.lines)}") from None

    def incidents(self) -> list[dict[str, Any]]:
        """Return what the run has recorded of its losses: a line when one is noticed, and one when it is over."""
        return self.run.written("faults.jsonl")

    def __enter__(self) -> "LiveOutput":
        return self

    def __exit__(self, *exc: object) -> None:
        self.run.process.kill()
        self.run.process.wait()


def test_hosts_that_share_no_network_and_no_memory_change_no_bit(
    local: Run, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they listen at no other ports than docs/clusters.md lists."""
    held = tmp_path / "held"
    monkeypatch.setenv("HELD_REWARD", str(held))
    with LiveOutput(cluster, tmp_path / "run") as live:
        live.run.wait_for_step(1)
        held.touch()
        found = {name: cluster.host(name).reachable_ports() for name in (*HOSTS, HEAD)}
        held.unlink()
        code = live.run.process.wait(300)
    head, others = found.pop(HEAD), {name: ports - {PORT, *PORTS} for name, ports in found.items()}
    assert len(head) == 1
    assert head <= {*HEAD_PORTS}
    assert {name: len(ports) for name, ports in others.items()} == {"node1": 1, "node2": 1, "node3": 0}, "gloo's"
    meets = {name: len(ports & {*PORTS}) for name, ports in found.items()}
    assert meets == {"node1": 3, "node2": 2, "node3": 2}, "worker and agent, and the trainers meet on the first"
    assert code == 0, live.output
    assert same(live.run, local)
    assert "by RDMABuffer (TCP fallback) x 3, shared memory x 1" in live.output


def test_cut_hosts_are_replaced_and_taken_back_and_cost_no_bit(
    local: Run, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a generator's host, then a trainer's, for whose ranks there is room only on the one that came back. The
    link of each is whole again as soon as it is given up, while its ranks live on."""
    held = tmp_path / "held"
    monkeypatch.setenv("HELD_REWARD", str(held))
    first, second = cluster.host("node3"), cluster.host("node1")
    with LiveOutput(cluster, tmp_path / "run", hosts__slots=2, fault__detect_seconds=DETECT_SECONDS) as live:
        live.run.wait_for_step(1)
        held.touch()
        generator = cut_until_replaced(live, first, ["generator1"])
        live.wait_for(lambda: f"{first.name}:{PORT} is back: its slots are free" in live.output, "the first is back")
        assert not generator & first.pids(), "its ranks of before have ended"
        held.unlink()

        live.run.wait_for_step(4)
        held.touch()
        trainer = cut_until_replaced(live, second, ["trainer", "generator1"])
        assert not trainer & second.pids(), "replaced ranks publish and save nothing any more"
        assert set(first.ranks()) == {"trainer[dp=1 tp=0]", "generator1[tp=0]"}
        live.wait_for(lambda: f"{second.name}:{PORT} is back: its slots are free" in live.output, "the second is back")
        held.unlink()
        assert resumed_after(live, local) >= 2, "it resumes from a checkpoint of this run"
    silences = [float(found) for found in re.findall(r"does not answer, for (\S+) s", live.output)]
    assert len(silences) == 3
    assert max(silences) <= DETECT_SECONDS
    audited(live.run)


def test_a_host_that_is_cut_off_inside_a_save_leaves_no_checkpoint_to_resume_from(
    local: Run, cluster: Cluster, tmp_path: Path
) -> None:
    """The run gives up the rank that is cut off, which then ends its write. Its mesh continues on the other hosts."""
    host, reached = cluster.host("node2"), cluster.hold.with_name("hold.reached")
    where = '{trainer = "0-1", generator = "0,2"}'
    keys = {"fault__detect_seconds": DETECT_SECONDS, "placement__hosts": where, "fault__snapshot_interval": 0}
    with LiveOutput(cluster, tmp_path / "run", **keys) as live:
        live.run.wait_for_step(2)
        live.wait_for(lambda: (live.run.folder / "checkpoint/step-2/.metadata").exists(), "a checkpoint is whole")
        cluster.hold.touch()
        live.wait_for(reached.exists, "a save is begun")
        (half,) = half_written(live.run)
        host.cut()
        live.wait_for(lambda: live.incidents(), f"{host.name} is given up")
        reached.unlink()
        live.wait_for(lambda: live.incidents()[-1]["outcome"] == "back", "the trainers are back")
        assert not host.ranks(), "no second writer is left when the trainers resume"
        host.heal()
        assert resumed_after(live, local) == half - 2, "the step before, which is whole"
    audited(live.run)


def test_a_reader_whose_link_is_cut_fails_no_trainer(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up during a read, and its link is whole again while it lives: then the trainers still answer it.
    Monarch fails an actor that answers one which it has stopped in a living process."""
    held, host = tmp_path / "held", cluster.host("node3")
    monkeypatch.setenv("HELD_REWARD", str(held))
    where = '{trainer = "0", generator = "1-2"}'
    keys = {"training__steps": 8, "hosts__slots": 2, "hosts__orphan_seconds": 30, "placement__hosts": where, **WIDE}
    with LiveOutput(cluster, tmp_path / "run", **keys, fault__detect_seconds=DETECT_SECONDS) as live:
        live.run.wait_for_step(1, timeout=300)
        assert set(host.ranks()) == {"generator1[tp=0]"}
        trainers = [rank for name, rank in cluster.host("node1").ranks().items() if name.startswith("trainer")]
        stop_within_a_read(live, host, trainers)
        host.cut()
        held.touch()
        live.wait_for(live.incidents, f"{host.name} is given up")
        received = host.received()
        host.heal()
        live.wait_for(lambda: host.received() > received + FIRST_BYTES, "the controller reaches it again")
        for _ in range(100):  # few answers at a time, so that the read lasts until the controller's messages are obeyed
            to_all(trainers, psutil.Process.resume)
            time.sleep(0.005)
            to_all(trainers, psutil.Process.suspend)
            time.sleep(0.02)
        to_all(trainers, psutil.Process.resume)
        held.unlink()
        assert live.run.process.wait(300) == 0, live.output
    (incident,) = (each for each in live.incidents() if each["outcome"] == "back")
    assert {each["who"] for each in live.incidents()} == {incident["who"]} == {"generator1"}, live.output
    audited(live.run)


def stop_within_a_read(live: LiveOutput, host: SeparateHost, trainers: Sequence[psutil.Process]) -> None:
    """Suspend the trainers while a replica on a host reads weights from them."""

    def stopped() -> bool:
        begun = host.received()
        time.sleep(0.01)
        if host.received() < begun + READ_BYTES // 32:
            return False
        to_all(trainers, psutil.Process.suspend)
        time.sleep(0.1)  # bytes on their way arrive
        if host.received() < begun + READ_BYTES:
            return True
        to_all(trainers, psutil.Process.resume)  # it may be over
        return False

    live.wait_for(stopped, "a read is stopped halfway")


def to_all(processes: Sequence[psutil.Process], do: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        do(process)


def resumed_after(live: LiveOutput, local: Run) -> int:
    """Wait for the end of a run that is the local one, up to log-probs of larger batches, which engines have while a
    replica is missing. Return after which step its trainer resumed."""
    assert live.run.process.wait(300) == 0, live.output
    assert same(live.run, local, accuracy=1e-5)
    resumed = re.search(r"trainer is back after \S+ s: the run continues after step (\d+)", live.output)
    assert resumed
    return int(resumed[1])


def half_written(run: Run) -> list[int]:
    """Return the steps whose checkpoints are not whole."""
    folders = (run.folder / "checkpoint").glob("step-*")
    return [int(each.name.removeprefix("step-")) for each in folders if not (each / ".metadata").exists()]


def audited(run: Run) -> None:
    audit = [sys.executable, "-m", "titan_rl", "audit", str(run.folder)]
    done = subprocess.run(audit, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def cut_until_replaced(live: LiveOutput, host: SeparateHost, lost: Sequence[str]) -> set[int]:
    """Cut a host off until the run notices it, and wait until the lost roles are back. Return the pids of its ranks."""
    before, seen = host.pids(), len(live.incidents())
    assert {rank.partition("[")[0] for rank in host.ranks()} == set(lost)
    host.cut()
    live.wait_for(lambda: set(lost) <= {each["who"] for each in live.incidents()[seen:]}, f"{host.name} is given up")
    host.heal()
    ended = {(role, "back") for role in lost}
    live.wait_for(lambda: ended <= {(e["who"], e["outcome"]) for e in live.incidents()[seen:]}, f"{lost} are back")
    return before
