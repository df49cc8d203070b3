"""Standard streams that outlive their readers: nothing that a run prints can end it."""

import io
import os
import sys
from contextlib import suppress
from typing import Any


class LastingFile(io.FileIO):
    """Drops what cannot be written: the reader of the pipe has ended, the terminal is gone, the disk is full."""

    def close(self) -> None:
        """Stay open: user code may close what it prints to."""

    def write(self, data: Any, /) -> int:
        whole = left = memoryview(data).cast("B")
        with suppress(OSError):
            while left and (written := super().write(left)):  # None: a full pipe that does not block
                left = left[written:]
        return len(whole)


def outlive_readers() -> None:
    """Make stdout and stderr lasting. Open /dev/null for a standard stream that is closed: otherwise the next file or
    socket would get its number, and be printed to."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
        encoding = getattr(stream, "encoding", None) or "utf-8"
        file = LastingFile(fd, "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(file, encoding, errors="backslashreplace", write_through=True))
