"""Fork servers that have imported nothing, with ranks that run a line of Python instead of Monarch's bootstrap."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from titan_rl.ext.fork_servers import fork_servers
from titan_rl.meshes import deaths

PROGRAMS = Path(fork_servers.__file__).parent
WRITE_FACTS = """
import json, os, random, sys, threading
facts = {"pid": os.getpid(), "parent": os.getppid(), "cwd": os.getcwd(), "path": sys.path, "random": random.random(),
         "threads": threading.active_count(), "fds": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)),
         "more": [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2][1:], "environ": dict(os.environ)}
open(os.environ["FACTS"] + ".new", "w").write(json.dumps(facts))
os.rename(os.environ["FACTS"] + ".new", os.environ["FACTS"])
"""
SLEEP = "import time; time.sleep(60)"


@dataclass
class ForkedRanks:
    """A fork server that has imported nothing, and its ranks, whose program is in a folder that shadows Monarch."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.folder / "generator"

    def start_server(self, *preload: str, **environment: str) -> subprocess.Popen[bytes]:
        self.socket.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.socket))
            listener.listen(8)
            program = (
                f"import sys; sys.path.insert(0, {str(PROGRAMS)!r}); import fork_server; del sys.path[0]; "
                f"fork_server.PRELOAD['generator'] = {' '.join(preload)!r}; fork_server.main()"
            )
            command = [sys.executable, "-P", "-c", program, "generator", str(listener.fileno()), str(os.getpid())]
            env = {**os.environ, **environment}
            self.started.append(subprocess.Popen(command, pass_fds=[listener.fileno()], env=env))
        return self.started[-1]

    def start_rank(self, does: str, name: str = "role[dp=0]", **environment: str) -> subprocess.Popen[bytes]:
        """Start a rank's launcher. Without a fork server, or if it refuses, the rank is a new Python."""
        package = self.folder / f"package{len(self.started)}"
        (package / "monarch/_src/actor").mkdir(parents=True)
        for folder in ("monarch", "monarch/_src", "monarch/_src/actor"):
            (package / folder / "__init__.py").touch()
        (package / "monarch/_src/actor/bootstrap_main.py").write_text(does)
        env = {**os.environ, **deaths.follow([name])[name], "TITAN_RL_FORK_SOCKET": str(self.socket)}
        env["TITAN_RL_FORK_SECONDS"] = "30"
        env |= {"TITAN_RL_CONTROLLER": str(os.getpid()), "PYTHONPATH": str(package), "FACTS": str(self.facts_file)}
        command = [sys.executable, "-I", "-S", fork_servers.FORKING_LAUNCHER, sys.executable, "-m"]
        command += ["monarch._src.actor.bootstrap_main"]
        self.started.append(subprocess.Popen(command, env={**env, **environment}, cwd=self.folder))
        return self.started[-1]

    @property
    def facts_file(self) -> Path:
        return self.folder / "facts"

    def facts(self, does: str = WRITE_FACTS, **environment: str) -> dict[str, Any]:
        self.facts_file.unlink(missing_ok=True)
        assert self.start_rank(does, **environment).wait(60) == 0
        return json.loads(self.facts_file.read_text())


def until(condition: Callable[[], Any], seconds: float = 50.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "expected it sooner"
        time.sleep(0.01)
    return found


def pid_of(name: str = "role[dp=0]") -> int:
    """Return the pid of a live rank once it is known to this process."""
    return until(lambda: deaths.alive().get(name))


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # also between two looks at it
        return True


def ended(name: str = "role[dp=0]") -> str:
    return until(lambda: deaths._ends.get(name))
