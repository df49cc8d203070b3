"""Sends commands to a run over its socket, and waits for its end."""

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from titan_rl.config.plain_files import text_of
from titan_rl.ext.control.server import ANNOUNCEMENT, reachable

POLL_SECONDS = 0.1
DONE, REFUSED, NOT_RUNNING = 0, 1, 2


class RequestFailed(Exception):
    """The request was refused or could not be answered. The text is the reason."""

    def __init__(self, why: str, code: int = REFUSED) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The socket of a run."""

    folder: Path  # dump folder
    pid: int
    path: Path

    @classmethod
    def find(cls, folder: Path) -> Self:
        try:
            if not (folder / ANNOUNCEMENT).is_file():  # reading a pipe would wait for its writer
                raise FileNotFoundError
            announced = json.loads(text_of(folder / ANNOUNCEMENT))
            endpoint, host = cls(folder, int(announced["pid"]), Path(announced["socket"])), announced["host"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            hint = "" if folder.is_dir() else ": there is no such folder"
            raise RequestFailed(f"no run is active in {folder}{hint}", NOT_RUNNING) from None
        if host != socket.gethostname():
            raise RequestFailed(
                f"the run in {folder} is on {host}, process {endpoint.pid}: run this command there", NOT_RUNNING
            )
        if not endpoint.runs():
            raise endpoint.gone()
        return endpoint

    def runs(self) -> bool:
        """Return whether the run's process has a thread left. It looks like a zombie as soon as its first has ended."""
        try:
            process = psutil.Process(self.pid)
            is_zombie = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return not is_zombie or process.num_threads() > 1
        except psutil.Error:
            return False

    def gone(self) -> RequestFailed:
        return RequestFailed(f"the run in {self.folder} is not running: its process {self.pid} has ended", NOT_RUNNING)

    def ask(self, command: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        request = json.dumps({"command": command, "arguments": arguments}) + "\n"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            try:
                with reachable(self.path) as name:
                    connection.connect(name)
                connection.sendall(request.encode())
                line = connection.makefile("rb").readline()
            except TimeoutError:
                raise RequestFailed(
                    f"the run (process {self.pid}) did not answer {command} within {seconds:g} s; "
                    "the request remains in effect. Raise --timeout to wait longer"
                ) from None
            except (FileNotFoundError, ConnectionError):  # the pid belongs to a new process, or the run just ended
                raise self.gone() from None
        if not line:
            raise RequestFailed(f"the run (process {self.pid}) ended before it answered {command}")
        reply = json.loads(line)
        if "error" in reply:
            raise RequestFailed(reply["error"])
        return reply["answer"]

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.runs():
            if time.monotonic() > deadline:
                raise RequestFailed(
                    f"the run (process {self.pid}) has not ended within {seconds:g} s; the request remains in effect"
                )
            time.sleep(POLL_SECONDS)
