#!/usr/bin/env python3
"""Write scripts/locks: the versions of all packages that titan_rl installs, for Python 3.11 on Linux x86-64.

    .venv/bin/python scripts/lock.py        # resolves anew, by uv of the dev extra and pip's settings
    PIP_CONSTRAINT=$PWD/scripts/locks/cpu.txt ./scripts/run --extra cpu --config grpo_llama

A lock is a list of constraints: versions, without addresses. dev.txt is for the cpu and dev extras together.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from install import CPU_UNUSED, ROOT, TESTS_ONLY, cpu_torch, pip_settings, uv_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = Path(__file__).with_name("locks")
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("cpu", "reasoning"),  # scripts/install.py installs reasoning after either
    "cuda": ("cuda", "reasoning"),
    "dev": ("cpu", "dev"),
}
HEADER = "# {extras}: Python 3.11, Linux x86-64. By scripts/lock.py.\n"
PYTHON = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
PLATFORM = {"python_version": "3.11", "python_full_version": "3.11.0", "sys_platform": "linux"}
PLATFORM |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}


def main() -> int:
    LOCKS.mkdir(exist_ok=True)
    for name, extras in EXTRAS.items():
        (LOCKS / f"{name}.txt").write_text(HEADER.format(extras=", ".join(extras)) + resolved(extras))
    return 0


def resolved(extras: tuple[str, ...]) -> str:
    """Return what uv chooses where scripts/setup would let it choose."""
    wanted = [str(ROOT / "pyproject.toml"), *(f"--extra={extra}" for extra in extras)]
    left_out = [] if "cpu" not in extras else [*CPU_UNUSED, *([] if "dev" in extras else [TESTS_ONLY])]
    with tempfile.TemporaryDirectory() as name:
        overrides, constraints = Path(name, "overrides"), Path(name, "constraints")
        overrides.write_text("".join(f"{each}; sys_platform == 'never'\n" for each in left_out))
        constraints.write_text(cpu_torch() if "cpu" in extras else "")
        plain = ("--quiet", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links")
        command = [sys.executable, "-m", "uv", "pip", "compile", *plain, *PYTHON, *wanted]
        command += ["--override", str(overrides), "--constraint", str(constraints)]
        environment = uv_environment(pip_settings(), os.environ)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def needs(extras: tuple[str, ...]) -> Iterator[Requirement]:
    """Yield the direct requirements on the lock's platform."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = (project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras))
    for need in (Requirement(text) for texts in lists for text in texts):
        if not need.marker or need.marker.evaluate({**PLATFORM, "extra": ""}):
            yield need


def disagreements(text: str, extras: tuple[str, ...]) -> Iterator[str]:
    """Yield where a lock is not one of exact versions, or not one of this pyproject.toml."""
    locked = dict[str, str]()
    for line in text.splitlines()[1:]:
        name, equal, version = line.partition("==")
        if not equal or not version or any(each in line for each in " /@;"):
            yield f"expected NAME==VERSION, found {line!r}"
        elif locked.setdefault(canonicalize_name(name), version) != version:
            yield f"{name}: expected one version, found {locked[canonicalize_name(name)]} and {version}"
    for need in needs(extras):
        version = locked.get(canonicalize_name(need.name))
        if version is None or not need.specifier.contains(version, prereleases=True):
            yield f"{need.name}: expected {need.specifier or 'any version'}, found {version}"


if __name__ == "__main__":
    sys.exit(main())
