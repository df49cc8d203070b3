"""The user's environments in another Python: a child process (external_program.py), and proxies of its objects.

    ExternalPython.make ──> ExternalEnvironment: reset, step, tools, get_reward, close ── a line each ──> the child

So an environment may need packages that this project cannot have. The child runs many rollouts at the same time, as
this process would. If it dies or blocks, this process is replaced as one whose own code did that.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.ext.agents.adapters import Conversation, plain
from titan_rl.wire.supervisor import how_ended

PACKAGE = str(Path(__file__).parents[2])
TOO_OLD = '{"failed": "environment.python: expected Python 3.11 or newer, found %s"}'
CHILD = (
    "import asyncio, os, sys, types; "
    f"sys.version_info < (3, 11) and sys.exit(print({TOO_OLD!r} % sys.version.split()[0])); "
    "package = sys.modules['titan_rl'] = types.ModuleType('titan_rl'); package.__path__ = [sys.argv[1]]; "
    "sys.path[:] = [path for path in sys.path if path]; "
    "from titan_rl.wire.supervisor import fork_worker; fork_worker(os.getppid(), own_temp=True); "
    "from titan_rl.ext.agents.external_program import serve; asyncio.run(serve())"
)
"""The child imports this project's files, but no package that is installed for this Python. All that it starts ends
with it: a process that stayed would hold the pipe that this process reads to its end."""
LONGEST_LINE = 1 << 30  # bytes
START_SECONDS = 300.0  # to import the user's code
KILL_SECONDS = 10.0  # for the supervisor to end the child and its descendants
CANCEL_SECONDS = 2.0  # for the child to send the place of a cancelled call


class ExternalError(Exception):
    """An error in the child. Its class has the name of the error's, and `place` is where it was raised."""

    place = ""


class ExternalReport(NamedTuple):
    blocked: float = 0.0  # seconds for which the child's loop has not moved
    of: int | None = None  # the rollout that blocks it
    place: str = ""
    stuck: int = 0  # threads whose call was given up


class ExternalPython:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._ended = ""  # how the child ended
        self._closed = False
        self.report = ExternalReport()
        self.version = ""
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        python: str,
        name: str,
        *,
        key: str,
        args: Mapping[str, Any],
        agent: bool = False,
        concurrency: int = 8,
        seats: Sequence[str] = (),
    ) -> "ExternalPython":
        """Start a child that has loaded an environment or an agent. Raise ValueError if it cannot."""
        executable = python_in(python)
        bin_folder = str(executable.parent)
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "TITAN_RL_PROC")}
        env |= {"PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", "")])}
        if env.get("OMP_NUM_THREADS") == "0":  # as hosts.threads has it, which libraries do not know
            env["OMP_NUM_THREADS"] = "1"
        if "TITAN_RL_PROC" in os.environ:
            env["TITAN_RL_PROC"] = f"{os.environ['TITAN_RL_PROC']}'s environment.python"
        try:
            process = await asyncio.create_subprocess_exec(
                *(str(executable), "-c", CHILD, PACKAGE),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
                limit=LONGEST_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(f"environment.python: expected a Python that starts, found {error}") from error
        self = cls(process)
        hello = {"name": name, "key": key, "args": dict(args), "agent": agent, "concurrency": concurrency}
        self._write({**hello, "seats": list(seats), "path": users_path()})
        try:
            first = await asyncio.wait_for(self._line(), START_SECONDS)
        except TimeoutError:
            first = {"failed": f"{key}: expected {name!r} to be imported within {START_SECONDS:g} s", "kind": ""}
        except BaseException:
            await self.close()
            raise
        if "ready" not in first:
            why, kind = first.get("failed") or await self._end(), first.get("kind", "")
            await self.close()
            raise ValueError(
                why if why.startswith((key, "environment.")) else f"{key} = {name!r} in {executable}: {kind}: {why}"
            )
        self.version = first["ready"]
        self._reader = asyncio.create_task(self._read())
        return self

    @property
    def dead(self) -> str:
        """How the child ended, if it did and was not asked to."""
        return "" if self._closed else self._ended

    async def make(
        self, row: Any, prompt: Any, answer: Any, seed: Any, task_seed: Any, messages: Any, seats: Any
    ) -> "ExternalEnvironment":
        """Make the environment of a rollout."""
        keywords = {"row": row, "prompt": prompt, "answer": answer, "seed": seed, "seats": seats}
        offered, of = {**keywords, "task_seed": task_seed, "messages": messages}, _rollout()
        return ExternalEnvironment(partial(self.ask, of=of), await self.ask("make", of, offered=offered))

    async def run(self, **offered: Any) -> Any:
        """Run the agent."""
        return await self.ask("run", _rollout(), offered=offered)

    async def ask(self, verb: str, of: int, **more: Any) -> Any:
        """Return what a call in the child returns. It never does if the child has ended: this process is replaced."""
        if self._closed:
            raise asyncio.CancelledError
        number, self._next = self._next, self._next + 1
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._write({"id": number, "do": verb, "of": of, **more})
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            self._write({"id": number, "do": "cancel"})
            with suppress(TimeoutError):
                if self._ended:
                    raise
                where = await asyncio.wait_for(asyncio.shield(waiting), CANCEL_SECONDS)
                if isinstance(where, _Cancelled):
                    error.add_note(where.place)
            raise
        finally:
            self._waiting.pop(number, None)

    async def while_alive(self, work: Coroutine[Any, Any, None]) -> None:
        """Play `work` as rollout 0. Raise ChildProcessError if the child ends before it does."""
        assert self._reader is not None
        playing = asyncio.create_task(work, name="0")
        await asyncio.wait([playing, self._reader], return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            return await playing
        playing.cancel()
        raise ChildProcessError(self._ended)

    async def close(self) -> None:
        """End the child and all that it started. Calls that wait for it are cancelled."""
        self._closed = True
        await self._end_processes()
        if self._reader is not None:
            await self._reader
        for waiting in self._waiting.values():
            waiting.cancel()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()

    async def _end_processes(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), KILL_SECONDS)
        except TimeoutError:  # the supervisor was stopped
            with suppress(ProcessLookupError):
                self._process.kill()

    def _write(self, message: dict[str, Any]) -> None:
        if not self._ended and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message, default=plain, skipkeys=True).encode() + b"\n")

    async def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(b"{"):  # a program that it started may print too
                with suppress(ValueError):
                    return json.loads(line)
        return {}

    async def _read(self) -> None:
        while message := await self._line():
            if "report" in message:
                self.report = ExternalReport(**message["report"])
                continue
            waiting = self._waiting.get(message["id"])
            if waiting is None or waiting.done():
                continue
            if "error" in message:
                error = type(message["kind"], (ExternalError,), {})(message["error"])
                error.place = message["place"]
                waiting.set_exception(error)
            elif "cancelled" in message:
                waiting.set_result(_Cancelled(message["cancelled"]))
            else:
                waiting.set_result(message["value"])
        self._ended = await self._end()

    async def _end(self) -> str:
        code = await self._process.wait()
        return f"environment.python {how_ended(code)}"


