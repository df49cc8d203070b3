"""Peak rates of GPUs, by TorchTitan's table."""

from functools import cache

import torch
from torchtitan.tools.utils import get_peak_flops

from titan_rl.kernels.logit_windows import most_flops

A100_PEAK_FLOPS = 312e12


def known_peak_flops(device_name: str) -> float | None:
    """The device's peak in bfloat16, or None where TorchTitan does not know it: it then takes an A100's."""
    try:
        peak = get_peak_flops(device_name)
    except PermissionError:  # it looks for lspci, and PATH has a folder that may not be searched
        return None
    return peak if "A100" in device_name or peak != A100_PEAK_FLOPS else None


@cache
def peak_flops(device: torch.device) -> float:
    """Return a device's peak in bfloat16, an A100's if it is unknown, and no more than its memory bounds."""
    if device.type != "cuda":
        return A100_PEAK_FLOPS
    found = torch.cuda.get_device_properties(device)
    return min(known_peak_flops(found.name) or A100_PEAK_FLOPS, most_flops(found.total_memory))
