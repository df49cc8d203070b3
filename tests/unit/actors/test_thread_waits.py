"""How OpenMP's threads wait, in processes of their own: OpenMP reads its environment once."""

import os
import subprocess
import sys

import pytest

from titan_rl.actors.thread_waits import ENV

PRODUCTS = 100
START = f"""
import os, subprocess, sys, threading, time
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
import torch
from titan_rl.actors import thread_waits

torch.set_num_threads(2)
x = torch.randn(256, 256)

def sleeps(products={PRODUCTS}):  # of all threads, while two of them multiply
    before = getrusage(RUSAGE_SELF).ru_nvcsw
    for _ in range(products):
        x @ x
    return getrusage(RUSAGE_SELF).ru_nvcsw - before

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

def rests(before, seconds=60):  # in time; `before`: threads while it did not
    ends = time.monotonic() + seconds
    while not (rested := threads() >= before + os.cpu_count()) and time.monotonic() < ends:
        sleeps(2)
    return rested
"""


def figures(program: str) -> list[int]:
    """Return the numbers that a program prints. Its threads look for work without end, unless they are to sleep."""
    env = {**os.environ, **ENV, "OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": str(10**12), "MKL_THREADING_LAYER": "GNU"}
    command = [sys.executable, "-c", START + program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [int(figure) for figure in done.stdout.split()]


pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two threads on one core always sleep while they wait"
)


def test_waiting_threads_sleep_at_once_while_a_process_rests() -> None:
    awake, asleep, again = figures("""
sleeps()
print(sleeps())
threads_before = threads()
resting = threading.Thread(target=thread_waits.rest, args=(thread_waits._runtimes(), 5))
resting.start()
while threads() < threads_before + os.cpu_count():
    time.sleep(0.01)
print(sleeps())
resting.join()
print(sleeps())
""")
    assert asleep >= PRODUCTS > 2 * max(awake, again)


def test_threads_rest_when_other_processes_need_the_cores() -> None:
    (rested,) = figures("""
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
try:
    os.environ["OMP_NUM_THREADS"] = "2"
    sleeps(2)
    before = threads()
    thread_waits.use_given_threads()
    print(int(rests(before)))
finally:
    for other in others:
        other.kill()
""")
    assert rested


def test_only_several_threads_are_watched_and_rest_where_nobody_counts_their_waiting(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("tasks")
    watched, rested = figures(f"""
thread_waits._TASKS = Path({str(folder)!r})
os.environ["OMP_NUM_THREADS"] = "1"
thread_waits.use_given_threads()
print(threading.active_count() - 1)
os.environ["OMP_NUM_THREADS"] = "2"
torch.set_num_threads(2)
sleeps(2)
before = threads()
thread_waits.use_given_threads()
print(int(rests(before)))
""")
    assert not watched
    assert rested
