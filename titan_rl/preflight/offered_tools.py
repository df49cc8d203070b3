"""Asks an environment which tools it offers, so that supervised steps read prompts as rollouts do."""

import asyncio
import json
import os
import pickle
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_rl.agents.adapters import MAKERS
from titan_rl.agents.environment_calls import make_environment, offered_by, reset_environment, tools_of
from titan_rl.agents.episode_loop import load_environment
from titan_rl.agents.tools import Toolbox
from titan_rl.agents.user_code import asynchronous
from titan_rl.config.data_sources import source_problems
from titan_rl.config.sections import Config
from titan_rl.config.system_sections import EnvironmentSection
from titan_rl.preflight.probe import run_child
from titan_rl.tasks.examples import BadRows
from titan_rl.tasks.task import load_task
from titan_rl.text.tokenizer import messages_of
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Prompt

SECONDS = 60.0  # for the child to import the environment, and to reset it once

Schemas = tuple[dict[str, Any], ...]


def first_prompt(config: Config) -> Prompt | None:
    """Return the first row as an environment sees it; None if there is none, which check_task reports."""
    task = config.task
    if any(source_problems(task)):
        return None
    with suppress(BadRows, OSError, ValueError, IndexError):
        seed = derive(config.debug.seed, "task")
        example = load_task(replace(task, eval_path=""), seed=seed, eval_size=0).train[0]
        text = example.prompt if isinstance(example.prompt, str) else str(example.prompt[-1].get("content", ""))
        messages = messages_of(example.prompt, task.system_prompt) if task.template == "chat" else ()
        return Prompt(0, text, [], example.answer, example.row, messages=messages)
    return None


_known: dict[EnvironmentSection, Schemas] = {}


def offered_tools(config: Config) -> Schemas:
    """Return the schemas of the tools that the environment offers for the first row, if supervised steps train on its
    conversations. A child process resets the environment once. Nothing if that fails: environment.name is checked."""
    environment = config.environment
    trains = config.algorithm.kind == "supervised" or config.cold_start.steps > 0
    if not (trains and environment.name and config.task.template == "chat"):
        return ()
    if environment.python or environment.name.partition(":")[0] in MAKERS:
        return ()
    if environment not in _known:
        prompt = first_prompt(config)
        _known[environment] = _asked(environment, prompt) if prompt is not None else ()
    return _known[environment]


def _asked(environment: EnvironmentSection, prompt: Prompt) -> Schemas:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "question").write_bytes(pickle.dumps((environment, prompt)))
        code = run_child(f"from {__name__} import answer; answer({folder!r})", SECONDS)
        return tuple(json.loads((Path(folder) / "tools").read_text())) if code == 0 else ()


def answer(folder: str) -> None:
    """Write the tools of the environment in a folder's question, as the child."""
    environment, prompt = pickle.loads(Path(folder, "question").read_bytes())
    tools = asyncio.run(_tools(environment, prompt))
    Path(folder, "tools").write_text(json.dumps(tools))
    os._exit(0)  # not to wait for its threads


async def _tools(e: EnvironmentSection, prompt: Prompt) -> list[dict[str, Any]]:
    make = load_environment(e.name, e.args)
    if not isinstance(make, type) and asynchronous(make):
        return []
    offered = offered_by(prompt.row, prompt.text, prompt.answer, 0, prompt.messages, prompt.id)
    environment = await make_environment(make, e.name, offered, e.args)
    await reset_environment(environment, e.name, offered)  # it may choose the tools
    return [dict(schema) for schema in Toolbox(tools_of(environment)).schemas]
