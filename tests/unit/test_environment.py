"""The run's folder for sockets: short, private, kept while its run lives, removed after the run was killed."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titan_rl.environment import (
    LONGEST_TMPDIR,
    cache_home,
    claim_monarch_log_folder,
    compile_cache,
    private_folder,
    remove_abandoned,
    socket_folder,
)

ROOT = Path(__file__).parents[2]
HOLD = """
import sys, tempfile
from titan_rl.environment import socket_folder
with socket_folder() as folder:
    print(folder, flush=True)
    input()
"""
NEW_PIDS = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="base-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def holder(base: Path, *prefix: str, **env: str) -> "subprocess.Popen[str]":
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(base), **env}
    command = [*prefix, sys.executable, "-c", HOLD]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def folder_of(process: "subprocess.Popen[str]") -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_a_killed_runs_folder_is_removed_by_the_next_and_a_living_ones_is_not(short: Path) -> None:
    with holder(short) as alive, holder(short) as killed:
        kept, left = folder_of(alive), folder_of(killed)
        killed.kill()
        killed.wait()
        with socket_folder() as own:
            assert own.stat().st_mode & 0o777 == 0o700
            assert sorted(short.glob("titan_rl-*")) == sorted([kept, own])
            assert not left.exists()
        alive.communicate("\n", timeout=30)
    assert list(short.glob("titan_rl-*")) == []


@pytest.mark.skipif(
    subprocess.run([*NEW_PIDS, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs a pid namespace",
)
def test_runs_in_two_containers_that_share_tmp_keep_their_folders(short: Path) -> None:
    """Each has the same pid, and sees no process of the other."""
    own = {"USER": f"titan_rl-{os.getuid()}"}  # root's folder of logs in /tmp may be another user's
    with holder(short, *NEW_PIDS, **own) as one, holder(short, *NEW_PIDS, **own) as other:
        folders = {folder_of(one), folder_of(other)}
        assert len(folders) == 2
        assert all(folder.is_dir() for folder in folders)
        one.communicate("\n", timeout=30)
        other.communicate("\n", timeout=30)


def test_a_long_tmpdir_is_not_used(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tempfile

    long = short / ("t" * LONGEST_TMPDIR)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    with socket_folder() as folder:
        assert folder.parent == short
    assert f"TMPDIR={long} is too long" in capsys.readouterr().err


def test_a_compile_cache_of_another_user_is_not_used(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with socket_folder():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(short / f"torchinductor_{os.getuid()}")
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    monkeypatch.setattr(os, "getuid", lambda: 123456)  # not the owner of the folder that is made here
    assert compile_cache(short, short / "run") == str(short / "run" / "torchinductor")


def test_another_users_fifo_and_links_neither_hang_nor_redirect_a_start(short: Path) -> None:
    foreign, linked, target = short / "titan_rl-foreign", short / "titan_rl-linked", short / "target"
    for folder in (foreign, linked, target):
        folder.mkdir()
    os.mkfifo(foreign / "in-use")
    (target / "in-use").touch()
    (linked / "in-use").symlink_to(target / "in-use")
    (short / "titan_rl-link").symlink_to(target)
    with socket_folder() as folder:
        assert folder.is_dir()
    assert target.is_dir()
    assert linked.is_dir()


def test_a_start_that_another_one_takes_for_abandoned_gets_a_new_folder(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other start comes between the making of the lock and its locking."""
    real, others = fcntl.flock, [short]

    def flock(lock: Any, operation: int) -> None:
        if others:
            remove_abandoned(others.pop())
        real(lock, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with private_folder() as folder:
        assert list(short.iterdir()) == [folder]
        assert (folder / "in-use").is_file()
    assert list(short.iterdir()) == []


def test_a_dry_run_leaves_nothing(short: Path) -> None:
    command = [sys.executable, "-m", "titan_rl.run", "--config", "grpo_llama", "--dry-run", "--job.dump_folder"]
    env = {**os.environ, "TMPDIR": str(short)}
    subprocess.run([*command, str(short / "run")], cwd=ROOT, env=env, check=True, capture_output=True)
    assert list(short.iterdir()) == []


def test_temporary_files_of_a_run_lie_in_its_folder(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with socket_folder() as folder:
        assert tempfile.gettempdir() == str(folder)
        tempfile.NamedTemporaryFile(delete=False).close()
    assert tempfile.gettempdir() == str(short)
    assert [path.name for path in short.iterdir()] == [f"torchinductor_{os.getuid()}"]


@pytest.mark.parametrize("trap", ["folder of another user", "link to a folder", "link to a file", "hard link", "pipe"])
def test_monarchs_log_is_not_written_where_another_user_chose(
    short: Path, trap: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("USER", "victim")
    folder, precious = short / "victim", short / "precious"
    precious.mkdir()
    if trap == "link to a folder":
        folder.symlink_to(precious)
    else:
        folder.mkdir()
    if trap == "link to a file":
        (folder / "monarch_log.log").symlink_to(precious / "file")
    if trap == "hard link":
        (precious / "file").touch()
        (folder / "monarch_log.log").hardlink_to(precious / "file")
    if trap == "pipe":
        os.mkfifo(folder / "monarch_log.log")
    if trap == "folder of another user":
        monkeypatch.setattr(os, "getuid", lambda: 123456)
    with pytest.raises(SystemExit) as stopped:
        claim_monarch_log_folder(short)
    assert stopped.value.code == 2
    assert f"expected {folder} to be a folder of yours" in capsys.readouterr().err


def test_monarchs_log_folder_is_made_private(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "someone")
    claim_monarch_log_folder(short)
    assert (short / "someone").stat().st_mode & 0o777 == 0o700
    (short / "someone").chmod(0o777)
    claim_monarch_log_folder(short)
    assert (short / "someone").stat().st_mode & 0o777 == 0o755
    monkeypatch.delenv("USER")
    monkeypatch.setattr("titan_rl.environment._name_of_user", lambda: "uid77")  # a user without a name in a container
    claim_monarch_log_folder(short)
    assert os.environ["USER"] == "uid77"
    assert (short / "uid77").is_dir()


@pytest.mark.parametrize("home", ["missing", "read-only"])
def test_caches_move_where_the_users_cannot_be_written(
    short: Path, home: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (short / "file").touch()
    usual = Path("/proc/caches") if home == "read-only" else short / "file/home/.cache"
    monkeypatch.setenv("HOME", str(usual.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(usual) if home == "read-only" else "")
    own = short / f"titan_rl_cache_{os.getuid()}"
    for _ in range(2):
        with private_folder(short):
            assert cache_home() == own
            assert os.environ["TRITON_HOME"] == str(own)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"titan_rl: {usual} cannot be written (")
        assert line.endswith(f": models and caches go to {own}")
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)  # others may have written there
    with private_folder(short) as private:
        assert cache_home() == private / "titan_rl_cache"


def test_a_user_without_a_home_or_a_name_runs_the_programs(short: Path) -> None:
    """As a user id of a container without an entry in /etc/passwd."""
    code = "import os; os.path.expanduser = lambda path: str(path)\n"
    code += "from titan_rl.environment import cache_home, unwritable; print(unwritable(cache_home()))\n"
    code += "import titan_rl.tools.doctor.report_lines, titan_rl.tools.fetch.models"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("this user has no home folder\n", "")


def test_the_limit_of_open_files_is_as_high_as_the_user_may_raise_it() -> None:
    code = """
import resource
from titan_rl.environment import prepare_environment
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
prepare_environment()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
