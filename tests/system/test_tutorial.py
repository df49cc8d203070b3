"""docs/quickstart.md, followed word for word."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.tutorial import commands, write_files

PATHS = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def obey(line: str, folder: Path) -> str:
    done = subprocess.run(
        shlex.split(line), cwd=folder, env={**os.environ, **PATHS}, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def served(line: str, folder: Path) -> Iterator[dict[str, str]]:
    """Yield what the server tells its clients to set. It listens at a free port."""
    words = shlex.split(re.sub(r"--port \d+", "--port 0", line))
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(words, cwd=folder, env={**os.environ, **PATHS}, stdout=log, stderr=log)
    try:
        ends = time.monotonic() + 300
        while len(printed := re.findall(r"(OPENAI_\w+)=(\S+)", (folder / "server.log").read_text())) < 2:
            assert server.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < ends, "the server does not say where it is"
            time.sleep(0.1)
        yield dict(printed)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


def test_the_files_of_the_tutorial_pass_the_dry_run(tmp_path: Path) -> None:
    write_files(tmp_path)
    make, dry_run = (next(line for line in commands() if word in line) for word in ("make_rows", "--dry-run"))
    obey(make, tmp_path)
    assert "2,800 problems, 200 held out, reward rewards:right" in obey(dry_run, tmp_path)


@pytest.mark.slow
def test_the_tutorial_comes_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path)
    lines = commands()
    assert lines[:2] == ["source .venv/bin/activate", "mkdir phonebook && cd phonebook"]
    for line in lines[2:]:
        if "titan_rl.tools.serve" not in line:
            print(obey(line, tmp_path))
            continue
        with served(line, tmp_path) as settings:
            monkeypatch.setattr(os, "environ", {**os.environ, **settings})
            answers = [answer.split() for answer in obey("python ask.py", tmp_path).splitlines()]
            assert sum(found == expected for _, found, _, expected in answers) >= 2, answers
    summary = json.loads((tmp_path / "runs/phone/summary.json").read_text())
    assert summary["final_eval"] >= 0.9
