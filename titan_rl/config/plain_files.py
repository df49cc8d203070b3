"""Reads files that somebody else may have put there: a FIFO or a device in their place may never end."""

import errno
import os
import stat
from pathlib import Path


class NotAFile(OSError):
    """A path leads to something else than a file; str() names both."""

    def __str__(self) -> str:
        return f"{self.strerror} at {self.filename}"


def bytes_of(path: Path) -> bytes:
    """Return a file's bytes. Raise NotAFile at once for a FIFO, a device, a socket or a folder."""
    refuse_other(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have been replaced meanwhile
    with open(fd, "rb") as file:
        return file.read()


def text_of(path: Path) -> str:
    """Return the text of a file in UTF-8, as bytes_of does."""
    return bytes_of(path).decode("utf-8")


def refuse_other(path: Path) -> None:
    """Raise NotAFile if the path leads to something else than a file, and OSError if to nothing."""
    kind = path.stat().st_mode
    if not stat.S_ISREG(kind):
        found = "a folder" if stat.S_ISDIR(kind) else "a FIFO" if stat.S_ISFIFO(kind) else "something else"
        raise NotAFile(errno.EINVAL, f"expected a file, found {found}", str(path))
