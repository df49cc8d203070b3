"""The cores and memory that this process may use, and names of its machine and memory."""

import os
from contextlib import suppress
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Return the number of cores of this process's affinity, or of the container's limit if that is lower."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = CPU_MAX.read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def host_memory() -> int:
    """Return the bytes of memory that this process and its children may use."""
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            nbytes = min(nbytes, int((Path("/sys/fs/cgroup") / limit).read_text()))
    return nbytes


def machine() -> str:
    """Return a string that is equal for processes on one machine, also in different networks and containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def here() -> str:
    """Return a string that is equal for processes that can map each other's memory, which they find under /proc: it
    names the boot of the machine, the PID namespace and the user namespace."""
    return f"{machine()} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/user')}"
