"""Makes environments in a check, as rollouts do: in this Python, or in environment.python."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from titan_rl.config.system_sections import EnvironmentSection
from titan_rl.ext.agents.environment_calls import make_environment
from titan_rl.ext.agents.episode_loop import KEY, load_environment
from titan_rl.ext.agents.external_python import ExternalPython
from titan_rl.tasks.user_code import asynchronous, call_user

Maker = Callable[..., Any]


def run_with_maker(e: EnvironmentSection, work: Callable[[Maker | None], Coroutine[Any, Any, None]]) -> None:
    """Call `work` with the maker of a config's environments. None: the config names a function, which makes none."""
    asyncio.run(_external(e, work) if e.python else _here(e, work))


async def _here(e: EnvironmentSection, work: Callable[[Maker | None], Coroutine[Any, Any, None]]) -> None:
    make = load_environment(e.name, e.args, e.seats)
    await work(make if isinstance(make, type) or not asynchronous(make) else None)


async def _external(e: EnvironmentSection, work: Callable[[Maker | None], Coroutine[Any, Any, None]]) -> None:
    external = await ExternalPython.start(e.python, e.name, key=KEY, args=e.args, seats=e.seats)
    try:
        await external.while_alive(work(external.make))
    finally:
        await external.close()


@asynccontextmanager
async def made(make: Maker, offered: Mapping[str, Any], e: EnvironmentSection) -> AsyncIterator[Any]:
    """Yield an environment, and close it."""
    environment = await make_environment(make, e.name, offered, e.args)
    try:
        yield environment
    finally:
        if hasattr(environment, "close"):
            await call_user(environment.close)
