"""How many cores this process may use."""

import os
from contextlib import suppress
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Return the cores of this process's affinity, or those that a container's limit amounts to if they are fewer."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = CPU_MAX.read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)
