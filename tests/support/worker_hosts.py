"""Workers on this machine, started as a user starts them, each with its own address."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.rank_launchers import is_launcher, launched
from titan_rl.ext.hosts.worker_address import takes_connections

START_SECONDS = 180.0


def free_address(host: str) -> str:
    with socket.create_server((host, 0)) as free:
        return f"tcp://{host}:{free.getsockname()[1]}"


@dataclass
class WorkerHost:
    """One worker, and the processes of the run that it serves."""

    address: str
    process: "subprocess.Popen[str]"
    log: Path

    @classmethod
    def start(
        cls, folder: Path, host: str, env: Mapping[str, str] | None = None, within: Sequence[str] = ()
    ) -> "WorkerHost":
        """Start a worker. A variable of `env` that is empty is left out. `within`: a command that executes what follows
        it, somewhere else."""
        address, log = free_address(host), folder / f"worker-{host}.log"
        command = [*within, sys.executable, "-m", "titan_rl.worker", "--address", address, "--insecure"]
        environment = {key: value for key, value in {**os.environ, **(env or {})}.items() if value}
        with open(log, "w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment)
        return cls(address, process, log)

    def wait(self) -> None:
        """Return once runs can join it."""
        deadline = time.monotonic() + START_SECONDS
        while "worker at" not in self.log.read_text() or not takes_connections(self.address, 5):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """Return its child that serves a run, and the descendants of that child."""
        return [
            each
            for child in psutil.Process(self.process.pid).children()
            if "--parent" in child.cmdline()
            for each in [child, *child.children(recursive=True)]
        ]

    def agent(self) -> psutil.Process:
        """Return the agent of the run that has this host."""
        serving, *_ = self.processes()
        (agent,) = (each for each in serving.children() if not is_launcher(each))
        return agent

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def hosts_of(controller: int) -> dict[str, str]:
    """Return the host of each rank of a run with hosts.kind = "processes": its launcher is a child of its worker."""
    mine = psutil.Process(controller).children(recursive=True)
    return {name: _worker_of(launcher) for launcher, name, _ in launched(mine)}


def _worker_of(launcher: psutil.Process) -> str:
    for parent in launcher.parents():
        if "titan_rl.worker" in (command := parent.cmdline()):
            return Path(command[command.index("--address") + 1]).parent.name
    return ""
