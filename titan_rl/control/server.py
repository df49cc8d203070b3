"""Where a run is steered from outside: a Unix socket that only its user reaches, and nothing on a network.

    ctl ── {"command": "scale", "arguments": {"generators": 3}} ──> Control ──> a coroutine of the run
        <──────────── {"answer": ...} or {"error": "..."} ───────────┘

A connection is one line of JSON each way. RUN/control.json says where the socket is, while the run lasts. Whatever is
asked, the answer is a line, and the run goes on.
"""

import asyncio
import inspect
import json
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from titan_rl.record.run_log import encode, write_whole

ANNOUNCEMENT = "control.json"
REQUEST_SECONDS = 10.0  # for a client to say what it wants, and to take the answer
LAST_SECONDS = 1.0  # for the last answers of a run that is over
EXAMPLE = '{"command": "status", "arguments": {}}'

Command = Callable[..., Coroutine[Any, Any, Any]]
"""Takes JSON values by name, and answers with what JSON can hold."""


class RequestRefused(Exception):
    """A command that cannot be; str() says why, to whoever asked."""


class Control:
    """Answers while its body runs. What is asked when it ends is answered with an error."""

    def __init__(self, folder: Path, path: Path, *, told: Callable[[str], object]) -> None:
        """`told` hears of each command that is more than a question."""
        self._announcement, self._path, self._told = folder / ANNOUNCEMENT, path, told
        self._commands: dict[str, Command] = {}
        self._questions: set[str] = set()
        self._asked: set[asyncio.Task[Any]] = set()
        self._connections: set[asyncio.Task[Any]] = set()

    def offer(self, **commands: Command) -> None:
        """From now on, also these: some can be obeyed only once meshes are up."""
        self._commands |= commands

    def question(self, **commands: Command) -> None:
        """As `offer`; but they change nothing, and nobody is told."""
        self.offer(**commands)
        self._questions |= set(commands)

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError, ValueError):  # gone, or another run's by now
            if json.loads(self._announcement.read_text())["pid"] == os.getpid():
                self._announcement.unlink()
        self._server.close()
        for asked in self._asked:
            asked.cancel()
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
            pass  # nobody waits for the answer any more
        finally:
            writer.close()
            self._connections.discard(task)

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            name, arguments = await self._request(reader)
            return encode({"answer": await self._obey(name, arguments)})
        except RequestRefused as error:
            return encode({"error": str(error)})
        except Exception as error:  # of one command, not of the run
            return encode({"error": f"{type(error).__name__}: {error}"})

    async def _request(self, reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
        try:
            line = await asyncio.wait_for(reader.readline(), REQUEST_SECONDS)
            request = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, too long a line, too deep
            request = None
        except TimeoutError:
            raise RequestRefused(f"nothing was asked within {REQUEST_SECONDS:g} s") from None
        match request:
            case {"command": str(name), "arguments": dict(arguments)} if len(request) == 2:
                return name, arguments
        raise RequestRefused(f"expected a line of JSON like {EXAMPLE}")

    async def _obey(self, name: str, arguments: dict[str, Any]) -> Any:
        command = self._commands.get(name)
        if command is None:
            raise RequestRefused(f"there is no command {name!r} now; there are {', '.join(self._commands)}")
        signature = inspect.signature(command)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            takes = ", ".join(str(parameter) for parameter in signature.parameters.values()) or "no arguments"
            raise RequestRefused(f"{name}: {error}; it takes {takes}") from None
        if name not in self._questions:
            self._told(" ".join(["asked to", name, *(f"{key}={value}" for key, value in arguments.items())]))
        asked = asyncio.create_task(command(**arguments))
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        await asyncio.wait({asked})
        if asked.cancelled():
            raise RequestRefused(f"the run ended before it could {name}")
        return asked.result()


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A short name for a socket, through its open folder: the kernel takes 107 bytes, and TMPDIR may be longer."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
