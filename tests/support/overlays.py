"""Lay a patched package over an installed one, to see what a contribution of docs/upstream changes here."""

import importlib.util
import os
import subprocess
from pathlib import Path

UPSTREAM = Path(__file__).resolve().parents[2] / "docs/upstream"


def overlay(package: str, contribution: str, folder: Path, only: tuple[str, ...] = ()) -> dict[str, str]:
    """Copy the files of a package that a contribution changes, link the others, and patch the copies: those named by
    `only`, or all. Return the environment in which Python imports this package instead of the installed one."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    patches = sorted((UPSTREAM / contribution).glob("*.patch"))
    changed = {line.removeprefix("+++ b/") for patch in patches for line in patch.read_text().splitlines()}
    for name in only or changed:
        if name.startswith(f"{package}/"):
            _copy(installed, folder, name)
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    includes = [f"--include={pattern}" for pattern in only or (f"{package}/*",)]
    command = ["git", "apply", *includes, *map(str, patches)]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def _copy(installed: Path, folder: Path, name: str) -> None:
    """Make one file of the overlay a copy, and the folders above it folders of links."""
    source, target = installed.parent, folder
    for part in Path(name).parts:
        source, target = source / part, target / part
        if target.is_symlink():
            target.unlink()
        if source.is_file():
            target.write_bytes(source.read_bytes())
        elif not target.exists():
            target.mkdir()
            for entry in source.iterdir():
                if entry.name != "__pycache__":
                    (target / entry.name).symlink_to(entry)
