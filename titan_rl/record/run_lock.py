"""One run, one folder: the controller's process locks RUN/.lock until it ends, however it ends.

The kernel frees the lock with that one process. Ranks and fork servers do not share it: they are other programs, and
the file is closed when they are started. On a filesystem without locks, the pid and host in the file decide.
"""

import errno
import fcntl
import json
import os
import shlex
import socket
from contextlib import suppress
from pathlib import Path

from titan_rl.record.lines import SelfClosing
from titan_rl.record.run_folder import FolderRefused, move_aside
from titan_rl.wire.program import command_of

LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock(SelfClosing):
    """The lock of a run folder, which is created if it does not exist."""

    def __init__(self, folder: Path) -> None:
        """Raise FolderRefused if another process holds the lock, and name that process."""
        self._folder = folder.resolve()
        self._created = not self._folder.exists()
        self._fd = _lock(self._folder)

    def move_old_run(self) -> None:
        """Move the folder's files aside and continue with an empty folder, which is locked too."""
        if os.listdir(self._folder) != [LOCK]:
            moved, old = move_aside(self._folder), self._fd
            (moved / LOCK).unlink()
            self._fd = _lock(self._folder)
            os.close(old)

    def close(self) -> None:
        """Remove the file, then free the lock. Remove the folder too if it was created for the lock and is empty."""
        path = self._folder / LOCK
        with suppress(OSError):  # not empty, or removed by the user
            if os.path.samestat(os.fstat(self._fd), os.stat(path)):
                path.unlink()
            if self._created:
                self._folder.rmdir()
        os.close(self._fd)


def in_use(folder: Path) -> bool:
    """Return True if a process has the folder locked; this one may, too."""
    if not (folder / LOCK).is_file():  # to open a FIFO would wait for a writer
        return False
    try:
        lock_file = (folder / LOCK).open("rb")
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's run: its end removes the file
        return True
    with lock_file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            holder = _holder(lock.fileno())
            return holder is not None and _may_be_alive(holder)
    return False


def _lock(folder: Path) -> int:
    """Return the open lock file of a folder, locked and with this process's name in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while (fd := _locked(folder / LOCK)) is None:
            continue
    except OSError as error:
        why = f"found {folder}: {error.strerror}"
        raise FolderRefused(f"job.dump_folder: expected a folder that can be written to, {why}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n", 0)
    return fd


def _locked(path: Path) -> int | None:
    """Return a locked file descriptor; None if the file was removed meanwhile by the process that held the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # another user who can open it could hold the lock
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(fd)
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise _in_use(path, holder, "") from None
        if error.errno not in NO_LOCKS:
            raise
        return _by_name(path, holder)
    try:
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except FileNotFoundError:
        pass
    os.close(fd)
    return None


def _by_name(path: Path, holder: tuple[int, str] | None) -> int:
    """Take the file on a filesystem without locks, unless the process that it names may be alive."""
    if holder is not None and holder[0] != os.getpid() and _may_be_alive(holder):
        raise _in_use(path, holder, f" If that process is gone, delete {path}: this filesystem has no locks.")
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _may_be_alive(holder: tuple[int, str]) -> bool:
    pid, host = holder
    return host != socket.gethostname() or Path(f"/proc/{pid}").exists()


def _holder(fd: int) -> tuple[int, str] | None:
    try:
        found = json.loads(os.pread(fd, 4096, 0))
        return int(found["pid"]), str(found["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _in_use(path: Path, holder: tuple[int, str] | None, hint: str) -> FolderRefused:
    who = "another process" if holder is None else f"process {holder[0]} on {holder[1]}"
    return FolderRefused(
        f"job.dump_folder: expected a folder without a live run, found {path.parent}, where {who} is running. "
        f"Wait for its end, stop it ({command_of('ctl')} {shlex.quote(str(path.parent))} stop), or use another "
        f"folder.{hint}"
    )
