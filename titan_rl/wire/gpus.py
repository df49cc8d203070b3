"""Finds GPUs without importing torch."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titan_rl.wire.program import command_of

PLANNED = "TITAN_RL_DEVICE"  # "cpu" or "cuda": in the environment of every rank


ASK_DRIVER = """
from ctypes import CDLL, byref, c_int, c_size_t
cuda, number, device, nbytes, sizes = CDLL("libcuda.so.1"), c_int(), c_int(), c_size_t(), []
assert cuda.cuInit(0) == cuda.cuDeviceGetCount(byref(number)) == 0
for index in range(number.value):
    assert cuda.cuDeviceGet(byref(device), index) == cuda.cuDeviceTotalMem_v2(byref(nbytes), device) == 0
    sizes.append(nbytes.value)
print(min(sizes))
"""
"""Prints the bytes of the smallest device that CUDA shows, as the driver has them."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that a run may use; if not `here`, the GPUs that a dry run plans for."""

    count: int = 0
    nbytes: int = 0  # memory of the smallest one; 0: unknown
    here: bool = True
    driver: str = ""  # its version
    name: str = ""  # the smallest one's, as nvidia-smi prints it
    cuda: str = ""  # the newest CUDA that the driver runs; empty: unknown


NO_GPUS = Gpus()


def found_gpus() -> Gpus:
    """Return the GPUs that CUDA would show to this process."""
    visible = visible_devices()
    if not visible:
        return NO_GPUS
    version, cuda = driver()
    nbytes, name = _smallest(visible)
    return Gpus(len(visible), nbytes or _smallest_by_driver(), driver=version, cuda=cuda, name=name)


def driver() -> tuple[str, str]:
    """Return the version of NVIDIA's driver and the newest CUDA that it runs; empty if unknown."""
    text = "\n".join(_nvidia_smi())
    version, cuda = (re.search(rf"{name}:\s*([\d.]+)", text) for name in ("Driver Version", "CUDA(?: UMD)? Version"))
    return version[1] if version else "", cuda[1] if cuda else ""


def visible_gpus() -> int:
    """Count the NVIDIA GPUs that CUDA would show to this process."""
    return len(visible_devices())


def visible_devices() -> list[str]:
    """Return the names, indices or UUIDs, by which CUDA_VISIBLE_DEVICES may give these GPUs to other processes."""
    present = _present_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(present)]
    devices = list[str]()
    for device in map(str.strip, visible.split(",")):
        is_device = device.startswith(("GPU-", "MIG-")) or (device.isdecimal() and int(device) < present)
        if not (present and is_device):
            break  # CUDA stops reading at the first entry that is not a device
        devices.append(device)
    return devices


def require_planned_device(cuda_is_available: bool) -> None:
    """Raise if this process was started for a GPU and torch finds none: it would silently use the CPU."""
    if os.environ.get(PLANNED) == "cuda" and not cuda_is_available:
        raise RuntimeError(
            "expected a GPU, because the run was planned for CUDA, found none that torch can use: the driver may be "
            f'too old for torch ({command_of("doctor")}); hosts.device = "cpu" runs on the CPU'
        )


def _present_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return sum(line.startswith("GPU ") for line in _nvidia_smi("-L"))


def _smallest(devices: Sequence[str]) -> tuple[int, str]:
    """Return the bytes and the name of the smallest of some devices, by index or UUID; 0 if one is unknown, such as a
    MIG slice."""
    cards = dict[str, tuple[int, str]]()
    for line in _nvidia_smi("--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"):
        with suppress(ValueError):  # a device may say "[N/A]"
            index, uuid, mib, name = map(str.strip, line.split(",", 3))
            cards[index] = cards[uuid] = int(mib) << 20, name
    return min(cards.get(device, (0, "")) for device in devices)


def _smallest_by_driver() -> int:
    """Return the bytes of the smallest device that CUDA shows, MIG slices included; 0 if no driver answers. A child
    asks it, as CUDA would not survive a fork of this process."""
    try:
        child = subprocess.run([sys.executable, "-c", ASK_DRIVER], capture_output=True, timeout=60, check=True)
        return int(child.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def _nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if there is no such tool, or if its driver hangs."""
    with suppress(OSError, subprocess.TimeoutExpired):  # PermissionError: PATH has a folder that may not be searched
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.splitlines()
    return []
