"""The simplest rewards, f(prompt, text of the completion) -> float, and rules of all reward functions: how they are
found, which arguments they may take, and which values they may return. reward_shapes.py calls them."""

import inspect
import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsFloat

from titan_rl.config.toml import did_you_mean
from titan_rl.wire.parts import module_named
from titan_rl.wire.types import Prompt, Rollout

FLOAT32_MAX = 3.4028234663852886e38  # what advantages are computed in

OFFERED = ("prompt", "completion", "answer", "row", "messages")
"""Keywords that a reward function may take."""

Messages = Sequence[Mapping[str, Any]]


class Reward(Protocol):
    """Scores a completion. `messages` is what a rollout of several turns recorded; empty: there was one turn."""

    def __call__(self, prompt: Prompt, completion: str, messages: Messages = (), /) -> float: ...


class Answered(NamedTuple):
    """The part of a rollout that a reward may see."""

    text: str
    tokens: Sequence[int] = ()
    version: int = 0  # the policy's that sampled it
    messages: Messages = ()  # that a rollout of several turns recorded


def answer_of(rollout: Rollout) -> Answered:
    turns = rollout.turns
    completion = turns[-1].completion if turns else None
    versions = completion.versions if completion else ()
    return Answered(rollout.text, completion.tokens if completion else (), max(versions, default=0), rollout.messages)


# An optional sign that is not a subtraction ("5-3" ends in 3), and "$" before or after it.
_SIGN = r"(?:(?<![\w.)])-\$?|\$-?)?"
# 1,234.50 | 1234 | .5, and 1.5e3
_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?"
NUMBER = re.compile(rf"({_SIGN}{_UNSIGNED})(?:\s?/\s?({_UNSIGNED}))?")
"""A number, or a fraction of two."""
_OPERAND = r"(?:[\d)}\]]|\b[A-Za-z])"
BEFORE = re.compile(
    r"(?:[\^_√]\{?|\d:|/\s*|\b[A-Za-z]"  # x^2, x_2, 10:30, 3/4/5, x2
    r"|\\[A-Za-z]+(?:\[[^][]*\])?(?:\{[^{}]*\})*\{"  # \sqrt[3]{8}, \binom{7}{2}
    r"|[A-Za-z0-9_}]\("  # log_10(2), f(2)
    rf"|{_OPERAND}\s*(?:[-+\u00d7\u00b7\u00f7\u00b1\u2013\u2014]|\\(?:times|cdot|div|pm|mp))\s*\$?"  # 4 + 3, 8-3
    rf"|{_OPERAND}(?:\s+\*\s+|\*)\$?"  # 4*3, but not *3* in italics
    r"|\d\s+(?:minus|plus|times|divided by)\s+)$"
)
"""Text before a number that is only a part of a term."""
AFTER = re.compile(r"\^|/|:\d|√|π|[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]|\s?\\(?:pi|sqrt)")
"""Text after a number that is only a part of a term: x^2, 10:30, 2\\sqrt{3}."""
PROSE = re.compile(r"[A-Za-z]{2}:?\s+\W*$")
"""Text before a number whose "!" is no factorial."""
MAX_NUMBER_CHARS = 1000
VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")  # ½
GROUPING = re.compile(r"(?<=\d)(?:\\,|\{,\}|,\\!|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")  # 1{,}200, 1\,200
POWER = re.compile("(?<=\\d)[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")  # 10⁶
SUPERSCRIPTS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
MIXED = re.compile(r"(?<![\d.,/^])(\d{1,9})\s+(\d{1,9})/(\d{1,9})(?![\d/])")  # 2 1/2
_LENGTH = r"(?:[kcmd]?m|in|ft|yd|mi|units?|inch(?:es)?|feet|foot|yards?|miles?|(?:kilo|centi|milli)?met(?:er|re)s?)"
AREA = re.compile(
    rf"(?<=\d)((?:\s|\\[ ,;])*(?:\\(?:text|mathrm)\{{\s*)?{_LENGTH}\s*\}}?)\s*\^\s*\{{?[23](?!\d)\}}?"
)  # 5 \text{ cm}^2


