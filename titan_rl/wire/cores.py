"""How many cores and how much memory this process may use."""

import os
from contextlib import suppress
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}  # the most accepted
"""Launch environment of a rank that computes on a CPU. glibc would return a forward's memory to the kernel, and get it
back page by page: 10,000 pages in a generation of grpo_llama, a tenth of its time and more on busy cores."""


def usable_cores() -> int:
    """Return the cores of this process's affinity, or those that a container's limit amounts to if they are fewer."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = CPU_MAX.read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def host_memory() -> int:
    """Return the bytes of memory that this process and its children may use."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            found = min(found, int((Path("/sys/fs/cgroup") / limit).read_text()))
    return found
