"""Finds GPUs without importing torch."""

import os
import shutil
import subprocess
from pathlib import Path

PLANNED = "TITAN_RL_DEVICE"  # "cpu" or "cuda": in the environment of every rank


def visible_gpus() -> int:
    """Count the NVIDIA GPUs that CUDA would show to this process."""
    return len(visible_devices())


def visible_devices() -> list[str]:
    """Return the names, indices or UUIDs, by which CUDA_VISIBLE_DEVICES may give these GPUs to other processes."""
    present = _present_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(present)]
    found = list[str]()
    for device in map(str.strip, visible.split(",")):
        known = device.startswith(("GPU-", "MIG-")) or (device.isdecimal() and int(device) < present)
        if not (present and known):
            break  # CUDA stops reading at the first entry that is not a device
        found.append(device)
    return found


def require_planned_device(cuda_is_available: bool) -> None:
    """Raise if this process was started for a GPU and torch finds none: it would go on on the CPU, without a word."""
    if os.environ.get(PLANNED) == "cuda" and not cuda_is_available:
        raise RuntimeError(
            "expected a GPU, because the run was planned for CUDA, found none that torch can use: the driver may be "
            'too old for torch (python -m titan_rl.doctor); hosts.device = "cpu" runs on the CPU'
        )


def _present_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
    except subprocess.TimeoutExpired:
        return 0  # a driver that hangs cannot run anything
    return sum(line.startswith("GPU ") for line in listed.splitlines())
