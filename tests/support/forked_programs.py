"""Run a program as a fork of the session's fork servers, which have imported the libraries of a rank."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from titan_rl.ext.fork_servers.fork_servers import KIND_ENV, OFF, VARIABLE
from titan_rl.meshes.starter import WORKER_ENV, Kind

SECONDS = 300.0
RANK = Path("monarch/_src/actor/bootstrap_main.py")  # the program of a rank, in place of which this one runs

TESTS = Path(__file__).parents[1]
IMPORTS = f"""import sys
sys.path += [{str(TESTS)!r}, {str(TESTS.parent / "scripts")!r}]
"""  # first lines of a program that imports tests/support
BEGIN = """import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "monarch"]:
    del sys.modules[name]
"""


def results_of(kind: Kind, program: str, *arguments: object, given: str = "") -> list[Any]:
    """Return the values that a program prints as JSON on lines that begin with FOUND."""
    lines = (line.partition(" ") for line in output_of(kind, program, *arguments, given=given).splitlines())
    return [json.loads(rest) for first, _, rest in lines if first == "FOUND"]


def output_of(kind: Kind, program: str, *arguments: object, given: str = "") -> str:
    """Return the output of a program, or fail with the end of its error output. `given` is its input."""
    with tempfile.TemporaryDirectory(prefix="program-") as scratch, ExitStack() as stack:
        stdin, stdout, stderr = (stack.enter_context(open(Path(scratch, name), "w+")) for name in ("in", "out", "err"))
        stdin.write(given)
        stdin.seek(0)
        files, argv = [stdin, stdout, stderr], ["-c", *map(str, arguments)]
        environment = {**os.environ, **WORKER_ENV, **KIND_ENV[kind], "CUDA_VISIBLE_DEVICES": ""}
        if (folder := os.environ.get(VARIABLE, OFF)) == OFF:
            command = [sys.executable, "-c", program, *argv[1:]]
            code = subprocess.run(
                command, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, timeout=SECONDS
            ).returncode
        else:
            rank = Path(scratch, RANK)
            rank.parent.mkdir(parents=True)
            for package in list(rank.relative_to(scratch).parents)[:-1]:
                Path(scratch, package, "__init__.py").touch()
            rank.write_text(BEGIN + f"sys.path.remove({scratch!r})\nsys.argv[:] = {argv!r}\n{program}")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [scratch, environment.get("PYTHONPATH")]))
            code = forked(Path(folder, kind), environment, files)
        output, errors = (Path(scratch, name).read_text() for name in ("out", "err"))
        assert code == 0, output[-3000:] + errors[-3000:]
        return output


def forked(server: Path, environment: Mapping[str, str], files: Sequence[IO[str]]) -> int:
    """Have a fork server start a rank, as its launcher does, and return the rank's exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(SECONDS)
        connection.connect(str(server))
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        head = [sys.executable, os.getcwd(), str(0o022), cpus]
        request = "\0".join([*head, *(f"{name}={value}" for name, value in environment.items())])
        socket.send_fds(connection, [os.fsencode(request)], [file.fileno() for file in files])
        started = connection.recv(4096)
        assert started.startswith(b"pid "), os.fsdecode(started)
        word, status = connection.recv(100).split()
        assert word == b"end"
        return os.waitstatus_to_exitcode(int(status))
