"""What a run across hosts meets on a bad day, each as a real run."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.rank_launchers import launched
from support.running import Run, Runs
from support.small_disk import SmallDisk
from support.worker_hosts import WorkerHost, free_address, hosts_of
from titan_rl.ext.fork_servers.fork_servers import VARIABLE
from titan_rl.wire import failpoints

KEYS: dict[str, Any] = {
    "hosts__kind": "attach",
    "hosts__insecure": True,
    "hosts__orphan_seconds": 4,
    "cold_start__steps": 2,
    "training__steps": 1000,
    "eval__size": 0,
    "generator__replicas": 2,
    "checkpoint__enable": False,
    "algorithm__max_dead_steps": 0,
    "algorithm__kl_coef": 0.0,
}


def keys(*addresses: str, **more: Any) -> dict[str, Any]:
    return {**KEYS, "hosts__addresses": ",".join(addresses), **more}


def ranks(run: Run) -> dict[str, tuple[str, int]]:
    """Return where each rank is, as `ctl status` shows it."""
    command = [sys.executable, "-m", "titan_rl.tools.ctl", str(run.folder), "status", "--json"]
    status = subprocess.run(command, capture_output=True, timeout=60)
    assert status.returncode == 0, said(run)
    return {rank["rank"]: (rank["host"], rank["pid"]) for rank in json.loads(status.stdout)["ranks"]}


def said(run: Run) -> str:
    return " ".join(run.finish().split())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerHost, WorkerHost]]:
    """Two hosts, which runs share one after the other."""
    folder, found = tmp_path_factory.mktemp("pair"), list[WorkerHost]()
    try:
        for host in ("127.0.0.2", "127.0.0.3"):
            found.append(WorkerHost.start(folder, host))
        for worker in found:
            worker.wait()
        yield found[0], found[1]
    finally:
        for worker in found:
            worker.end()


def test_a_host_serves_one_run_at_a_time_through_the_deaths_of_an_agent_and_a_controller(
    runs: Runs, pair: tuple[WorkerHost, WorkerHost], tmp_path: Path
) -> None:
    first, second = pair
    where = '{trainer = "0", generator = "0-1"}'
    run = runs.start(tmp_path / "run", **keys(first.address, second.address, placement__hosts=where))
    run.wait_for_step(1)
    found = ranks(run)
    assert {rank: host for rank, (host, _) in found.items()} == {
        "trainer[dp=0 tp=0]": first.address,
        "trainer[dp=1 tp=0]": first.address,
        "generator0[tp=0]": first.address,
        "generator1[tp=0]": second.address,
    }
    started = [each for worker in pair for each in worker.processes()]
    assert {name: pid for _, name, pid in launched(started)} == {rank: pid for rank, (_, pid) in found.items()}

    other = runs.start(tmp_path / "other", **keys(first.address, second.address))
    out = said(other)
    assert other.code == 1, out
    assert "2 of 2 hosts did not join" in out, out
    assert out.count(f"is busy with the run in {run.folder} (process {run.process.pid} on") == 2
    assert run.process.poll() is None

    rank = psutil.Process(found["generator1[tp=0]"][1])
    second.agent().kill()
    rank.wait(60)
    deadline = time.monotonic() + 120
    while ranks(run).get("generator1[tp=0]", ("",))[0] != first.address:
        assert run.process.poll() is None, said(run)
        assert time.monotonic() < deadline, ranks(run)
    mine = [psutil.Process(pid) for _, pid in ranks(run).values()]

    agent = first.agent()
    run.process.kill()
    agent.suspend()  # it would end the run's processes, and itself
    again = runs.start(tmp_path / "again", **keys(first.address, second.address, training__steps=1))
    run.finish()
    lines = list[str]()
    assert again.process.stdout is not None
    for line in again.process.stdout:
        lines.append(line)
        if f"waiting for {first.address}" in line:
            agent.resume()
    again.process.wait(60)
    out = " ".join(" ".join(lines).split())
    assert again.code == 0, out
    assert not psutil.wait_procs(mine, timeout=0)[1], "it waited until they had ended"
    _, waited, rest = out.partition(f"waiting for {first.address}, for at most ")
    assert waited, out
    assert f"waiting for {first.address}" not in rest, "it is said once"
    whose = f"it is busy with the run in {run.folder} (process {run.process.pid} on {socket.gethostname()})"
    assert f"s (hosts.join_seconds = 60): {whose}, whose controller " in rest, out


def test_a_replica_that_does_not_start_on_one_host_is_started_on_another(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failpoints.FOLDER, str(tmp_path))
    where = '{trainer = "0", generator = "0-1"}'
    more = {"hosts__kind": "processes", "hosts__count": 2, "hosts__insecure": False, "placement__hosts": where}
    run = runs.start(tmp_path / "run", **{**KEYS, **more})
    run.wait_for_step(1)
    assert hosts_of(run.process.pid)["generator1[tp=0]"] == "h1"
    failpoints.give(tmp_path, "generator1[tp=0]", "start", failpoints.FaultOrder("raise"))
    psutil.Process(run.workers()["generator1[tp=0]"]).kill()
    deadline = time.monotonic() + 120
    while not (faults := run.folder / "faults.jsonl").exists() or '"back"' not in faults.read_text():
        assert run.process.poll() is None, said(run)
        assert time.monotonic() < deadline, said(run)
        time.sleep(0.1)
    assert hosts_of(run.process.pid)["generator1[tp=0]"] == "h0"
    run.process.send_signal(signal.SIGINT)
    out = said(run)
    assert "generator1[tp=0] failed in start: InjectedFault" in out, out
    assert "generator1 did not start on host1: it is tried on host0" in out, out


@contextmanager
def warmed(disk: SmallDisk) -> Iterator[str]:
    """Yield the folder of fork servers for which paths on this disk exist."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [*disk.within(), sys.executable, "-m", "titan_rl.tools.warm"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as warm:
        assert warm.stdout is not None
        _, value = shlex.split(warm.stdout.readline())
        try:
            yield value.removeprefix(f"{VARIABLE}=")
        finally:
            warm.terminate()


