"""The zygote and the shims, with a rank that runs a line of Python instead of Monarch's bootstrap."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.nursery import MESHES, SLEEP, WRITE_FACTS, Nursery, born, ended, gone, until
from titan_rl.meshes import deaths, zygotes

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def unwarned(no_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygotes, "_warned", set())


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path)
    yield nursery
    for process in nursery.started:
        process.kill()
        process.wait()


def test_a_rank_is_forked_with_all_that_a_new_process_would_have(nursery: Nursery) -> None:
    zygote = nursery.start_zygote(FROM_ZYGOTE="1")
    first = nursery.facts(FROM_SHIM="1", TITAN_RL_ZYGOTES="unused")
    assert first["parent"] == zygote.pid
    assert first["environ"]["TITAN_RL_PROC"] == "role[dp=0]"
    assert first["environ"]["FROM_SHIM"] == "1"
    assert not first["environ"].keys() & {"FROM_ZYGOTE", "TITAN_RL_SHIM", "TITAN_RL_REPORT", "TITAN_RL_ROOM"}
    assert first["cwd"] == str(nursery.folder)
    assert first["path"][0] == str(nursery.folder)
    assert first["path"][1] == first["environ"]["PYTHONPATH"]
    assert str(MESHES) not in first["path"]
    assert first["threads"] == 1
    assert first["more"] == [], "no descriptor of the zygote's"
    second = nursery.facts()
    assert second["random"] != first["random"]
    assert second["pid"] != first["pid"]


def test_a_cold_rank_gets_the_same_environment(nursery: Nursery) -> None:
    """No zygote listens here: the controller learns why."""
    before = dict(os.environ)
    cold = nursery.facts()
    nursery.start_zygote()
    forked = nursery.facts()
    for facts in (cold, forked):
        facts["environ"].pop("PYTHONPATH")
    assert cold["environ"] == forked["environ"]
    assert cold["parent"] == nursery.started[0].pid, "of the shim"
    assert cold["path"][2:] == forked["path"][2:]
    assert zygotes._warned == {("test", "it did not answer: [Errno 2] No such file or directory")}
    assert dict(os.environ) == before


def test_proc_shows_the_rank_and_not_its_zygote(nursery: Nursery) -> None:
    nursery.start_zygote()
    shim = nursery.start_rank(SLEEP, TITAN_RL_TEST_RUN="/some/run")
    rank = psutil.Process(born())
    assert rank.pid != shim.pid
    assert rank.environ()["TITAN_RL_PROC"] == "role[dp=0]"
    assert rank.environ()["TITAN_RL_TEST_RUN"] == "/some/run"
    assert "TITAN_RL_ROOM" not in rank.environ()
    assert " ".join(rank.cmdline()).strip() == "python -m monarch._src.actor.bootstrap_main"
    assert "TITAN_RL_PROC" not in psutil.Process(shim.pid).environ()


@pytest.mark.parametrize("zygote", [True, False])
def test_a_shim_ends_as_its_rank_ends(nursery: Nursery, zygote: bool) -> None:
    if zygote:
        nursery.start_zygote()
    for does, code, how in [
        ("import sys; sys.exit(7)", 7, "ended with exit code 7"),
        ("raise RuntimeError", 1, "ended with exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", -9, "was killed by signal 9"),
        ("import os; os.kill(os.getpid(), 12)", -12, "was killed by signal 12"),
        ("import os; [os.kill(os.getpid(), n) for n in (1, 2, 15)]", 0, "ended with exit code 0"),
        ("import os; os.abort()", -6, "was killed by signal 6"),
        ("pass", 0, "ended with exit code 0"),
    ]:
        assert nursery.start_rank(does).wait(60) == code
        assert ended() == how


def test_what_asks_the_controller_to_stop_ends_no_other_process(nursery: Nursery) -> None:
    """systemd, Slurm and a closing terminal send it to every process of a job."""
    zygote = nursery.start_zygote()
    shim = nursery.start_rank(SLEEP)
    rank = born()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for pid in (zygote.pid, shim.pid, rank):
            os.kill(pid, number)
    assert nursery.start_rank("import sys; sys.exit(7)").wait(60) == 7  # the zygote still forks
    assert not gone(rank)
    shim.kill()
    until(lambda: gone(rank))


@pytest.mark.parametrize("zygote", [True, False])
def test_a_rank_dies_with_its_shim(nursery: Nursery, zygote: bool) -> None:
    if zygote:
        nursery.start_zygote()
    shim = nursery.start_rank(SLEEP)
    rank = born()
    os.kill(rank, signal.SIGSTOP)
    shim.kill()
    assert ended() == deaths.GONE
    until(lambda: gone(rank))  # at once: of its own accord it would sleep on, and a stopped process does nothing


def test_the_ranks_of_a_killed_zygote_die_and_the_next_one_starts_cold(nursery: Nursery) -> None:
    zygote = nursery.start_zygote()
    shim = nursery.start_rank(SLEEP)
    rank = born()
    zygote.kill()
    assert ended() == "was killed by signal 9"
    assert shim.wait(60) == -9
    until(lambda: gone(rank))
    zygote.wait()
    assert nursery.facts()["parent"] == nursery.started[-1].pid
    assert [(kind, "refused" in why) for kind, why in zygotes._warned] == [("test", True)]


def test_a_rank_that_a_zygote_may_not_fork_starts_cold_and_says_why(nursery: Nursery) -> None:
    (nursery.folder / "starts_a_thread.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    )
    (nursery.folder / "torch.py").write_text("class cuda:\n    is_initialized = staticmethod(lambda: True)")
    nursery.start_zygote("starts_a_thread", PYTHONPATH=str(nursery.folder))
    assert nursery.facts()["parent"] == nursery.started[-1].pid
    nursery.start_zygote("torch", PYTHONPATH=str(nursery.folder))
    assert nursery.facts()["parent"] == nursery.started[-1].pid
    zygote = nursery.start_zygote(ATEN_CPU_CAPABILITY="default")
    assert nursery.facts(ATEN_CPU_CAPABILITY="default")["parent"] == zygote.pid
    assert nursery.facts(ATEN_CPU_CAPABILITY="avx2")["parent"] == nursery.started[-1].pid
    assert zygotes._warned == {
        ("test", "it has 2 threads, expected one"),
        ("test", "it has touched CUDA"),
        ("test", "the rank needs ATEN_CPU_CAPABILITY 'avx2', it was imported with 'default'"),
    }


def test_a_rank_computes_on_the_threads_that_it_is_launched_with(nursery: Nursery) -> None:
    (nursery.folder / "torch.py").write_text(
        "class cuda:\n    is_initialized = staticmethod(lambda: False)\nset_num_threads = [].append"
    )
    zygote = nursery.start_zygote("torch", PYTHONPATH=str(nursery.folder), OMP_NUM_THREADS="1")
    given = 'import sys; os.environ["GIVEN"] = str(sys.modules["torch"].set_num_threads.__self__)\n'
    facts = nursery.facts(f"import os; {given}{WRITE_FACTS}", OMP_NUM_THREADS="3")
    assert facts["parent"] == zygote.pid
    assert (facts["environ"]["GIVEN"], facts["environ"]["OMP_NUM_THREADS"]) == ("[3]", "3")


def test_a_zygote_that_does_not_answer_costs_a_deadline(nursery: Nursery) -> None:
    zygote = nursery.start_zygote()
    nursery.facts()
    zygote.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert nursery.facts(TITAN_RL_FORK_SECONDS="3")["parent"] == nursery.started[-1].pid
    assert time.monotonic() - began > 2.9
    assert zygotes._warned == {("test", "it did not answer: timed out")}
    nursery.facts_file.unlink()
    zygote.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert not nursery.facts_file.exists(), "the shim's old request came to nothing"


def test_nonsense_does_not_end_a_zygote(nursery: Nursery) -> None:
    zygote = nursery.start_zygote()
    for nonsense in (b"", b"\0", b"nonsense\0\0", b"a\0b\0c\0d\0e\0\0"):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(nursery.socket))
            caller.sendall(nonsense)
            caller.shutdown(socket.SHUT_WR)
            assert caller.recv(100) in (b"", b"ready\n")
    assert nursery.facts()["parent"] == zygote.pid


def test_a_killed_controller_leaves_nothing(tmp_path: Path) -> None:
    """Its zygote, shims and ranks are gone within a second, a stopped rank too. Nor does a long TMPDIR harm it."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    program = f"""
import os, sys, time
sys.path.insert(0, {str(TESTS)!r})
from support.nursery import Nursery, SLEEP, born
from pathlib import Path
nursery = Nursery(Path({str(tmp_path)!r}))
zygote = nursery.start_zygote()
shims = [nursery.start_rank(SLEEP, f"role[dp={{i}}]") for i in range(2)]
ranks = [born(f"role[dp={{i}}]") for i in range(2)]
os.kill(ranks[0], 19)
print(zygote.pid, *(shim.pid for shim in shims), *ranks, flush=True)
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
