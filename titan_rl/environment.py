"""Sets the controller's environment before Monarch is imported, which reads it at import."""

import fcntl
import os
import pwd
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

CONTROLLER_ENV = {
    "MONARCH_FILE_LOG": "error",  # Monarch's own log grows by 30 MB an hour otherwise
    # Longest silence of a process agent before Monarch gives its ranks up, 30 s by default. It counts the time in which
    # the controller itself was stopped, as by Ctrl-Z. Deaths and lost hosts are known without it.
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "10m",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "10m",
}
ALERT = "TITAN_RL_ALERT"
TRACKER_KEYS = (
    ALERT,
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "TRACKIO_WRITE_TOKEN",
    "HF_TOKEN",
)
"""Environment variables that let their holder write to a server of yours. No rank has them."""
# Monarch polls the process states of each mesh, for 0.4 to 1.6 ms of the controller's CPU. Deaths are known at once
# without it (meshes/deaths.py): a poll adds how a process ended.
POLLS = 32  # a second, of all meshes together
LONGEST_POLL_SECONDS = 20.0  # a host without a message from the controller for 60 s ends its processes
PREFIX, LOCK = "titan_rl-", "in-use"
# A socket's path has 107 bytes. Monarch's are TMPDIR/titan_rl-4194304-XXXXXXXX/h63/.tmpXXXXXX/xxxxxxxxxxx.
LONGEST_TMPDIR = 107 - 53


def prepare_environment(detect_seconds: float = 2.0, tls: str = "", meshes: int = 0) -> None:
    """`detect_seconds` bounds how late Monarch itself notices a dead process, if the run has few `meshes`; `tls` is the
    folder of this host's certificate. The limit of open files is raised as far as the user may: each agent's request
    and each host is a connection."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError):  # the kernel's limit has become lower than the user's
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    seconds = max(detect_seconds / 2, min(meshes / POLLS, LONGEST_POLL_SECONDS))
    poll = {"HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": f"{max(1, round(1000 * seconds))}ms"}  # default 10 s
    for name, value in {**CONTROLLER_ENV, **poll}.items():
        os.environ.setdefault(name, value)
    if tls:
        folder = Path(tls).absolute()
        os.environ |= {f"HYPERACTOR_TLS_{name.upper()}": str(folder / f"{name}.pem") for name in ("ca", "cert", "key")}


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Give the run a private TMPDIR, as Monarch leaves socket directories there when a process dies."""
    claim_monarch_log_folder()
    shared = short_enough(Path(tempfile.gettempdir()))
    with private_folder(shared) as folder, _set_variable("TORCHINDUCTOR_CACHE_DIR", compile_cache(shared, folder)):
        yield folder


@contextmanager
def private_folder(shared: Path | None = None) -> Iterator[Path]:
    """Give this process and its children a TMPDIR in `shared`, the folder for temporary files, that only its user can
    open. It is removed at the end, or by the next call if this process is killed."""
    shared = shared or Path(tempfile.gettempdir())
    remove_abandoned(shared)
    folder, lock = _locked_folder(shared)
    with lock, _set_variable("TMPDIR", str(folder)), _writable_caches(shared, folder):
        before, tempfile.tempdir = tempfile.tempdir, str(folder)  # gettempdir() has cached the shared folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before
            shutil.rmtree(folder, ignore_errors=True)


def cache_home() -> Path:
    """Return the folder in which programs of this user keep their caches, which may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def cache_folder() -> Path:
    """Return where this package keeps files between runs: $TITAN_RL_CACHE, or titan_rl in the user's cache folder."""
    own = os.environ.get("TITAN_RL_CACHE")
    return Path(own) if own else cache_home() / "titan_rl"


def unwritable(folder: Path) -> str:
    """Return why no file can be written in a folder, which is made if it does not exist, or ""."""
    if folder.parts[0] == "~":
        return "this user has no home folder"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**16))
    except OSError as error:
        return error.strerror or str(error)
    return ""


@contextmanager
def _writable_caches(shared: Path, private: Path) -> Iterator[None]:
    """Where the user's folder for caches cannot be written, give this process and its children one in `shared`."""
    usual = cache_home()
    if why := unwritable(usual):
        own = _user_folder(shared, "titan_rl_cache", private)
        print(f"titan_rl: {usual} cannot be written ({why}): models and caches go to {own}", file=sys.stderr)
        with _set_variable("XDG_CACHE_HOME", str(own)), _set_variable("TRITON_HOME", str(own)):
            yield
    else:
        yield


def _locked_folder(shared: Path) -> tuple[Path, BinaryIO]:
    """Make a folder and lock it until this process ends, however it ends. Another start may remove it just before."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=shared))
        with suppress(FileNotFoundError):
            lock = open(folder / LOCK, "wb")  # noqa: SIM115 (the caller closes it)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (folder / LOCK).exists():
                return folder, lock
            lock.close()


@contextmanager
def _set_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def short_enough(base: Path) -> Path:
    """Return a folder for temporary files whose name is short enough for sockets below it."""
    if len(os.fsencode(base)) <= LONGEST_TMPDIR:
        return base
    for other in (os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp"):
        if other and len(os.fsencode(other)) <= LONGEST_TMPDIR and os.access(other, os.W_OK | os.X_OK):
            print(f"TMPDIR={base} is too long for the names of sockets; the run's are in {other}", file=sys.stderr)
            return Path(other)
    print(f"titan_rl: TMPDIR: expected at most {LONGEST_TMPDIR} bytes, found {base}", file=sys.stderr)
    raise SystemExit(2)


def remove_abandoned(base: Path) -> None:
    """Remove the folders that killed controllers of this user left behind: those whose lock is free."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if not _is_own_folder(folder):  # another user's lock may be a FIFO, on which open() would wait
                continue
            lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def claim_monarch_log_folder(shared: Path = Path("/tmp")) -> None:
    """Make /tmp/USER, in which Monarch appends to monarch_log.log, or exit: no setting of Monarch's changes this path,
    and another user who made it first could link the log to any file of this user."""
    os.environ["USER"] = os.environ.get("USER") or _name_of_user()  # libraries fail for a user id without a name
    name = os.environ["USER"].partition("/")[0]
    folder, log = shared / name, shared / name / "monarch_log.log"
    if not name or not shared.is_dir():
        return
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if own := _is_own_folder(folder):
        folder.chmod(folder.stat().st_mode & ~0o022)  # before the look at the file
    if not own or not _is_absent_or_own_file(log):
        why = f"because Monarch writes {log.name} there, found one of another user, or a link or pipe"
        print(f"titan_rl: expected {folder} to be a folder of yours, {why}. Set USER to a free name", file=sys.stderr)
        raise SystemExit(2)


def _is_absent_or_own_file(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and status.st_nlink == 1


def _is_own_folder(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _name_of_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid{os.getuid()}"


def compile_cache(base: Path, folder: Path) -> str:
    """Return the folder for compiled code, which outlives a run."""
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(_user_folder(base, "torchinductor", folder))


def _user_folder(base: Path, name: str, private: Path) -> Path:
    """Return the folder of this name and this user in `base`, the folder for temporary files. Another user may have
    created it, to have their code executed: then return one in the run's private folder."""
    shared = base / f"{name}_{os.getuid()}"
    with suppress(FileExistsError):
        shared.mkdir(mode=0o700)
    own = _is_own_folder(shared) and not shared.lstat().st_mode & 0o022
    return shared if own else private / name
