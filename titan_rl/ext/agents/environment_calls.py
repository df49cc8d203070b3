"""Loads, makes and resets the user's environment, and lists its tools.

Only the standard library is imported, because external_program.py does the same in another Python.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titan_rl.ext.agents.adapters import MAKERS, Conversation, Message, Settings, adapted
from titan_rl.ext.agents.tools import Tool
from titan_rl.ext.agents.verifiers_agent import verifiers_agent
from titan_rl.tasks.user_code import call_user
from titan_rl.wire.user_functions import keywords_of, load, parameters_of

NO_TOOLS = ("reset", "close", "get_reward")
"""Public methods of a set of tools that the policy may not call."""


def load_user_environment(
    name: str, args: Mapping[str, Any], key: str, seats: Sequence[str] = ()
) -> Callable[..., Any]:
    """Return a maker of environments: of a package for "PREFIX:REST", else the user's "module:name"."""
    return _load(name, args, key, seats, MAKERS)


def load_agent(name: str, args: Mapping[str, Any], key: str, seats: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the user's agent "module:name", or one that plays a taskset: "verifiers:TASKSET"."""
    return _load(name, args, key, seats, {"verifiers": verifiers_agent})


def _load(
    name: str,
    args: Mapping[str, Any],
    key: str,
    seats: Sequence[str],
    makers: Mapping[str, Callable[..., Callable[..., Any]]],
) -> Callable[..., Any]:
    """Call the maker of the name's prefix, or import the user's code. Raise ValueError if that fails."""
    prefix, _, rest = name.partition(":")
    if prefix not in makers:
        return load(name, key)
    try:
        return makers[prefix](rest, args, seats)
    except Exception as error:
        raise ValueError(f"{key} = {name!r}: {type(error).__name__}: {error}") from error


def offered_by(
    row: Mapping[str, Any],
    prompt: str,
    answer: str,
    seed: int,
    messages: Sequence[Message],
    number: int,
    seats: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what an environment may take by keyword. `number` is the prompt's: all rollouts of its group have the same
    `task_seed`, but different `seed`s. Without a chat template there are no messages."""
    task_seed = row["seed"] if isinstance(row.get("seed"), int) else number
    own = {"row": row, "prompt": prompt, "answer": answer, "seed": seed}
    return {**own, "task_seed": task_seed, "messages": list(messages), "seats": list(seats)}


async def make_environment(
    make: Callable[..., Any], name: str, offered: Mapping[str, Any], args: Mapping[str, Any]
) -> Any:
    """Return an environment with the methods that episodes.py describes. Its constructor may take columns of the row by
    name. Constructors of SkyRL-gym take env_config, which is environment.args, and extras, which is the row. Raise
    TypeError if it is no environment."""
    row = offered["row"]
    columns = {p.name: row[p.name] for p in parameters_of(make) if p.default is p.empty and p.name in row}
    known = {"reward_spec": {"method": "rule", "ground_truth": offered["answer"]}, "extra_info": {}}
    keywords = {**columns, **offered, "env_config": Settings(args), "extras": {**known, **row}, **args}
    environment = adapted(await call_user(make, **keywords_of(make, keywords, name)))
    if not callable(getattr(environment, "reset", None)):
        raise TypeError(f"an object without reset(): {type(environment).__name__}")
    return environment


async def reset_environment(environment: Any, name: str, offered: Mapping[str, Any]) -> Any:
    """Return the first observation. `reset` may also take columns of the row by name. The text of a set of tools is
    appended to the user's message, as TRL does."""
    keywords = keywords_of(environment.reset, {**offered["row"], **offered}, f"{name}.reset", spread="row")
    observation = await call_user(environment.reset, **keywords)
    if hasattr(environment, "step") or not isinstance(observation, str) or not observation:
        return observation
    if not offered["messages"]:
        return observation
    *before, last = offered["messages"]
    if last.get("role") != "user" or not isinstance(last.get("content"), str):
        return observation
    return Conversation([*before, {**last, "content": last["content"] + observation}])


def tools_of(environment: Any) -> list[Tool]:
    """Return an environment's `tools`; if it has no `step`, its public methods."""
    if hasattr(environment, "tools"):
        return list(environment.tools)
    if hasattr(environment, "step"):
        return []
    names = [name for name in dir(environment) if not name.startswith("_") and name not in NO_TOOLS]
    return [tool for name in names if callable(tool := getattr(environment, name))]
