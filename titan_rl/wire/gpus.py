"""Finds GPUs without importing torch."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titan_rl.wire.program import command_of

PLANNED = "TITAN_RL_DEVICE"  # "cpu" or "cuda": in the environment of every rank


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that a run may use; if not `here`, the GPUs that a dry run plans for."""

    count: int = 0
    nbytes: int = 0  # memory of the smallest one; 0: unknown
    here: bool = True
    driver: str = ""  # its version
    cuda: str = ""  # the newest CUDA that the driver runs; empty: unknown


NO_GPUS = Gpus()


def found_gpus() -> Gpus:
    """Return the GPUs that CUDA would show to this process."""
    visible = visible_devices()
    if not visible:
        return NO_GPUS
    version, cuda = driver()
    return Gpus(len(visible), _smallest_memory(visible), driver=version, cuda=cuda)


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


def _smallest_memory(devices: Sequence[str]) -> int:
    """Return the bytes of the smallest of some devices, by index or UUID; 0 if one is unknown, such as a MIG slice."""
    sizes = dict[str, int]()
    for line in _nvidia_smi("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"):
        with suppress(ValueError):  # a device may say "[N/A]"
            index, uuid, mib = map(str.strip, line.split(","))
            sizes[index] = sizes[uuid] = int(mib) << 20
    return min(sizes.get(device, 0) for device in devices)


def _nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if there is no such tool, or if its driver hangs."""
    with suppress(OSError, subprocess.TimeoutExpired):  # PermissionError: PATH has a folder that may not be searched
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.splitlines()
    return []
