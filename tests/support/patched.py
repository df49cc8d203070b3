"""An installed package with a change of docs/upstream."""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]


def patched(package: str, contribution: str, to: Path) -> Path:
    """Lay out a copy of an installed package in the folder `to`, and apply a contribution's change to it. Files that it
    does not change are links. Return the folder, for PYTHONPATH."""
    patches = sorted((ROOT / "docs/upstream" / contribution).glob("*.patch"))
    listed = subprocess.run(["git", "apply", "--numstat", *patches], capture_output=True, text=True, check=True).stdout
    paths = [Path(line.split("\t")[2]) for line in listed.splitlines()]
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    _link(Path(spec.origin).parent, to / package, {path.parts[1:] for path in paths if path.parts[0] == package})
    subprocess.run(["git", "apply", f"--include={package}/*", *patches], cwd=to, check=True)
    return to


def _link(source: Path, to: Path, changed: set[tuple[str, ...]]) -> None:
    to.mkdir(parents=True)
    for entry in source.iterdir():
        below = {path[1:] for path in changed if path[0] == entry.name}
        if not below:
            (to / entry.name).symlink_to(entry)
        elif entry.is_dir():
            _link(entry, to / entry.name, below)
        else:
            shutil.copyfile(entry, to / entry.name)
