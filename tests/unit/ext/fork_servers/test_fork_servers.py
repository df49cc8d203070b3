"""Fork servers and rank launchers, with ranks that run a line of Python instead of Monarch's bootstrap; and the fork
servers of a run, which import their engines."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support.forked_ranks import PROGRAMS, SLEEP, ForkedRanks, ended, gone, pid_of, until
from support.rank_launchers import rank_of
from titan_rl.ext.fork_servers.fork_servers import (
    FORKING_LAUNCHER,
    KIND_ENV,
    OFF,
    READY_SECONDS,
    VARIABLE,
    ForkStarter,
    ask,
)
from titan_rl.meshes import deaths
from titan_rl.meshes.starter import KINDS, LAUNCHER, Kind

TESTS = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def starter(no_ranks: None, monkeypatch: pytest.MonkeyPatch) -> ForkStarter:
    """Return the starter of this process, which has warned of nothing."""
    starter = ForkStarter()
    monkeypatch.setattr(deaths, "starter", lambda: starter)
    return starter


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[ForkedRanks]:
    forked = ForkedRanks(tmp_path)
    yield forked
    for process in forked.started:
        process.kill()
        process.wait()


def test_a_rank_is_forked_with_all_that_a_new_process_would_have(forked: ForkedRanks) -> None:
    server = forked.start_server(OF_THE_SERVER="1")
    first = forked.facts(OF_THE_LAUNCHER="1", TITAN_RL_FORK_SERVERS="unused")
    assert first["parent"] == server.pid
    assert first["environ"]["TITAN_RL_PROC"] == "role[dp=0]"
    assert first["environ"]["OF_THE_LAUNCHER"] == "1"
    assert not first["environ"].keys() & {"OF_THE_SERVER", "TITAN_RL_RANK", "TITAN_RL_REPORT", "TITAN_RL_FORK_SOCKET"}
    assert first["cwd"] == str(forked.folder)
    assert first["path"][0] == str(forked.folder)
    assert first["path"][1] == first["environ"]["PYTHONPATH"]
    assert str(PROGRAMS) not in first["path"]
    assert first["threads"] == 1
    assert first["more"] == [], "no descriptor of the fork server's"
    second = forked.facts()
    assert second["random"] != first["random"]
    assert second["pid"] != first["pid"]


def test_a_cold_rank_gets_the_same_environment(forked: ForkedRanks, starter: ForkStarter) -> None:
    """No fork server listens here: the controller learns why."""
    before = dict(os.environ)
    cold = forked.facts()
    forked.start_server()
    warm = forked.facts()
    for facts in (cold, warm):
        facts["environ"].pop("PYTHONPATH")
    assert cold["environ"] == warm["environ"]
    assert cold["parent"] == forked.started[0].pid, "the launcher"
    assert cold["path"][2:] == warm["path"][2:]
    assert starter._warned == {("generator", "it did not answer: [Errno 2] No such file or directory")}
    assert dict(os.environ) == before


@pytest.mark.parametrize("server", [True, False])
def test_a_launcher_ends_as_its_rank_ends(forked: ForkedRanks, server: bool) -> None:
    if server:
        forked.start_server()
    for does, code, how in [
        ("import sys; sys.exit(7)", 7, "ended with exit code 7"),
        ("raise RuntimeError", 1, "ended with exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", -9, "was killed by signal 9"),
        ("import os; os.kill(os.getpid(), 12)", -12, "was killed by signal 12"),
        ("import os; [os.kill(os.getpid(), n) for n in (1, 2, 15)]", 0, "ended with exit code 0"),
        ("import os; os.abort()", -6, "was killed by signal 6"),
        ("pass", 0, "ended with exit code 0"),
    ]:
        assert forked.start_rank(does).wait(60) == code
        assert ended() == how


def test_signals_that_ask_the_controller_to_stop_end_no_other_process(forked: ForkedRanks) -> None:
    """systemd, Slurm and a closing terminal send them to every process of a job."""
    server = forked.start_server()
    launcher = forked.start_rank(SLEEP)
    rank = pid_of()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for pid in (server.pid, launcher.pid, rank):
            os.kill(pid, number)
    assert forked.start_rank("import sys; sys.exit(7)").wait(60) == 7  # the server still forks
    assert not gone(rank)
    launcher.kill()
    until(lambda: gone(rank))


@pytest.mark.parametrize("server", [True, False])
def test_a_rank_dies_with_its_launcher(forked: ForkedRanks, server: bool) -> None:
    if server:
        forked.start_server()
    launcher = forked.start_rank(SLEEP)
    rank = pid_of()
    until(lambda: rank_of(launcher.pid) == rank)
    if not server:  # until then it holds the launcher's connection
        until(lambda: b"bootstrap_main" in Path(f"/proc/{rank}/cmdline").read_bytes())
    os.kill(rank, signal.SIGSTOP)
    launcher.kill()
    assert ended() == deaths.GONE
    until(lambda: gone(rank))  # at once: nothing else ends it, because it is stopped


def test_the_ranks_of_a_killed_server_die_and_the_next_one_starts_cold(
    forked: ForkedRanks, starter: ForkStarter
) -> None:
    server = forked.start_server()
    launcher = forked.start_rank(SLEEP)
    rank = pid_of()
    server.kill()
    assert ended() == "was killed by signal 9"
    assert launcher.wait(60) == -9
    until(lambda: gone(rank))
    server.wait()
    assert forked.facts()["parent"] == forked.started[-1].pid
    assert [(kind, "refused" in why) for kind, why in starter._warned] == [("generator", True)]


def test_the_end_of_a_rank_is_known_though_its_server_hangs_and_the_next_one_starts_cold(
    forked: ForkedRanks, starter: ForkStarter
) -> None:
    server = forked.start_server()
    launcher, lives_on = forked.start_rank(SLEEP), forked.start_rank(SLEEP, "role[dp=1]")
    rank, other = pid_of(), pid_of("role[dp=1]")
    server.send_signal(signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    assert ended() == "was killed by signal 9"
    assert launcher.wait(60) == -9
    assert not gone(other)
    assert lives_on.poll() is None
    began = time.monotonic()
    assert forked.facts(TITAN_RL_FORK_SECONDS="3")["parent"] == forked.started[-1].pid
    assert time.monotonic() - began > 2.9
    assert starter._warned == {("generator", "it did not answer: timed out")}
    forked.facts_file.unlink()
    server.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert not forked.facts_file.exists(), "the launcher's old request came to nothing"
    os.kill(other, signal.SIGKILL)
    assert ended("role[dp=1]") == "was killed by signal 9"


def test_a_server_that_hangs_is_asked_again_before_the_next_rank(
    forked: ForkedRanks, monkeypatch: pytest.MonkeyPatch, starter: ForkStarter
) -> None:
    monkeypatch.setenv(VARIABLE, str(forked.folder))
    server = forked.start_server()
    assert asyncio.run(starter.server_of("generator")) == str(forked.socket), (
        "it imports nothing, and so it is ready soon"
    )
    server.send_signal(signal.SIGSTOP)
    assert asyncio.run(starter.server_of("generator")) == ""
    server.send_signal(signal.SIGCONT)
    assert asyncio.run(starter.server_of("generator")) == str(forked.socket)
    server.kill()
    server.wait()
    assert asyncio.run(starter.server_of("generator")) == ""
    assert starter._warned == {
        ("generator", "it did not answer within 2 s"),
        ("generator", "it cannot be reached (Connection refused)"),
    }


def test_ranks_of_another_host_are_forked_by_its_servers(starter: ForkStarter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, OFF)
    program, variables = asyncio.run(starter.launcher("model", "/there"))
    assert (program, variables["TITAN_RL_FORK_SOCKET"]) == (FORKING_LAUNCHER, "/there/model")
    cold: list[tuple[Kind | None, str | None]] = [("model", ""), ("model", None), (None, "/there")]
    for kind, folder in cold:
        assert asyncio.run(starter.launcher(kind, folder)) == (LAUNCHER, {}), (kind, folder)


def test_a_rank_that_a_server_may_not_fork_starts_cold_and_reports_why(
    forked: ForkedRanks, starter: ForkStarter
) -> None:
    (forked.folder / "starts_a_thread.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    )
    (forked.folder / "torch.py").write_text("class cuda:\n    is_initialized = staticmethod(lambda: True)")
    forked.start_server("starts_a_thread", PYTHONPATH=str(forked.folder))
    assert forked.facts()["parent"] == forked.started[-1].pid
    forked.start_server("torch", PYTHONPATH=str(forked.folder))
    assert forked.facts()["parent"] == forked.started[-1].pid
    server = forked.start_server(ATEN_CPU_CAPABILITY="default")
    assert forked.facts(ATEN_CPU_CAPABILITY="default", OMP_NUM_THREADS="3")["parent"] == server.pid
    assert forked.facts(ATEN_CPU_CAPABILITY="avx2")["parent"] == forked.started[-1].pid
    assert starter._warned == {
        ("generator", "it has 2 threads, expected one"),
        ("generator", "it has touched CUDA"),
        ("generator", "the rank needs ATEN_CPU_CAPABILITY 'avx2', it was imported with 'default'"),
    }


def test_nonsense_does_not_end_a_server(forked: ForkedRanks) -> None:
    server = forked.start_server()
    for nonsense in (b"", b"\0", b"nonsense", b"a\0b\0c\0d\0e"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.connect(str(forked.socket))
            caller.send(nonsense)
            caller.shutdown(socket.SHUT_WR)
            assert caller.recv(100) == b""
    assert forked.facts()["parent"] == server.pid


def test_a_killed_controller_leaves_nothing(tmp_path: Path) -> None:
    """Its fork server, launchers and ranks are gone within a second, a stopped rank too. Nor does a long TMPDIR harm
    it."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    program = f"""
