"""Imports a user's modules, and calls a reward function once, before the run relies on them, in a process of its own.

    probe (this process) -> name, first row -> attempt (child) -> a line that says what is wrong, or nothing

Whatever the function or its module does (exit, hang, even while it holds the interpreter's lock, crash) ends only the
child, and is one line.
"""

import asyncio
import importlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from titan_rl.agents.agent_session import OFFERED
from titan_rl.agents.environment_calls import load_agent
from titan_rl.agents.episode_loop import AGENT_KEY, KEY, load_environment
from titan_rl.agents.external_python import ExternalPython
from titan_rl.agents.user_code import keywords_of
from titan_rl.config.system_sections import EnvironmentSection
from titan_rl.isolation import outside
from titan_rl.tasks.reward_shapes import Arguments, Component, component
from titan_rl.tasks.rewards import Answered
from titan_rl.tasks.rubric import judge_once
from titan_rl.wire.types import Prompt

PROBE_SECONDS = 30
"""Until a module must be imported, and its function must have returned."""
EXTERNAL_PATIENCE = 5
"""Times as long, if environment.python imports it: another Python, whose packages nothing has read yet."""
CHILD = "import sys; sys.path[:] = {path!r}; from titan_rl.preflight.probe import attempt; attempt({folder!r})"
"""The child finds modules where this process does, and nothing else."""


def probe(
    name: str,
    prompt: Prompt | None,
    key: str = "task.reward",
    arguments: Arguments | None = None,
    environment: EnvironmentSection | None = None,
) -> Iterator[str]:
    """Yield what is wrong with the reward `name`, if anything is: import it, and call it on the prompt's own answer.
    For override.imports, import it and look whether it is registered; for environment.name and
    task.agent, import it as `environment` says."""
    patience = PROBE_SECONDS * (EXTERNAL_PATIENCE if environment is not None and environment.python else 1)
    with tempfile.TemporaryDirectory() as folder:
        asked, told, stuck = (Path(folder) / name for name in ("asked", "told", "stuck"))
        asked.write_bytes(pickle.dumps((key, name, prompt, patience, arguments, environment)))
        command = [sys.executable, "-P", "-c", CHILD.format(path=sys.path, folder=folder)]
        nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        child = outside(lambda: subprocess.Popen(command, start_new_session=True, **nothing))
        late = False
        try:
            child.wait(3 * patience + 30)  # the child itself ends earlier, unless its clock is stopped
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with what it started itself
            child.wait()
        lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
        last = lines[-1] if lines else "importing"
        what = f"{name!r} to be imported" if last == "importing" else f"{name!r} to return a number for the first row"
        if last not in ("importing", "calling"):
            yield from filter(None, [last])
        elif late or (stuck.exists() and stuck.stat().st_size):
            at = re.search(r'File "(.*)", line (\d+)', stuck.read_text() if stuck.exists() else "")
            place = f" at {at[1]}:{at[2]}" if at else ""
            yield f"{key}: expected {what} within {patience} s, found it still running{place}"
        else:
            yield f"{key}: expected {what}, found that it ends the process with exit code {child.returncode}"


def attempt(folder: str) -> None:
    """Do it, as the child: write each stage, and then the verdict."""
    import faulthandler

    where = Path(folder)
    key, name, prompt, seconds, arguments, environment = pickle.loads((where / "asked").read_bytes())
    with (where / "told").open("w") as told, (where / "stuck").open("w") as stuck:

        def tell(line: str) -> None:
            print(json.dumps(line), file=told, flush=True)
            faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback_later(seconds, file=stuck, exit=True)

        tell("importing")
        reward = None
        if key == "task.reward":
            verdict, reward = _imported(name, arguments)
        else:
            verdict = _not_loaded(key, name, environment) if key in (KEY, AGENT_KEY) else _overridden(key, name)
        if reward is not None and prompt is not None:
            tell("calling")
            verdict = _called(name, reward, prompt)
        tell(verdict)
    os._exit(0)  # not to wait for its threads


def _imported(name: str, arguments: Arguments | None) -> tuple[str, Component | None]:
    try:
        return "", component(name, arguments)
    except BaseException as error:  # importing the user's module runs it
        said = str(error)
        if isinstance(error, TypeError | ValueError) and said.startswith("task.reward"):
            return said, None
        return f'task.reward: expected "{name}" to import, found {_raised(error)}', None


def _overridden(key: str, name: str) -> str:
    from torchtitan.config.override import _REGISTRY  # apply_overrides looks there

    module = name.rpartition(".")[0]
    try:
        importlib.import_module(module)
    except BaseException as error:
        return _no_import(key, name, error)
    if name in _REGISTRY:
        return ""
    return f"{key}: expected {name!r} to be registered with @override, found no such override of that module"


def _not_loaded(key: str, name: str, environment: EnvironmentSection | None) -> str:
    e = environment or EnvironmentSection()
    try:
        if e.python:
            asyncio.run(_loaded_externally(key, name, e))
        elif key == KEY:
            load_environment(name, e.args)
        else:
            keywords_of(load_agent(name, e.args, key), dict.fromkeys(OFFERED), key)
    except BaseException as error:
        return str(error) if str(error).startswith(key) else _no_import(key, name, error)
    return ""


async def _loaded_externally(key: str, name: str, e: EnvironmentSection) -> None:
    external = await ExternalPython.start(e.python, name, key=key, args=e.args, agent=key == AGENT_KEY)
    await external.close()


def _no_import(key: str, name: str, error: BaseException) -> str:
    return f"{key}: expected {name!r} to import, found {_raised(error)}"


def _called(name: str, reward: Component, prompt: Prompt) -> str:
    try:
        judge_once(reward, prompt, Answered(prompt.answer))
    except BaseException as error:
        own = str(error).startswith("task.reward")
        return str(error) if own else f"task.reward: expected {name!r} to score the first row, found {_raised(error)}"
    return ""


def _raised(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
