"""How the threads of a rank on a CPU wait for each other: awake for a moment while they have the cores to themselves,
and asleep when they do not.

To wake a thread takes longer than most operations of a small model, so threads that wait had better look for work some
time before they sleep. Where other processes need the cores, that time is taken from them, and two runs slow each other
down twofold. Linux counts how long threads that could run have waited for a core; where that is much, the threads of
this process sleep at once. No product changes: as many threads compute as before.

GNU's OpenMP reads once how long its threads look for work (GOMP_SPINCOUNT), but lets them sleep at once as long as a
process has more of them than there are cores. So they sleep while a team of threads that do nothing exists.
"""

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

SPINS = "5000"  # looks for work before a thread sleeps: 0.05 to 0.1 ms
ENV = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", SPINS), "OMP_WAIT_POLICY": "PASSIVE"}
"""Launch environment of a rank. PASSIVE: threads that are to sleep at once do not look for work at all."""
PERIOD = 0.25  # seconds between looks at the clocks of threads
RESTS = 0.25, 8.0  # seconds that crowded threads sleep at once: at first, and after doubling, at most
CROWDED = 0.33  # share of the time in which threads could run that they waited for a core
BUSY = 0.2  # share of a period that threads ran for, below which nothing is concluded
FOREVER = threading.TIMEOUT_MAX

_TASKS = Path("/proc/self/task")


def use_given_threads() -> None:
    """Compute on the number of threads that this process was launched with: OpenMP may have read another in its fork
    server. Several threads look for work while they wait, while they have the cores to themselves."""
    import torch

    torch.set_num_threads(count := int(os.environ.get("OMP_NUM_THREADS", "1")))
    watched = any(thread.name == _watch.__name__ for thread in threading.enumerate())
    if count > 1 and not watched and (runtimes := _runtimes()):
        threading.Thread(target=_watch, args=(runtimes,), daemon=True, name=_watch.__name__).start()


def clocks_of(task: Path) -> tuple[float, float] | None:
    """Return for how many seconds a thread has run, and has waited for a core; None if it has ended, or if the kernel
    has no schedstat."""
    try:
        run, waited, _ = (task / "schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(run) / 1e9, int(waited) / 1e9


def thread_clocks() -> tuple[float, float]:
    """Return for how many seconds the threads of this process have run, and have waited for a core; zeros where nobody
    counts that."""
    found = [clocks for task in _TASKS.iterdir() if (clocks := clocks_of(task))]
    return sum(run for run, _ in found), sum(waited for _, waited in found)


def rest(runtimes: Sequence[ctypes.CDLL], seconds: float) -> None:
    """Let all OpenMP threads of this process that wait sleep at once, for so long."""
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL); it needs no Python in any thread

    def wait() -> None:
        for runtime in runtimes:
            runtime.GOMP_parallel(nothing, None, ctypes.c_uint((os.cpu_count() or 1) + 1), ctypes.c_uint(0))
        threading.Event().wait(seconds)

    waiting = threading.Thread(target=wait, daemon=True)  # its team ends with it
    waiting.start()
    waiting.join()


def _watch(runtimes: Sequence[ctypes.CDLL]) -> None:
    if thread_clocks() == (0, 0):
        rest(runtimes, FOREVER)
    seconds = RESTS[0]
    while True:
        before = thread_clocks()
        time.sleep(PERIOD)
        run, waited = (now - then for now, then in zip(thread_clocks(), before, strict=True))
        if run + waited < BUSY * PERIOD:
            continue
        if waited < CROWDED * (run + waited):
            seconds = RESTS[0]
            continue
        rest(runtimes, seconds)
        seconds = min(2 * seconds, RESTS[1])


def _runtimes() -> list[ctypes.CDLL]:
    """Return the libraries of GNU's OpenMP that this process has loaded. Other OpenMPs do not read GOMP_SPINCOUNT."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return [ctypes.CDLL(path) for path in sorted({line.split()[-1] for line in lines if "/libgomp" in line})]