def braced_power(found: re.Match[str]) -> str:
    return f"^{{{found[0].translate(SUPERSCRIPTS)}}}"


PLAIN: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (VULGAR, lambda found: f" {unicodedata.normalize('NFKC', found[0])}"),
    (GROUPING, ","),
    (POWER, braced_power),
    (AREA, r"\1"),
    (re.compile(r"\s?\^\s?\{?\s?\\circ\s?\}?"), ""),  # degrees
    (re.compile("[\u2212\ufe63\uff0d]"), "-"),  # minus signs
    (re.compile(r"(?<![\w)}\]])[\u2013\u2014](?=\$?\.?\d)"), "-"),
    (re.compile(r"((?:^|[=:(\[{<>\u2248]|\b(?:is|equals))\s*)-\s+(?=\$?\.?\d)"), r"\1-"),
    (re.compile(r"(?i)(?<![\d)}\]]\s)\b(?:minus|negative)\s+(?=\$?\.?\d)"), "-"),
    (re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|[\u00d7\u00b7*])\s*10\s*\^\s*\{?\s*([-+]?\d+)\s*\}?"), r"e\1"),
    (re.compile(r"(?<=\d)\s*(?=\\[dtc]?frac)"), " "),
    (re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))"), r"\1\2/\3\4"),
    (re.compile(r"\{\s*([^{}]*?)\s*\\over\s*([^{}]*?)\s*\}"), r"\1/\2"),
    (re.compile("\u2044"), "/"),
    (MIXED, lambda found: f"{int(found[1]) * int(found[3]) + int(found[2])}/{found[3]}"),
    (re.compile(r"\\(?:left|right|[bB]ig[lr]?)\b"), ""),
    (re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\{"), ""),
)
"""LaTeX and words around a number, and their plain form."""


def exact(prompt: Prompt, completion: str, messages: Messages = (), /) -> float:
    """Return 1.0 if the completion equals the answer, ignoring surrounding white space."""
    return float(completion.strip() == prompt.answer.strip())


def last_number(prompt: Prompt, completion: str, messages: Messages = (), /) -> float:
    """Return 1.0 if the completion's last number equals the answer's: the one after "####" (GSM8K), else its last. A
    fraction is a number; a part of another term (x^2, 4 + 3, 10:30, 2\\sqrt{3}) is none."""
    expected = expected_number(prompt.answer)
    if expected is None:
        raise ValueError(
            f'task.reward = "last_number" expects a number in the answer, found {prompt.answer!r} (prompt {prompt.id})'
        )
    return float(last_number_of(completion) == expected)


def expected_number(answer: str) -> Fraction | None:
    """Return the number of a reference answer: the last one after "####", or of the whole. None: it has none."""
    return last_number_of(answer.rpartition("####")[2])


BUILT_IN: dict[str, Reward] = {"exact": exact, "last_number": last_number}


def load_function(name: str, known: Collection[str] = BUILT_IN) -> Callable[..., Any]:
    """Return the user's "package.module:function". `known`: the names without a colon, for the message."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute) or module.startswith("."):
        names = ", ".join(f'"{each}"' for each in [*known, "model"])
        is_file = name.isidentifier() and os.path.isfile(f"{name}.py")  # unlike Path.is_file, never raises
        hint = f"; did you mean '{name}:FUNCTION'?" if is_file else did_you_mean(name, known)
        raise ValueError(f'task.reward: expected {names} or "package.module:function", found {name!r}{hint}')
    try:
        function = getattr(module_named(module), attribute)
    except ModuleNotFoundError as error:
        own = module.removesuffix(".py").replace("/", ".")
        meant = f"; did you mean '{own}:{attribute}'?" if module.endswith(".py") else ""
        looked = "" if meant else f" in the current folder ({Path.cwd()}) or among the installed packages"
        raise ValueError(f"task.reward = {name!r}: {error}{meant or looked}") from error
    except AttributeError as error:
        near = did_you_mean(attribute, vars(sys.modules[module])) if module in sys.modules else ""
        raise ValueError(f"task.reward = {name!r}: {error}{near}") from error
    except SystemExit as error:  # must not end the run, least of all as a success
        raise ValueError(f"task.reward: expected {name!r} to import, found {error!r}") from error
    if not callable(function):
        raise TypeError(f"task.reward: expected {name!r} to be a function, found {short_repr(function)}")
    return function


def keyword_values(keys: Collection[str], prompt: Prompt, answer: Answered) -> dict[str, Any]:
    """Return the values of `keys`, which are among OFFERED: prompt, completion and answer are texts, row is the
    example's, messages is the conversation."""
    every: dict[str, Any] = {"prompt": prompt.text, "completion": answer.text, "answer": prompt.answer}
    every["row"] = prompt.row
    if "messages" in keys:
        every["messages"] = conversation(prompt, answer.text, answer.messages)
    return {key: every[key] for key in keys}


def conversation(prompt: Prompt, completion: str, messages: Messages = ()) -> list[dict[str, Any]]:
    """Return the conversation from the prompt to the last answer, as a copy that the caller may change. Without a chat
    template the prompt is the first user's message."""
    asked = [] if prompt.messages else [{"role": "user", "content": prompt.text}]
    whole = messages or [*prompt.messages, {"role": "assistant", "content": completion}]
    return deepcopy([*asked, *map(dict, whole)])


def number(value: Any, name: str) -> float:
    """Return what a reward function returned as a float: any finite number, also of numpy, torch, decimal."""
    scalar = isinstance(value, int | float | SupportsFloat) and getattr(value, "ndim", 0) == 0
    if not scalar or isinstance(value, str | bytes):
        raise TypeError(f"task.reward: expected {name!r} to return a float, int or bool, found {short_repr(value)}")
    try:
        converted = float(value)
    except Exception as error:  # an int beyond any float, a tensor without data
        why = f"{short_repr(value)} ({type(error).__name__}: {error})"
        raise ValueError(f"task.reward: expected {name!r} to return a number, found {why}") from error
    if not math.isfinite(converted):
        raise ValueError(f"task.reward: expected {name!r} to return a finite number, found {short_repr(value)}")
    if abs(converted) > FLOAT32_MAX:
        raise ValueError(
            f"task.reward: expected {name!r} to return a number of float32's range, found {short_repr(value)}"
        )
    return converted


def short_repr(value: Any) -> str:
    """Return a truncated repr of any object."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        why = f"{short_repr(function)} ({error})"
        raise TypeError(f"task.reward: expected {name!r} to be a function with a signature, found {why}") from error


def accepted_keywords(function: Callable[..., Any], name: str, offered: Sequence[str]) -> list[str]:
    """Return the keywords that the function takes. Raise TypeError if it requires any other argument."""
    declared = parameters(function, name)
    for p in declared:
        required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if required and (p.name not in offered or p.kind is p.POSITIONAL_ONLY):
            raise TypeError(
                f"task.reward: expected {name!r} to require no keywords but {', '.join(offered)}, found {p}"
            )
    if any(p.kind is p.VAR_KEYWORD for p in declared):
        return [*offered]
    keywords = {p.name for p in declared if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return [key for key in offered if key in keywords]


def last_number_of(text: str) -> Fraction | None:
    """Return the value of the last number in a text: "$1,200.0" is 1200. None if it is a part of another term."""
    for dressed, plain in PLAIN:
        text = dressed.sub(plain, text)
    last = None
    for last in NUMBER.finditer(text):  # noqa: B007 (the last one is used)
        pass
    if last is None or len(last[0]) > MAX_NUMBER_CHARS:
        return None
    before, after = text[max(0, last.start() - 40) : last.start()], text[last.end() :]
    if BEFORE.search(before) or AFTER.match(after) or (after.startswith("!") and not PROSE.search(before)):
        return None
    value, *below = (Fraction(Decimal(re.sub("[$,]", "", part))) for part in last.groups() if part is not None)
    if not below:
        return value
    return value / below[0] if below[0] else None
