"""Keeps a rank on the cores of its GPU's NUMA node.

Linux takes memory from the node of the core that first touches it, if the node has any left. So pinned buffers of
weights, snapshots and offloaded states lie at the end of the GPU's link, and copies need not cross to the other socket.
vLLM's `numa_bind` and Monarch's `proc_bind` do it by numactl for processes that they start, before a rank has its GPU.
"""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

SYSTEM = Path("/sys")


def stay_near_gpu(index: int, system: Path = SYSTEM) -> set[int]:
    """Move all threads of this process, and so the ones that they start, to the cores of the node of its GPU `index`.
    Return the cores; none if the GPU has no node, as on a machine with one, or no core of it is this process's."""
    cores = cores_near(pci_address(index), system) & os.sched_getaffinity(0)
    for task in Path("/proc/self/task").iterdir() if cores else ():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task.name), cores)
    return cores


def pci_address(index: int) -> str:
    """Return the address under which Linux lists a GPU that CUDA shows to this process; "" if no driver answers."""
    with suppress(OSError):
        cuda, device, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(32)
        if cuda.cuInit(0) == cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
            cuda.cuDeviceGetPCIBusId(found, len(found), device)
        return found.value.decode().lower()
    return ""


def cores_near(address: str, system: Path = SYSTEM) -> set[int]:
    """Return the cores of the node at which a device is; none if Linux does not know one.

    /sys/devices/system/node/node1/cpulist: 32-63,96-127
    """
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text()  # node -1: unknown
    except (OSError, ValueError):
        return set()
    ends = [part.split("-") for part in listed.strip().split(",") if part]
    return {core for first, *last in ends for core in range(int(first), int((last or [first])[0]) + 1)}