import os, sys, time
sys.path.insert(0, {str(TESTS)!r})
from support.forked_ranks import ForkedRanks, SLEEP, pid_of
from pathlib import Path
forked = ForkedRanks(Path({str(tmp_path)!r}))
server = forked.start_server()
launchers = [forked.start_rank(SLEEP, f"role[dp={{i}}]") for i in range(2)]
ranks = [pid_of(f"role[dp={{i}}]") for i in range(2)]
os.kill(ranks[0], 19)
print(server.pid, *(launcher.pid for launcher in launchers), *ranks, flush=True)
time.sleep(60)
"""
    env = {**os.environ, "TMPDIR": str(folder)}
    controller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env)
    assert controller.stdout is not None
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(pids) == 5
    controller.kill()
    controller.wait()
    until(lambda: all(map(gone, pids)))


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[psutil.Process]]:
    """Returns the processes that the test has started. Others may be the session's."""
    monkeypatch.delenv(VARIABLE, raising=False)
    before = psutil.Process().children(recursive=True)
    return lambda: [process for process in psutil.Process().children(recursive=True) if process not in before]


def test_servers_have_one_thread_and_the_environment_of_their_kind(
    children: Callable[[], list[psutil.Process]], tmp_path: Path, starter: ForkStarter
) -> None:
    with starter.serving(tmp_path) as servers:
        servers.keep(KINDS)
        for kind in KINDS:
            asyncio.run(asyncio.wait_for(ask(tmp_path / kind), READY_SECONDS))
        by_kind = {process.cmdline()[3]: process for process in children()}
        assert by_kind.keys() == set(KINDS)
        model, generator = (by_kind[kind] for kind in KINDS)
        assert [process.num_threads() for process in (model, generator)] == [1, 1]
        assert KIND_ENV["generator"].items() <= generator.environ().items()
        servers.keep(["model"])
        assert children() == [model]
        assert not (tmp_path / "generator").exists()
        asyncio.run(asyncio.wait_for(ask(tmp_path / "model"), READY_SECONDS))
        model.kill()
        servers.keep([])
        assert children() == []
        servers.keep(KINDS)  # the sockets can be bound again
        assert len(children()) == 2
        assert os.environ[VARIABLE] == str(tmp_path)
    assert children() == []
    assert VARIABLE not in os.environ


def test_servers_that_cannot_be_started_are_none(
    children: Callable[[], list[psutil.Process]], tmp_path: Path, starter: ForkStarter
) -> None:
    with starter.serving(tmp_path / ("x" * 100)) as servers:
        servers.keep(KINDS)
        assert children() == []
