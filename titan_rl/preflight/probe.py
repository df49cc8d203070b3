"""Imports a user's modules, and calls a reward function once, before the run relies on them.

    probe (this process) -> key, name, first row -> problem_of (a child process) -> one line, or nothing

The function or its module may exit, hang (even while it holds the interpreter's lock) or crash: that ends only the
child, and is one line.
"""

import asyncio
import faulthandler
import importlib
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_rl.agents.adapters import MAKERS
from titan_rl.agents.agent_session import OFFERED
from titan_rl.agents.environment_calls import (
    load_agent,
    make_environment,
    offered_by,
    reset_environment,
    tools_of,
)
from titan_rl.agents.episode_loop import AGENT_KEY, KEY, load_environment
from titan_rl.agents.episodes import messages_from
from titan_rl.agents.external_python import ExternalPython
from titan_rl.agents.tools import Toolbox
from titan_rl.agents.user_code import asynchronous, call_user, keywords_of, parameters_of
from titan_rl.config.system_sections import EnvironmentSection
from titan_rl.isolation import outside
from titan_rl.preflight.refusal import MOST_CHARACTERS
from titan_rl.tasks.reward_process import KILL_SECONDS
from titan_rl.tasks.reward_shapes import Arguments, component
from titan_rl.tasks.reward_worker import SIGNALLED, fork_worker
from titan_rl.tasks.rewards import Answered
from titan_rl.tasks.rubric import judge_once
from titan_rl.wire.types import Prompt

PROBE_SECONDS = 30  # to import a module, and again to call its function
EXTERNAL_FACTOR = 5  # times PROBE_SECONDS, if environment.python imports it: nothing has read its packages yet
IMPORTING, CALLING, CONSTRUCTED, RESET = "importing", "calling", "constructed", "reset"


def probe(
    name: str,
    prompt: Prompt | None,
    key: str = "task.reward",
    arguments: Arguments | None = None,
    environment: EnvironmentSection | None = None,
) -> Iterator[str]:
    """Yield the problem of `name`, if it has one. A reward is imported, and called with the prompt's own answer; an
    override is imported and must be registered; an environment or an agent is imported as `environment` configures, and
    a user's environment is constructed, reset and closed for the prompt."""
    section = environment or EnvironmentSection()
    seconds = PROBE_SECONDS * (EXTERNAL_FACTOR if section.python else 1)
    with tempfile.TemporaryDirectory() as folder:
        question, stages, stack = (Path(folder) / file for file in ("question", "stages", "stack"))
        question.write_bytes(pickle.dumps((seconds, (key, name, prompt, arguments, section))))
        # The child itself ends earlier, unless its clock is stopped.
        code = run_child(f"from {__name__} import answer; answer({folder!r})", 3 * seconds + section.turn_seconds + 30)
        lines = [json.loads(line) for line in stages.read_text().splitlines()] if stages.exists() else []
        last = lines[-1] if lines else IMPORTING
        stages_of = {IMPORTING: "be imported", CALLING: "return a number for the first row"}
        stages_of |= {each: f"be {each} for the first row" for each in (CONSTRUCTED, RESET)}
        expected = f"{name!r} to {stages_of.get(last, last)}"
        if last not in stages_of:
            yield from filter(None, [last])
        elif code is None or (stack.exists() and stack.stat().st_size):
            at = re.search(r'File "(.*)", line (\d+)', stack.read_text() if stack.exists() else "")
            place = f" at {at[1]}:{at[2]}" if at else ""
            within = section.turn_seconds if last == RESET else seconds
            yield f"{key}: expected {expected} within {within:g} s, found it still running{place}"
        else:
            yield f"{key}: expected {expected}, found that it ends the process with exit code {code}"


def run_child(program: str, seconds: float) -> int | None:
    """Run a program that finds modules where this process does, and return its exit code; None: it did not end in time.
    All that it started ends with it, also in other sessions."""
    supervised = f"from {fork_worker.__module__} import fork_worker; fork_worker({os.getpid()}); {program}"
    command = [sys.executable, "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}; {supervised}"]
    nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    supervisor = outside(lambda: subprocess.Popen(command, start_new_session=True, **nothing))
    try:
        code = supervisor.wait(seconds)
        return code if code <= SIGNALLED else SIGNALLED - code
    except subprocess.TimeoutExpired:
        return None
    finally:
        supervisor.terminate()
        with suppress(subprocess.TimeoutExpired):
            supervisor.wait(KILL_SECONDS)
        supervisor.kill()
        supervisor.wait()


