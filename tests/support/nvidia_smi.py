"""An nvidia-smi with the output that a test needs."""

import os
import subprocess
from pathlib import Path

import pytest

TWO = "GPU 0: A (UUID: GPU-1)\n  MIG 1g Device 0: (UUID: MIG-1)\nGPU 1: A (UUID: GPU-2)"


LIBCUDA = """
#include <stddef.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device ? 20 : 40) << 30; return 0; }
"""


def driver_of_slices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a libcuda where the loader finds it: of two devices, of 40 and 20 GiB."""
    (folder / "libcuda.c").write_text(LIBCUDA)
    build = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "libcuda.c")]
    subprocess.run(build, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))


def two_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, cuda: str = "13.0") -> None:
    """Put an nvidia-smi of two GPUs into PATH: one of 80 GB, which is split, and one of 16 GB."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"""#!/bin/sh
case "$1" in
-L) echo '{TWO}' ;;
--query*) echo '0, GPU-1, 81559, NVIDIA H100 80GB HBM3\n1, GPU-2, 15360, Tesla T4' ;;
*) echo '| NVIDIA-SMI 580.65  Driver Version: 580.65.06   CUDA Version: {cuda}   |' ;;
esac
""")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
