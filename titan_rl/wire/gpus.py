"""Counts GPUs without importing torch."""

import os
import shutil
import subprocess
from pathlib import Path


def visible_gpus() -> int:
    """Count the NVIDIA GPUs that CUDA would show to this process, without importing torch."""
    present = _present_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    for count, device in enumerate(map(str.strip, visible.split(","))):
        known = device.startswith(("GPU-", "MIG-")) or (device.isdecimal() and int(device) < present)
        if not (present and known):
            return count  # CUDA stops reading at the first entry that is not a device
    return visible.count(",") + 1


def _present_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
    except subprocess.TimeoutExpired:
        return 0  # a driver that hangs cannot run anything
    return sum(line.startswith("GPU ") for line in listed.splitlines())
