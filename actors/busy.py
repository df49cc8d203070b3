"""How long a thread was busy: what tells a slow rank from one that waits for it.

Ranks that share a step end it together, and most of what a wall clock says of either is waiting in collectives. A
thread's CPU time and its time in the run queue say who had the work, and whose core was shared.
"""

import time
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")


def busy_seconds() -> float:
    """Of this thread, since it began: on a core, or ready for one. Where the kernel does not count the latter, on one.
    On a GPU it is the launching thread's, which kernels make wait only where the host waits for them."""
    try:
        running, ready, _ = SCHEDSTAT.read_text().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(running) + int(ready)) / 1e9
