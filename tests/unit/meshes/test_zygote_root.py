"""The process that zygotes are forked from."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from titan_rl.meshes.zygotes import KIND_ENV, KINDS, VARIABLE, Kind, Zygotes, serving

ROOT = Path(__file__).resolve().parents[3]
ZYGOTE = ROOT / "titan_rl/meshes/zygote.py"
SHARED = """
import sys
sys.path.insert(0, "titan_rl/meshes")
import zygote_root
zygote_root.zygote.import_all(zygote_root.SHARED, "root")
unwanted = {"torch._dynamo", "vllm", "transformers", "torchtitan"}
print("torch" in zygote_root.SHARED, sorted(unwanted & sys.modules.keys()))
"""


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def await_ready(folder: Path, kind: Kind) -> None:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(60)
        asking.connect(str(folder / kind))
        asking.sendall(b"\0\0")
        assert asking.recv(16) == b"ready\n", (folder / f"{kind}.log").read_text()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[psutil.Process]]:
    """Returns the processes that the test has started: a root first, then its zygotes. Others may be the session's."""
    monkeypatch.delenv(VARIABLE, raising=False)
    before = psutil.Process().children(recursive=True)
    return lambda: [process for process in psutil.Process().children(recursive=True) if process not in before]


def zygote_of(kind: Kind, among: list[psutil.Process]) -> psutil.Process:
    (found,) = (process for process in among if process.cmdline()[2:4] == [str(ZYGOTE), kind])
    return found


def test_zygotes_share_a_root_and_have_what_their_kinds_need(
    forked: Callable[[], list[psutil.Process]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::DeprecationWarning")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    with serving(tmp_path) as zygotes:
        zygotes.keep(KINDS)
        for kind in KINDS:
            await_ready(tmp_path, kind)
        model, generator = (zygote_of(kind, forked()) for kind in KINDS)
        root = model.parent()
        assert root
        assert root == generator.parent()
        assert root.parent() == psutil.Process()
        assert [process.num_threads() for process in (root, model, generator)] == [1, 1, 1]
        for kind in KINDS:
            own = {"PYTHONWARNINGS": "ignore::DeprecationWarning", "TORCHDYNAMO_DISABLE": "0", **KIND_ENV[kind]}
            assert own.items() <= zygote_of(kind, forked()).environ().items()
        assert (tmp_path / "root.log").read_text() == ""
        zygotes.keep(["model"])
        until(lambda: not generator.is_running())
        assert not (tmp_path / "generator").exists()
        await_ready(tmp_path, "model")
        zygotes.keep(KINDS)
        await_ready(tmp_path, "generator")
        other = zygote_of("generator", forked())
        assert other.parent() != root
        zygotes.keep([])
        assert forked() == []


def test_zygotes_die_with_their_root_and_it_with_its_parent(
    forked: Callable[[], list[psutil.Process]], tmp_path: Path
) -> None:
    with serving(tmp_path) as zygotes:
        zygotes.keep(KINDS)
        until(lambda: len(forked()) == 3)
        root, *zygote_processes = forked()
        root.kill()
        assert not psutil.wait_procs(zygote_processes, timeout=30)[1]
        zygotes.keep(["model"])  # nobody is left to be told, and the socket can be bound again
        zygotes.keep([])
    program = f"""
import os, sys, time
from pathlib import Path
from titan_rl.meshes.zygotes import KINDS, serving
with serving(Path({str(tmp_path)!r})) as zygotes:
    zygotes.keep(KINDS)
    print("started", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, text=True) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == "started\n"
        until(lambda: len(psutil.Process(parent.pid).children(recursive=True)) == 3)
        left = psutil.Process(parent.pid).children(recursive=True)
        os.kill(parent.pid, signal.SIGKILL)
    assert not psutil.wait_procs(left, timeout=30)[1]


def test_what_zygotes_share_reads_nothing_that_differs_between_kinds() -> None:
    done = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout == "True []\n", done.stderr


def test_zygotes_that_cannot_be_started_are_none(forked: Callable[[], list[psutil.Process]], tmp_path: Path) -> None:
    zygotes = Zygotes(tmp_path / ("x" * 100))
    zygotes.keep(KINDS)
    assert forked() == []
    zygotes.end_all()
