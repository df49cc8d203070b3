"""What a completion is worth: f(prompt, completion's text) -> float, chosen by task.reward."""

import importlib
import inspect
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from titan_rl.wire.types import Prompt

Reward = Callable[[Prompt, str], float]

# 1,234.50 | 1234 | .5, with a sign that is no subtraction ("5-3" ends in 3) and dollars on either side of it.
NUMBER = re.compile(r"(?:(?<![\w.)])-)?\$?(?:(?<=\$)-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


def reward_for(name: str) -> Reward:
    """The rule that task.reward or task.eval_reward names. ("model" is no rule: reward_model.py.)"""
    return BUILT_IN.get(name) or custom(name)


def exact(prompt: Prompt, completion: str) -> float:
    """1.0 when the completion is the answer, white space around either aside."""
    return float(completion.strip() == prompt.answer.strip())


def last_number(prompt: Prompt, completion: str) -> float:
    """1.0 when the completion's last number equals the answer's: GSM8K's after "####", else its last one."""
    expected = _number(prompt.answer.rpartition("####")[2])
    if expected is None:
        raise ValueError(
            f'task.reward = "last_number" expects a number in the answer, found {prompt.answer!r} (prompt {prompt.id})'
        )
    return float(_number(completion) == expected)


BUILT_IN: dict[str, Reward] = {"exact": exact, "last_number": last_number}


def custom(name: str) -> Reward:
    """The user's "package.module:function", called with those of prompt, completion, answer (texts) and row that it
    takes as keywords."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(
            f'task.reward: expected "exact", "last_number", "model" or "package.module:function", got {name!r}'
        )
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"task.reward = {name!r}: {error}") from error
    taken = _taken(function, name)

    def reward(prompt: Prompt, completion: str) -> float:
        offered = {"prompt": prompt.text, "completion": completion, "answer": prompt.answer, "row": prompt.row}
        value = function(**{key: offered[key] for key in taken})
        if not isinstance(value, int | float):
            raise TypeError(f"task.reward = {name!r} must return a float, int or bool; returned {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"task.reward = {name!r} must return a finite number; returned {value!r}")
        return float(value)

    return reward


def _taken(function: Callable[..., Any], name: str) -> list[str]:
    """Which of the offered keywords the function takes; it may require no others."""
    offered = ["prompt", "completion", "answer", "row"]
    parameters = inspect.signature(function).parameters.values()
    for p in parameters:
        required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if required and (p.name not in offered or p.kind is p.POSITIONAL_ONLY):
            raise TypeError(f"task.reward = {name!r} may take the keywords {', '.join(offered)}; it requires {p}")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return [key for key in offered if key in keywords]


def _number(text: str) -> Decimal | None:
    """The last number in a text, by value: "$1,200.0" is 1200."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace("$", "").replace(",", "")) if found else None
