#!/usr/bin/env python3
"""Install a bundle of titan_rl on a machine without a network. scripts/bundle.py puts this file into each bundle.

    python3.11 BUNDLE/install.py VENV                  # an empty or missing folder
    VENV/bin/python -m titan_rl.run --config grpo_llama --dry-run

Needs only Python, of the version that packed the bundle. Nothing is installed before all pieces of the bundle are there
with their checksums. Models of the bundle go where `fetch:NAME` looks for them, in the user's cache folder.
"""

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

FACTS = "bundle.json"
WHEELS, MODELS = "wheels", "models"  # folders of the tar


class Joined:
    """Reads pieces of a file one after the other."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._left = list(paths)
        self._file = self._left.pop(0).open("rb")

    def read(self, nbytes: int) -> bytes:
        parts = list[bytes]()
        while nbytes:
            part = self._file.read(nbytes)
            parts.append(part)
            nbytes -= len(part)
            if not part:
                if not self._left:
                    break
                self._file.close()
                self._file = self._left.pop(0).open("rb")
        return b"".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path, metavar="VENV")
    parser.add_argument(
        "--nvidia",
        type=Path,
        metavar="FOLDER",
        help="site-packages/nvidia of another Python, for a bundle without CUDA's libraries; default: this Python's",
    )
    a = parser.parse_args()
    bundle = Path(__file__).resolve().parent
    facts = json.loads((bundle / FACTS).read_text())
    nvidia = a.nvidia or next((path for path in map(Path, sys.path) if (path / "nvidia").is_dir()), Path()) / "nvidia"
    if found := problem(facts, bundle, a.venv, nvidia):
        print(f"install: {found}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(dir=a.venv.absolute().parent, prefix="bundle.") as folder:
        with tarfile.open(fileobj=Joined([bundle / name for name in facts["pieces"]]), mode="r|") as tar:  # pyright: ignore
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.11.4 has none
            tar.extractall(folder)
        install(a.venv, Path(folder), nvidia if facts["needs_nvidia"] else None)
    print(f"install: titan_rl is in {a.venv}: {a.venv}/bin/python -m titan_rl doctor")
    return 0


def problem(facts: dict, bundle: Path, target: Path, nvidia: Path) -> str | None:
    """Return why this bundle cannot be installed here."""
    here = {"python": "{}.{}".format(*sys.version_info), "machine": platform.machine()}
    for name, value in here.items():
        if facts[name] != value:
            return f"expected {name} {facts[name]}, for which the bundle was packed, found {value}"
    if target.is_dir() and any(target.iterdir()):
        return f"expected an empty or missing folder for the environment, found {target} with files"
    missing = [name for name in facts["pieces"] if not (bundle / name).is_file()]
    if missing:
        return f"expected {len(facts['pieces'])} pieces in {bundle}, found none of these names: {', '.join(missing)}"
    for name, wanted in facts["pieces"].items():
        if (found := sha256(bundle / name)) != wanted:
            return f"{name}: expected SHA-256 {wanted}, found {found}: copy it again"
    if facts["needs_nvidia"] and not nvidia.is_dir():
        return f"the bundle has no CUDA libraries: expected a folder nvidia beside another torch, found no {nvidia}"
    return None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def install(target: Path, unpacked: Path, nvidia: Path | None) -> None:
    """Make the environment: wheels as they are, because the bundle has chosen versions that fit each other."""
    target.parent.mkdir(parents=True, exist_ok=True)
    venv.create(target, symlinks=True)  # without ensurepip, which Debian ships apart
    python = target / "bin/python"
    wheels = sorted((unpacked / WHEELS).glob("*.whl"))
    pip = next(wheel for wheel in wheels if wheel.name.startswith("pip-"))
    options = [
        "--no-index",
        "--no-deps",
        "--disable-pip-version-check",
        "--no-cache-dir",
        "--no-compile",
        "--quiet",
        "--no-warn-script-location",
    ]
    subprocess.run([python, pip / "pip", "install", *options, *wheels], check=True)
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    if nvidia:
        (packages / "nvidia").mkdir(exist_ok=True)
        for library in nvidia.resolve().iterdir():
            if not (own := packages / "nvidia" / library.name).exists():  # the bundle's stay
                own.symlink_to(library)
    if (unpacked / MODELS).is_dir():
        ask = [python, "-c", "from titan_rl.environment import cache_folder; print(cache_folder())"]
        cache = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()) / "wheels"
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        for wheel in (unpacked / MODELS).glob("*.whl"):
            shutil.copy(wheel, cache)


if __name__ == "__main__":
    sys.exit(main())
