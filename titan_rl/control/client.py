"""Asks a running run over its socket, and waits for its end."""

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from titan_rl.control.server import ANNOUNCEMENT, reachable

POLL_SECONDS = 0.1
DONE, REFUSED, NOT_RUNNING = 0, 1, 2


class Failed(Exception):
    """Nothing came of it; str() says why."""

    def __init__(self, why: str, code: int = REFUSED) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a run is steered.

    >>> Endpoint(Path("outputs/grpo_llama"), 4711, Path("/tmp/titan_rl-4711/control"))
    """

    folder: Path
    pid: int
    path: Path

    @classmethod
    def find(cls, folder: Path) -> Self:
        try:
            found = json.loads((folder / ANNOUNCEMENT).read_text())
            endpoint, host = cls(folder, int(found["pid"]), Path(found["socket"])), found["host"]
        except (OSError, ValueError, KeyError, TypeError):
            hint = "" if folder.is_dir() else ": there is no such folder"
            raise Failed(f"no run is under way in {folder}{hint}", NOT_RUNNING) from None
        if host != socket.gethostname():
            raise Failed(f"the run in {folder} is on {host}, process {endpoint.pid}: ask there", NOT_RUNNING)
        if not endpoint.runs():
            raise endpoint.gone()
        return endpoint

    def runs(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rsplit(")", 1)[1].split()[0] not in "ZX"  # ended, though its parent has yet to hear of it

    def gone(self) -> Failed:
        return Failed(f"the run in {self.folder} is not running: its process {self.pid} has ended", NOT_RUNNING)

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
                raise Failed(
                    f"the run (process {self.pid}) did not answer {command} within {seconds:g} s; "
                    "what was asked still stands. --timeout waits longer"
                ) from None
            except (FileNotFoundError, ConnectionError):  # another process's pid by now, or the run is just over
                raise self.gone() from None
        if not line:
            raise Failed(f"the run (process {self.pid}) ended before it answered {command}")
        reply = json.loads(line)
        if "error" in reply:
            raise Failed(reply["error"])
        return reply["answer"]

    def wait(self, seconds: float) -> None:
        """For the end of the run."""
        deadline = time.monotonic() + seconds
        while self.runs():
            if time.monotonic() > deadline:
                raise Failed(f"the run (process {self.pid}) has not ended within {seconds:g} s; it is still asked to")
            time.sleep(POLL_SECONDS)
