"""Imports an agent, or makes, resets and closes an environment once, before a run relies on it."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from titan_rl.config.system_sections import EnvironmentSection
from titan_rl.ext.agents.adapters import MAKERS
from titan_rl.ext.agents.agent_session import OFFERED
from titan_rl.ext.agents.environment_calls import load_agent, offered_by, reset_environment, tools_of
from titan_rl.ext.agents.environments import Maker, made, run_with_maker
from titan_rl.ext.agents.episode_loop import AGENT_KEY
from titan_rl.ext.agents.episodes import messages_from
from titan_rl.ext.agents.external_python import ExternalPython
from titan_rl.ext.agents.tools import Toolbox
from titan_rl.preflight.probe import CONSTRUCTED, RESET, Question
from titan_rl.wire.types import Prompt
from titan_rl.wire.user_functions import keywords_of, parameters_of


def rehearse(
    question: Question, begin: Callable[[str, str], None], offers: Callable[[list[Mapping[str, Any]]], None]
) -> None:
    """Rehearse in the child process of the checks. `begin` is called with each stage, `offers` with an environment's
    tools."""
    key, name, prompt, _, environment = question

    async def each(make: Maker | None) -> None:
        if make is not None and prompt is not None and name.partition(":")[0] not in MAKERS:
            offers(await _rehearse(make, prompt, environment, begin))

    if key == AGENT_KEY:
        asyncio.run(_load_agent(name, environment))
    else:
        run_with_maker(environment, each)


async def _rehearse(
    make: Maker, prompt: Prompt, e: EnvironmentSection, begin: Callable[[str, str], None]
) -> list[Mapping[str, Any]]:
    """Make an environment as a rollout of this prompt would, reset it and close it. Return its tools' schemas."""
    begin(CONSTRUCTED, "construct")
    declared = [] if e.python else parameters_of(make)
    names = [p.name for p in declared]
    takes_any = e.python or "env_config" in names or any(p.kind is p.VAR_KEYWORD for p in declared)
    if unknown := [each for each in e.args if not takes_any and each not in names]:
        raise TypeError(f"no parameter for environment.args = {unknown[0]!r}; it has {', '.join(names) or 'none'}")
    offered = offered_by(prompt.row, prompt.text, prompt.answer, 0, prompt.messages, prompt.id, e.seats)
    async with made(make, offered, e) as environment:
        if e.seats and not hasattr(environment, "to_move"):
            raise TypeError("no method to_move(), which returns the player of environment.seats whose turn it is")
        if hasattr(environment, "step"):
            try:
                inspect.signature(environment.step).bind("reply")
            except (TypeError, ValueError) as error:
                raise TypeError(f"a step() that does not take one reply: {error}") from error
        begin(RESET, "reset for the first row")
        messages_from(await reset_environment(environment, e.name, offered))
        return list(Toolbox(tools_of(environment)).schemas)


async def _load_agent(name: str, e: EnvironmentSection) -> None:
    if e.python:
        external = await ExternalPython.start(e.python, name, key=AGENT_KEY, args=e.args, agent=True, seats=e.seats)
        await external.close()
    else:
        keywords_of(load_agent(name, e.args, AGENT_KEY, e.seats), dict.fromkeys(OFFERED), AGENT_KEY)
