"""An nvidia-smi with the output that a test needs."""

import os
from pathlib import Path

import pytest

TWO = "GPU 0: A (UUID: GPU-1)\n  MIG 1g Device 0: (UUID: MIG-1)\nGPU 1: A (UUID: GPU-2)"


def two_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, cuda: str = "13.0") -> None:
    """Put an nvidia-smi of two GPUs into PATH: one of 80 GB, which is split, and one of 16 GB."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"""#!/bin/sh
case "$1" in
-L) echo '{TWO}' ;;
--query*) echo '0, GPU-1, 81559\n1, GPU-2, 15360' ;;
*) echo '| NVIDIA-SMI 580.65  Driver Version: 580.65.06   CUDA Version: {cuda}   |' ;;
esac
""")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
