"""Runs a Python program or a shell script, in the last process of an execution."""

import atexit
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = str(Path(__file__).parents[3])  # the folder of titan_rl, which the code must not import


class Pipes(NamedTuple):
    """Descriptors of one execution. Those of the code's text and of the tests are sealed memory."""

    code: int
    stdin: int
    stdout: int
    stderr: int
    ending: int  # where process 1 reports how the code ended
    tests: int = -1


def content(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).decode(errors="replace")


def take_descriptors(pipes: Pipes, keep: int = -1) -> None:
    """Take the execution's stdin, stdout and stderr, and close every other descriptor but `keep`."""
    for descriptor, standard in ((pipes.stdin, 0), (pipes.stdout, 1), (pipes.stderr, 2)):
        os.dup2(descriptor, standard)
    if keep > 3:
        os.dup2(keep, 3)
    os.closerange(4 if keep >= 3 else 3, 1 << 16)
    for each in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(each, signal.SIG_DFL)


def become_shell(script: str) -> NoReturn:
    name = f"{os.environ['TMPDIR']}/script.sh"
    with open(name, "w") as file:
        file.write(script)
    os.execv("/bin/sh", ["sh", name])


def become_python(code: str, packages: str) -> NoReturn:
    """Run a program as `python FILE` would."""
    status = 0
    try:
        execute(code, fresh_main(packages))
        threading._shutdown()  # type: ignore[attr-defined] # waits for the program's threads
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        print_error(error)
        status = 1
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        status = status or 120
    os._exit(status & 0xFF)


def fresh_main(packages: str, name: str = "__main__") -> types.ModuleType:
    """Make this process look as if it had just begun, and return the module for its code."""
    for ours in [each for each in sys.modules if each.partition(".")[0] == "titan_rl"]:
        del sys.modules[ours]
    sys.path.remove(ROOT)
    sys.path += [packages] if packages else []
    sys.argv[:] = ["code.py"]
    sys.modules["__main__"] = sys.modules[name] = module = types.ModuleType(name)
    return module


def execute(code: str, module: types.ModuleType, name: str = "<code>") -> None:
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # tracebacks show its lines
    exec(compile(code, name, "exec"), module.__dict__)


def print_error(error: BaseException) -> None:
    """Print the traceback without this file's frames."""
    try:
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename == __file__:
            place = place.tb_next
        traceback.print_exception(type(error), error, place)
    except BaseException:
        print(type(error).__name__, file=sys.stderr)
