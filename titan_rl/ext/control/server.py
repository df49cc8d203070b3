"""The socket over which a run is controlled: a Unix socket that only its user can open, and nothing on a network.

    ctl ── {"command": "scale", "arguments": {"generators": 3}} ──> Control ──> a coroutine of the run
        <──────────── {"answer": ...} or {"error": "..."} ───────────┘

A connection carries one line of JSON each way. RUN/control.json has the path of the socket while the run lasts. Every
request is answered with one line, and no request can fail the run.
"""

import asyncio
import inspect
import json
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from titan_rl.record.lines import encode, write_whole
from titan_rl.wire.errors import CommandRefused

ANNOUNCEMENT = "control.json"
REQUEST_SECONDS = 10.0  # for a client to send its request, and again to receive the answer
LAST_SECONDS = 1.0  # for the last answers when a run has ended
EXAMPLE = '{"command": "status", "arguments": {}}'

Command = Callable[..., Coroutine[Any, Any, Any]]
"""Takes JSON values as keyword arguments, and returns a value that JSON can hold."""


class Control:
    """Answers requests while its body runs. Requests that are still open when it ends are answered with an error."""

    def __init__(self, folder: Path, path: Path, *, announce: Callable[[str], object]) -> None:
        """`announce` is called with a description of each command, but not of questions."""
        self._announcement, self._path, self._announce = folder / ANNOUNCEMENT, path, announce
        self._commands: dict[str, Command] = {}
        self._questions: set[str] = set()
        self._withheld: dict[str, str] = {}
        self._asked: set[asyncio.Task[Any]] = set()
        self._connections: set[asyncio.Task[Any]] = set()

    def offer(self, **commands: Command) -> None:
        """Add commands. Some can be carried out only once the meshes are up."""
        self._commands |= commands

    def question(self, **commands: Command) -> None:
        """Add commands that change nothing and are not announced."""
        self.offer(**commands)
        self._questions |= set(commands)

    def withhold(self, *names: str, why: str) -> None:
        """Refuse these commands by name."""
        self._withheld |= dict.fromkeys(names, why)

    async def __aenter__(self) -> Self:
        listener = socket.socket(socket.AF_UNIX)
        self._path.unlink(missing_ok=True)
        with reachable(self._path) as name:
            listener.bind(name)
        self._path.chmod(0o600)
        self._server = await asyncio.start_unix_server(self._connected, sock=listener)
        self._announcement.parent.mkdir(parents=True, exist_ok=True)
        where = {"pid": os.getpid(), "host": socket.gethostname(), "socket": str(self._path)}
        write_whole(self._announcement, json.dumps(where) + "\n")
        self._announcement.chmod(0o600)
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(OSError, ValueError):  # removed, or replaced by another run
            if json.loads(self._announcement.read_text())["pid"] == os.getpid():
                self._announcement.unlink()
        self._server.close()
        for request in self._asked:
            request.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=LAST_SECONDS)
        self._path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            writer.write(await self._answer(reader) + b"\n")
            await asyncio.wait_for(writer.drain(), REQUEST_SECONDS)
        except (OSError, TimeoutError):
            pass  # the client no longer waits for the answer
        finally:
            writer.close()
            self._connections.discard(task)

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            name, arguments = await self._request(reader)
            return encode({"answer": await self._obey(name, arguments)})
        except CommandRefused as error:
            return encode({"error": str(error)})
        except Exception as error:  # fails this command, not the run
            return encode({"error": f"{type(error).__name__}: {error}"})

    async def _request(self, reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
        try:
            line = await asyncio.wait_for(reader.readline(), REQUEST_SECONDS)
            request = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, too long a line, too deep
            request = None
        except TimeoutError:
            raise CommandRefused(f"no request was received within {REQUEST_SECONDS:g} s") from None
        match request:
            case {"command": str(name), "arguments": dict(arguments)} if len(request) == 2:
                return name, arguments
        raise CommandRefused(f"expected one line of JSON like {EXAMPLE}")

    async def _obey(self, name: str, arguments: dict[str, Any]) -> Any:
        command = self._commands.get(name)
        if command is None:
            raise CommandRefused(f"unknown command {name!r}; available now: {', '.join(self._commands)}")
        if name in self._withheld:
            raise CommandRefused(f"{name}: {self._withheld[name]}")
        signature = inspect.signature(command)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            takes = ", ".join(str(parameter) for parameter in signature.parameters.values()) or "no arguments"
            raise CommandRefused(f"{name}: {error}; it takes {takes}") from None
        if name not in self._questions:
            self._announce(" ".join(["asked to", name, *(f"{key}={value}" for key, value in arguments.items())]))
        task = asyncio.create_task(command(**arguments))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        await asyncio.wait({task})
        if task.cancelled():
            raise CommandRefused(f"the run ended before it could {name}")
        return task.result()


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Yield a short name for a socket through its open folder: the kernel allows 107 bytes; TMPDIR may be longer."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