def answer(folder: str) -> None:
    """Answer the question in a folder, as the child: write each stage as it begins, and then the problem."""
    seconds, question = pickle.loads(Path(folder, "question").read_bytes())
    with Path(folder, "stages").open("w") as stages, Path(folder, "stack").open("w") as stack:

        def write(line: str) -> None:
            print(json.dumps(line), file=stages, flush=True)
            faulthandler.cancel_dump_traceback_later()
            within = question[-1].turn_seconds if line == RESET else seconds  # as in the run
            faulthandler.dump_traceback_later(within, file=stack, exit=True)

        write(problem_of(*question, begin=write))
    os._exit(0)  # not to wait for its threads


def problem_of(
    key: str,
    name: str,
    prompt: Prompt | None,
    arguments: Arguments | None,
    environment: EnvironmentSection,
    *,
    begin: Callable[[str], None],
) -> str:
    """Import the code, and call a reward; return the problem, or "". `begin` is called with each stage."""
    verb = "import"

    def next_stage(stage: str, next_verb: str) -> None:
        nonlocal verb
        verb = next_verb
        begin(stage)

    begin(IMPORTING)
    try:
        if key in (KEY, AGENT_KEY):
            make = _load_rollout_code(key, name, environment)
            if (
                make is not None
                and prompt is not None
                and name.partition(":")[0] not in MAKERS
                and (isinstance(make, type) or not asynchronous(make))
            ):
                asyncio.run(_rehearse(make, name, prompt, environment.args, next_stage))
        elif key != "task.reward":
            from torchtitan.config.override import _REGISTRY  # apply_overrides looks there

            importlib.import_module(name.rpartition(".")[0])
            if name not in _REGISTRY:
                return f"{key}: expected {name!r} to be registered with @override, found no such override"
        else:
            reward = component(name, arguments)
            if prompt is not None:
                next_stage(CALLING, "score the first row")
                judge_once(reward, prompt, Answered(prompt.answer))
    except BaseException as error:  # the user's code may raise any
        try:
            text = str(error)[:MOST_CHARACTERS]
        except BaseException:  # its own __str__ fails
            text = ""
        found = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return text if text.startswith(key) else f"{key}: expected {name!r} to {verb}, found {found}"
    return ""


def _load_rollout_code(key: str, name: str, e: EnvironmentSection) -> Callable[..., Any] | None:
    """Import an environment or an agent. Return the maker of an environment of this Python."""
    if e.python:
        asyncio.run(_load_externally(key, name, e))
    elif key == KEY:
        return load_environment(name, e.args)
    else:
        keywords_of(load_agent(name, e.args, key), dict.fromkeys(OFFERED), key)
    return None


async def _rehearse(
    make: Callable[..., Any],
    name: str,
    prompt: Prompt,
    args: Mapping[str, Any],
    begin: Callable[[str, str], None],
) -> None:
    """Make an environment as a rollout of this prompt would, reset it and close it."""
    begin(CONSTRUCTED, "construct")
    declared = parameters_of(make)
    names = [p.name for p in declared]
    takes_any = "env_config" in names or any(p.kind is p.VAR_KEYWORD for p in declared)
    if unknown := [each for each in args if not takes_any and each not in names]:
        raise TypeError(f"no parameter for environment.args = {unknown[0]!r}; it has {', '.join(names) or 'none'}")
    offered = offered_by(prompt.row, prompt.text, prompt.answer, 0, prompt.messages, prompt.id)
    environment = await make_environment(make, name, offered, args)
    if not callable(getattr(environment, "reset", None)):
        raise TypeError(f"an object without reset(): {type(environment).__name__}")
    if hasattr(environment, "step"):
        try:
            inspect.signature(environment.step).bind("reply")
        except (TypeError, ValueError) as error:
            raise TypeError(f"a step() that does not take one reply: {error}") from error
    begin(RESET, "reset for the first row")
    messages_from(await reset_environment(environment, name, offered))
    Toolbox(tools_of(environment))
    if hasattr(environment, "close"):
        await call_user(environment.close)


async def _load_externally(key: str, name: str, e: EnvironmentSection) -> None:
    external = await ExternalPython.start(e.python, name, key=key, args=e.args, agent=key == AGENT_KEY)
    await external.close()