def test_a_run_folder_without_room_ends_the_run_by_name_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SmallDisk(tmp_path / "disk", megabytes=16) as disk, warmed(disk) as servers:
        monkeypatch.setenv(VARIABLE, servers)  # the tests' own do not see that disk
        runs, folder = Runs(disk.within()), tmp_path / "disk" / "run"
        keys = {"cold_start__steps": 2, "eval__size": 0, "algorithm__kl_coef": 0.0, "algorithm__max_dead_steps": 0}
        keys |= {"checkpoint__interval": 2, "checkpoint__keep_latest_k": 0, "fault__max_failed_saves": 0}
        run = runs.start(folder, training__steps=4000, **keys)
        seen = Run(disk.seen / "run", run.process)
        try:
            seen.wait_for_step(3)  # a checkpoint of step 2 is whole
            run.process.send_signal(signal.SIGSTOP)
            disk.fill(leave=120_000)  # for lines, but for no checkpoint
            run.process.send_signal(signal.SIGCONT)
            out = said(run)
        finally:
            run.process.kill()
        assert run.code == 1, out
        full = rf"{folder}/checkpoint cannot be written: No space left on device \([\d,]+ bytes free\)"
        assert re.search(rf"error: the checkpoint of step \d+: {full}", out), out
        assert "Traceback" not in out, out
        resumes = re.search(rf"the same command resumes from RL step (\d+) in {folder}", out)
        assert resumes, out
        whole = {path.parent.name for path in (seen.folder / "checkpoint").glob("step-*/.metadata")}
        assert {path.name for path in (seen.folder / "checkpoint").glob("step-*")} == whole, "nothing is half-written"
        disk.make_room()
        runs.finish(folder, training__steps=int(resumes[1]) + 1, **keys)
        audit = [*disk.within(), sys.executable, "-m", "titan_rl", "audit", str(folder)]
        audited = subprocess.run(audit, capture_output=True, text=True, timeout=60)
        assert audited.returncode == 0, audited.stdout + audited.stderr


