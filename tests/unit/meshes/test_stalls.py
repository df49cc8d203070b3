"""Reports about real processes that do not answer."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from titan_rl.meshes import stalls
from titan_rl.meshes.stalls import MAX_LINES, Process, Wait, excerpt, report, stacks

SLEEP = "import time\ndef dreams():\n    time.sleep(60)\nprint('up', flush=True)\ndreams()"
SPIN = "def spins():\n    while True:\n        pass\nprint('up', flush=True)\nspins()"


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None
        made.stdout.readline()
        try:
            yield made
        finally:
            made.kill()


def until(pid: int, state: str) -> None:
    deadline = time.monotonic() + 60
    while Process.of(pid).state != state and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Process.of(pid).state == state


def test_a_report_says_who_waits_and_what_every_rank_of_the_mesh_is_doing() -> None:
    with ExitStack() as started:
        asleep, spinning, stopped, stranger = (
            started.enter_context(process(code)) for code in (SLEEP, SPIN, SLEEP, SLEEP)
        )
        stopped.send_signal(signal.SIGSTOP)
        until(stopped.pid, "stopped by a signal")
        until(asleep.pid, "sleeping")
        ranks = {
            "trainer[dp=0 tp=0]": asleep.pid,
            "trainer[dp=1 tp=0]": stopped.pid,
            "trainer[dp=2 tp=0]": spinning.pid,
            "trainer2[dp=0 tp=0]": stranger.pid,
        }
        now = time.monotonic()
        wait = Wait("trainer[dp=1 tp=0]", "step", now - 61, 60)
        others = [Wait("generator0[tp=0]", "take", now - 5), wait]

        async def body() -> tuple[str, int]:
            reporting = asyncio.create_task(report(wait, others, ranks))
            turns = 0
            while not reporting.done():
                await asyncio.sleep(0.001)
                turns += 1
            return await reporting, turns

        said, turns = asyncio.run(body())
    head, also, *rest = said.splitlines()
    assert head == "controller waits on trainer[dp=1 tp=0] for step since 61 s (deadline 60 s)"
    assert also == "also: controller waits on generator0[tp=0] for take since 5 s (no deadline)"
    about = dict(re.findall(r"^(trainer.*?), process(.*(?:\n  .*)*)", "\n".join(rest), re.MULTILINE))
    assert about.keys() == set(ranks) - {"trainer2[dp=0 tp=0]"}
    assert f" {asleep.pid}: sleeping" in about["trainer[dp=0 tp=0]"]
    assert f" {stopped.pid}: stopped by a signal" in about["trainer[dp=1 tp=0]"]
    assert f" {spinning.pid}: running" in about["trainer[dp=2 tp=0]"]
    for name in ("trainer[dp=0 tp=0]", "trainer[dp=1 tp=0]"):
        assert "dreams (<string>:3)" in about[name]
        assert "0.0 cores busy" in about[name]
    assert "spins (<string>:" in about["trainer[dp=2 tp=0]"]
    assert turns > 5, "the event loop kept running"


def test_without_py_spy_the_report_says_so_and_asks_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with process(SLEEP) as asleep:
        until(asleep.pid, "sleeping")
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        (said,) = asyncio.run(stacks({"rank": asleep.pid})).values()
    assert said.startswith("py-spy is not installed (pip install py-spy); ")
    assert "the kernel" in said


def test_where_py_spy_may_not_look_its_own_words_are_shown(tmp_path: Path) -> None:
    refuses = tmp_path / "py-spy"
    refuses.write_text("#!/bin/sh\necho 'Permission Denied: Try again' >&2\nexit 1\n")
    refuses.chmod(0o755)
    nothing = tmp_path / "not-executable"
    nothing.write_text("")
    with process(SLEEP) as asleep:
        until(asleep.pid, "sleeping")
        for tool, words in ((refuses, "Permission Denied: Try again"), (nothing, "Permission denied")):
            (said,) = asyncio.run(stacks({"rank": asleep.pid}, str(tool))).values()
            assert said.startswith("py-spy shows no stack (")
            assert words in said
            assert "the kernel" in said


def test_a_py_spy_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = tmp_path / "py-spy"
    hangs.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(stalls, "DUMP_SECONDS", 0.5)
    with process(SLEEP) as asleep:
        (said,) = asyncio.run(stacks({"rank": asleep.pid}, str(hangs))).values()
    assert "(no answer within 0.5 s)" in said
    until(int((tmp_path / "pid").read_text()), "gone")


def test_a_rank_that_is_gone_or_elsewhere_is_no_error() -> None:
    with process(SLEEP) as asleep:
        pass
    wait = Wait("generator1[tp=1]", "read", time.monotonic())
    said = asyncio.run(report(wait, [], {"generator1[tp=0]": asleep.pid})).splitlines()
    assert said[1] == "generator1[tp=1] has no process on this host to look into"
    assert f"generator1[tp=0], process {asleep.pid}: gone" in said[2]
    assert "py-spy shows no stack" in said[3]


def test_many_waits_are_cut_short_the_oldest_first() -> None:
    now = time.monotonic()
    waits = [Wait(f"generator{i}[tp=0]", "take", now - i) for i in range(30)]
    lines = asyncio.run(report(Wait("trainer[dp=0 tp=0]", "step", now, 1), waits, {})).splitlines()
    assert lines[1].startswith("also: controller waits on generator29[tp=0] for take since 29 s")
    assert "also: 18 more waits" in lines


DUMP = """Process 10104: python -m monarch._src.actor.bootstrap_main
Python v3.11.7 (/usr/bin/python3.11)

Thread 10104 (idle): "MainThread"
    EpollSelector.select (selectors.py:468)
    BaseEventLoop._run_once (asyncio/base_events.py:1884)
    BaseEventLoop.run_forever (asyncio/base_events.py:607)
    invoke_main (monarch/_src/actor/bootstrap_main.py:77)
    _run_module_as_main (<frozen runpy>:198)
Thread 10126 (idle): "monarch-actor-driver"
    _sync_dispatch_loop (monarch/_src/actor/actor_mesh.py:1637)
    Thread.run (threading.py:982)
Thread 10150 (idle): "Thread-1 (purge_thread)"
    Condition.wait (threading.py:327)
    Queue.get (queue.py:171)
    purge_thread (checkpointer/base.py:47)
Thread 10128 (active): "monarch-actor-event-loop"
    all_reduce (torch/distributed/distributed_c10d.py:3012)
    step (titan_rl/actors/model_rank.py:58)
    Handle._run (asyncio/events.py:80)
"""


def test_of_a_dump_stay_the_threads_that_work_and_their_own_frames() -> None:
    assert excerpt(DUMP).splitlines() == [
        'Thread 10128 (active): "monarch-actor-event-loop"',
        "  all_reduce (torch/distributed/distributed_c10d.py:3012)",
        "  step (titan_rl/actors/model_rank.py:58)",
        "3 threads wait for work",
    ]
    deep = DUMP + "".join(f"    f{i} (deep.py:{i})\n" for i in range(100))
    lines = excerpt(deep).splitlines()
    assert len(lines) == MAX_LINES + 1
    assert lines[-2] == "  ... 64 lines more"
