"""Name, begin and end of a program. The end of one that has worker processes waits for no threads."""

import argparse
import io
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

DONE, FAILED, USAGE, STOPPED = 0, 1, 2, 130  # exit codes
FAILED_AGAIN = 3  # exit code of a run that would fail in the same way if it were started again

WHY_PAGE = "docs/it_does_not_learn.md"

typed = ""
"""The command by which the user started one of several programs, as in "titan_rl audit"; empty: python -m."""


def command_of(name: str) -> str:
    """Return what the user types to start a program; without a name, what starts any of them. A run needs no name."""
    if typed:
        return f"{typed} {'' if name == 'run' else name}".rstrip()
    if name == "run":
        return "python -m titan_rl.run"
    return f"python -m titan_rl {name}".rstrip()


def why_command(folder: object) -> str:
    """Return the command that names why a run does not learn."""
    return f"{command_of('why')} {shlex.quote(str(folder))}"


def enter(main: Callable[[], int], stopped: str = "") -> None:
    """Call `main`, and exit without waiting for threads or workers: workers die with this process. `stopped` is printed
    if a signal ends it."""
    outlive_readers()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, signal.default_int_handler)
    with suppress(FileNotFoundError):  # the current folder was removed
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # where a reward's module is, which `python -m` finds too
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else USAGE
    except KeyboardInterrupt:
        if stopped:
            print(stopped)
        code = STOPPED
    except BaseException as error:  # Monarch's threads would abort an interpreter that ends by an exception
        code = _failed(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _failed(error: BaseException) -> int:
    """Print an error, and return the exit code: a folder with a FIFO in it is bad usage, anything else a bug."""
    from titan_rl.config.plain_files import NotAFile

    if isinstance(error, NotAFile):
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return USAGE
    traceback.print_exception(error)
    return FAILED


def path_argument(text: str) -> Path:
    """Return an argument as a path, which may lead nowhere. argparse refuses one that no file can have."""
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"expected a path, found {text[:80]!r} ({why})") from error
    return Path(text)


class LastingFile(io.FileIO):
    """Drops bytes that cannot be written: the pipe has no reader, the terminal is gone, the disk is full."""

    def close(self) -> None:
        """Stay open: user code may close its standard streams."""

    def write(self, data: Any, /) -> int:
        whole = rest = memoryview(data).cast("B")
        with suppress(OSError):
            while rest and (written := super().write(rest)):  # None: a full pipe that does not block
                rest = rest[written:]
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