@pytest.mark.slow
def test_a_controller_that_was_stopped_for_longer_than_monarch_waits_goes_on(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run", training__steps=4000, cold_start__steps=2, eval__size=0)
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(75)
    run.process.send_signal(signal.SIGCONT)
    run.wait_for_step(run.lines("metrics.jsonl", "rl")[-1]["step"] + 20)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130, said(run)


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/time.h>
#include <time.h>
#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define AHEAD 3600
int clock_gettime(clockid_t clock, struct timespec *at) {
    REAL(clock_gettime);
    int failed = real(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += AHEAD;
    return failed;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    REAL(gettimeofday);
    int failed = real(at, zone);
    if (!failed) at->tv_sec += AHEAD;
    return failed;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
/* The kernel's own clock is right: what waits until a time of day must not wait for an hour. */
int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
    REAL(sem_timedwait);
    struct timespec at = {until->tv_sec - AHEAD, until->tv_nsec};
    return real(sem, &at);
}
int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    REAL(pthread_cond_timedwait);
    struct timespec at = {until->tv_sec - (until->tv_sec > 1000000000 ? AHEAD : 0), until->tv_nsec};
    return real(cond, mutex, &at);
}
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerHost]]:
    """Hosts on which something is wrong, started together: "version", "clock", "disk"."""
    folder, found = tmp_path_factory.mktemp("odd"), dict[str, WorkerHost]()
    (folder / "sitecustomize.py").write_text("import titan_rl\ntitan_rl.__version__ = '0.0.9'\n")
    (folder / "clock.c").write_text(CLOCK)
    library = folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "clock.c", "-ldl"], check=True)
    path = os.pathsep.join([str(folder), os.getcwd()])
    try:
        ahead = {"LD_PRELOAD": str(library), VARIABLE: ""}  # the tests' fork servers have the right clock
        found["clock"] = WorkerHost.start(folder, "127.0.0.5", ahead)
        found["version"] = WorkerHost.start(folder, "127.0.0.4", {"PYTHONPATH": path})
        small = f'mount -t tmpfs -o size=1m none {folder}/disk && exec env TMPDIR={folder}/disk "$@"'
        (folder / "disk").mkdir()
        apart = ["unshare", *([] if os.getuid() == 0 else ["-Ur"]), "-m", "sh", "-c", small, "sh"]
        found["disk"] = WorkerHost.start(folder, "127.0.0.6", within=apart)
        for worker in found.values():
            worker.wait()
        yield found
    finally:
        for worker in found.values():
            worker.end()


def test_every_host_that_does_not_join_is_named_with_what_was_tried(
    runs: Runs, pair: tuple[WorkerHost, WorkerHost], odd: dict[str, WorkerHost], tmp_path: Path
) -> None:
    fine, nothing = pair[0].address, free_address("127.0.0.7")
    unknown, version = "tcp://no-such-host.invalid:26600", odd["version"].address
    with socket.create_server(("127.0.0.8", 0)) as silent:
        mute = f"tcp://127.0.0.8:{silent.getsockname()[1]}"
        addresses = (fine, unknown, nothing, mute, version)
        run = runs.start(tmp_path / "run", **keys(*addresses, hosts__join_seconds=10))
        out = said(run)
    assert run.code == 1, out
    assert "4 of 5 hosts did not join: " in out, out
    assert (
        f"{unknown} did not answer within hosts.join_seconds = 10: the name no-such-host.invalid resolves to" in out
    ), out
    assert f"{nothing} did not answer within hosts.join_seconds = 10: nothing listens at 127.0.0.7:" in out, out
    assert f"{mute} did not answer within hosts.join_seconds = 10: something listens there" in out, out
    assert f"{version}: expected this run's versions, titan_rl " in out, out
    assert "found titan_rl 0.0.9" in out, out
    assert fine not in out.partition("did not join")[2], out


def test_a_clock_an_hour_ahead_changes_nothing_but_a_line(
    runs: Runs, pair: tuple[WorkerHost, WorkerHost], odd: dict[str, WorkerHost], tmp_path: Path
) -> None:
    began = time.time()
    more = {"placement__hosts": '{trainer = "0-1", generator = "1"}', "checkpoint__enable": True}
    addresses = (pair[0].address, odd["clock"].address)
    run = runs.start(tmp_path / "run", **keys(*addresses, training__steps=2, **more))
    out = said(run)
    assert run.code == 0, out
    assert " s ahead of this one's; the timeline has this one's time" in out, out
    assert "3,600.0 s" in out or "3,599.9" in out, out
    events = json.loads((run.folder / "timeline.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    seen = {names[event["pid"]] for event in events if "ts" in event}
    assert {"trainer[dp=1 tp=0]", "generator0[tp=0]", "trainer[dp=0 tp=0]"} <= seen
    assert all(began <= event["ts"] / 1e6 <= time.time() for event in events if "ts" in event)
    assert max(line["time"] for line in run.lines("metrics.jsonl")) <= time.time()


def test_a_full_disk_of_one_host_is_named(
    runs: Runs, pair: tuple[WorkerHost, WorkerHost], odd: dict[str, WorkerHost], tmp_path: Path
) -> None:
    disk = odd["disk"]
    (tmp_path / "x").write_bytes(b"x" * 2**21)
    inside = ["-m", *([] if os.getuid() == 0 else ["-U", "--preserve-credentials"])]
    fill = ["sh", "-c", f"cat {tmp_path}/x > {disk.log.parent}/disk/full"]
    subprocess.run(["nsenter", "-t", str(disk.process.pid), *inside, *fill], check=False, capture_output=True)
    run = runs.start(tmp_path / "run", **keys(pair[0].address, disk.address, training__steps=1))
    out = said(run)
    assert run.code == 1, out
    assert f"{disk.address}: its folder {disk.log.parent}/disk/" in out, out
    assert "cannot be written to: No space left on device" in out, out
