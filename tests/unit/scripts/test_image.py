"""The Dockerfile copies what exists and what an install needs, and starts titan_rl as an ordinary user.

No container is built here: no test needs a container runtime.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from bundle import SOURCE

ROOT = Path(__file__).parents[3]
HOME = "/opt/titan_rl/"


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile and their arguments, in order."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(words[0], words[2]) for line in text.splitlines() if (words := line.partition(" "))[0]]


def of(steps: list[tuple[str, str]], name: str) -> list[str]:
    return [argument for instruction, argument in steps if instruction == name]


def test_all_that_is_copied_exists_and_reaches_the_build(steps: list[tuple[str, str]]) -> None:
    ignored, *sent = (ROOT / ".dockerignore").read_text().split()
    assert ignored == "*"
    copied = dict[str, str]()
    for arguments in of(steps, "COPY"):
        *sources, target = shlex.split(arguments)
        copied |= {source: target + Path(source).name if target.endswith("/") else target for source in sources}
    assert {f"!{name}" for name in copied} == {line for line in sent if line.startswith("!")}
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert copied == {name: HOME + name for name in copied}, "links of titan_rl/ lead to folders next to it"
    assert set(SOURCE) < set(copied)


def test_every_step_names_files_that_were_copied(steps: list[tuple[str, str]]) -> None:
    commands = " ".join(of(steps, "RUN"))
    named = {path for path in re.findall(rf"{HOME}([\w./]+)", commands) if not path.startswith(".venv")}
    assert named == {"scripts/install.py"}


def test_an_ordinary_user_starts_the_installed_program(steps: list[tuple[str, str]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert of(steps, "ARG") == ["ENGINE=cpu", "ENGINE"], "each FROM forgets the arguments before it"
    name = "ENGINE"
    assert f'"${name}"' in " ".join(of(steps, "RUN"))
    (user,) = of(steps, "USER")
    assert int(user) > 0
    assert steps[-1] == ("CMD", '["--help"]')
    assert of(steps, "ENTRYPOINT") == [f'["{next(iter(project["scripts"]))}"]']
    assert next(i for i, step in enumerate(steps) if step[0] == "USER") > max(
        i for i, step in enumerate(steps) if step[0] in ("RUN", "COPY")
    )
    *engines, last = of(steps, "FROM")
    assert last == "${ENGINE}"
    bases = {stage: base for base, _, stage in (engine.partition(" AS ") for engine in engines)}
    assert set(bases) == {"cpu", "cuda"} <= set(project["optional-dependencies"])
    (base,) = set(bases.values())
    version = re.match(r"python:3\.(\d+)-", base)
    assert version
    assert 11 <= int(version[1]) < 14, project["requires-python"]
    assert "/work" in " ".join(of(steps, "RUN")), "the folder of runs, which the user has to write to"


def test_only_the_cuda_image_asks_enroot_for_gpus(steps: list[tuple[str, str]]) -> None:
    asked = [i for i, (name, text) in enumerate(steps) if name == "ENV" and "NVIDIA_VISIBLE_DEVICES=all" in text]
    (at,) = asked
    before = [text for name, text in steps[:at] if name == "FROM"]
    assert before[-1].endswith(" AS cuda")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in steps[at][1], "enroot's default is utility alone"


def test_a_package_with_a_file_for_a_later_python_does_not_end_the_build(
    steps: list[tuple[str, str]], tmp_path: Path
) -> None:
    """torch has one, which Python 3.11 does not compile."""
    (command,) = (each for each in of(steps, "RUN") if "compileall" in each)
    script = command[command.index("python -m compileall") :].replace("python ", f"{shlex.quote(sys.executable)} ")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/later.py").write_text("def f[")
    (tmp_path / "ours.py").write_text("x = 1\n")
    script = script.replace(HOME.rstrip("/"), str(tmp_path))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPYCACHEPREFIX"}
    assert subprocess.run(["sh", "-ec", script], env=environment).returncode == 0
    assert [*tmp_path.glob("__pycache__/ours.*.pyc")]
    (tmp_path / "broken.py").write_text("def f[")
    assert subprocess.run(["sh", "-ec", script], env=environment).returncode != 0