class _Cancelled(NamedTuple):
    place: str


def _rollout() -> int:
    """Return the id of the rollout that this task plays: its name (episode_loop.py)."""
    task = asyncio.current_task()
    assert task is not None
    return int(task.get_name())


class ExternalEnvironment:
    """An environment in the child, with the methods that it has."""

    def __init__(self, ask: Callable[..., Any], has: list[str]) -> None:
        self._ask, self.tools = ask, list[ExternalTool]()
        if "step" in has:
            self.step = self._step
        if "get_reward" in has:
            self.get_reward = partial(ask, "get_reward")
        if "to_move" in has:
            self.to_move = partial(ask, "to_move")

    async def reset(
        self, row: Any, prompt: Any, answer: Any, seed: Any, task_seed: Any, messages: Any, seats: Any
    ) -> Any:
        keywords = {"row": row, "prompt": prompt, "answer": answer, "seed": seed, "seats": seats}
        reply = await self._ask("reset", offered={**keywords, "task_seed": task_seed, "messages": messages})
        self.tools = [ExternalTool(self._ask, schema) for schema in reply["tools"]]
        return Conversation(reply["observation"]) if reply["whole"] else reply["observation"]

    async def close(self) -> None:
        await self._ask("close")

    async def _step(self, reply: Any) -> Any:
        fields = {"text": reply.text, "tokens": list(reply.tokens), "finish": reply.finish, "problem": reply.problem}
        answer = await self._ask("step", reply={**fields, "calls": [], "message": reply.message})
        result = tuple(answer["found"]) if isinstance(answer["found"], list) else answer["found"]
        return (Conversation(result[0]), *result[1:]) if answer["whole"] else result


class ExternalTool:
    """A tool of an environment in the child."""

    def __init__(self, ask: Callable[..., Any], schema: dict[str, Any]) -> None:
        self._ask, self.json_schema = ask, schema
        self.__name__ = schema["function"]["name"]

    async def __call__(self, **arguments: Any) -> Any:
        return await self._ask("tool", name=self.__name__, arguments=arguments)


def python_in(path: str) -> Path:
    """Return the Python of a virtual environment's folder, or the Python itself. Raise ValueError if there is none."""
    absolute = Path(path).expanduser().absolute()
    python = absolute / "bin" / "python" if absolute.is_dir() else absolute
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise ValueError(
            f"environment.python: expected a Python or the folder of a virtual environment, found {path!r}"
        )
    return python


def users_path() -> list[str]:
    """Return the folders of sys.path and the working directory, without the folders of this Python."""
    own = tuple(str(Path(prefix)) for prefix in {sys.prefix, sys.base_prefix})
    here = [str(Path(path).absolute()) for path in sys.path if path]
    return [path for path in [*here, os.getcwd()] if not path.startswith(own)]
