"""Says for which CUDA the installed torch was built, without importing it: that takes seconds."""

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


def torch_file(path: str) -> Path:
    return Path(str(metadata.distribution("torch").locate_file(path)))


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
