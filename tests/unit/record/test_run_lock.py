"""One run, one folder: the lock, and the folder that --job.fresh moves aside."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from errno import ENOLCK
from pathlib import Path

import pytest

from titan_rl.config.sections import JobSection
from titan_rl.record.run_folder import FolderRefused, check_folder, move_aside
from titan_rl.record.run_lock import LOCK, RunLock

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from titan_rl.record.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=sys.stdin)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_folder_in_use_is_refused_by_name_until_its_process_is_dead(tmp_path: Path) -> None:
    """A child that outlives the process, as a rank does for a moment, holds nothing."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        with pytest.raises(FolderRefused) as refused:
            RunLock(folder)
        assert f"found {folder}, where process {holder.pid} on {socket.gethostname()} is running" in str(refused.value)
        assert f"python -m titan_rl ctl {folder} stop" in str(refused.value)
        assert json.loads((folder / LOCK).read_text()) == {"pid": holder.pid, "host": socket.gethostname()}
        holder.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        with RunLock(folder):
            assert Path(f"/proc/{child}").exists()
            assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()


def test_nothing_stays_of_a_lock(tmp_path: Path) -> None:
    with RunLock(tmp_path / "a" / "run"):
        assert (tmp_path / "a" / "run" / LOCK).exists()
    assert not (tmp_path / "a" / "run").exists(), "nothing else was in it"
    with RunLock(tmp_path / "b"):
        (tmp_path / "b" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["metrics.jsonl"]
    (tmp_path / "c").mkdir()
    with RunLock(tmp_path / "c"):
        pass
    assert (tmp_path / "c").exists()


def test_a_lock_file_that_is_removed_meanwhile_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that held it removed it after this one had opened it: another may have a new one."""
    opened = iter([True, False])
    real = fcntl.flock

    def removed(fd: int, how: int) -> None:
        real(fd, how)
        if next(opened):
            (tmp_path / LOCK).unlink()

    monkeypatch.setattr(fcntl, "flock", removed)
    with RunLock(tmp_path):
        monkeypatch.undo()
        with pytest.raises(FolderRefused):
            RunLock(tmp_path)


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("other", ["alive", "dead", "elsewhere", "unreadable", "own"])
def test_where_a_filesystem_has_no_locks_pid_and_host_decide(tmp_path: Path, other: str) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    pid = {"dead": int(ended.stdout), "own": os.getpid()}.get(other, os.getppid())
    host = "another.host" if other == "elsewhere" else socket.gethostname()
    (tmp_path / LOCK).write_text("" if other == "unreadable" else json.dumps({"pid": pid, "host": host}))
    if other in ("alive", "elsewhere"):
        with pytest.raises(FolderRefused, match=f"where process {pid} on {host} is running.* delete {tmp_path / LOCK}"):
            RunLock(tmp_path)
    else:
        with RunLock(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderRefused, match=r"job\.dump_folder: expected a folder .*/file/run: Not a directory"):
        RunLock(tmp_path / "file" / "run")


def test_an_old_run_is_moved_and_both_folders_stay_locked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("old")
    with RunLock(folder) as lock:
        lock.move_old_run()
        assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == "old"
        assert not (tmp_path / "run.1" / LOCK).exists()
        with pytest.raises(FolderRefused, match=f"process {os.getpid()} on"):
            RunLock(folder)
        lock.move_old_run()
        assert not (tmp_path / "run.2").exists(), "an empty folder is no run"


def test_a_link_stays_and_what_it_leads_to_is_moved(tmp_path: Path) -> None:
    target, link = tmp_path / "disk" / "run", tmp_path / "link"
    target.mkdir(parents=True)
    (target / "metrics.jsonl").touch()
    link.symlink_to(target)
    with RunLock(link) as lock:
        lock.move_old_run()
    assert link.is_symlink()
    assert [path.name for path in link.iterdir()] == []
    assert [path.name for path in (tmp_path / "disk" / "run.1").iterdir()] == ["metrics.jsonl"]


def test_folders_that_must_not_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "project" / "sub"
    here.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "project")
    monkeypatch.chdir(here)
    for name, found in [
        (".", f"{here}, which is the current folder"),
        ("../", f"{here.parent}, which holds the current folder"),
        (str(tmp_path / "link"), f"{here.parent}, which holds the current folder"),
        ("/", "/, which holds the current folder"),
        ("/proc", "the mount point /proc: use a folder inside it"),
    ]:
        with pytest.raises(FolderRefused) as refused:
            check_folder(JobSection(dump_folder=name, fresh=True))
        assert str(refused.value) == f"job.fresh: expected a job.dump_folder that can be renamed, found {found}"
        check_folder(JobSection(dump_folder=name))
    check_folder(JobSection(dump_folder="outputs/run", fresh=True))


def test_what_the_kernel_does_not_rename_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bind mount of the same filesystem does not look like one."""

    def busy(source: object, target: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "rename", busy)
    with pytest.raises(FolderRefused, match=r"can be renamed, found .*run: Device or resource busy"):
        move_aside(tmp_path / "run")
