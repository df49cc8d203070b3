"""Recognizes a reward function by its signature, and calls it as the library does that it was written for.

    f(prompt, completion, answer, row, messages)             ours: one answer
    f(prompt, completions, answer, row)                      ours: all answers to a prompt at once
    f(prompts, completions, completion_ids, **columns)       TRL's reward_funcs: lists with one entry per answer
    f(data_source, solution_str, ground_truth, extra_info)   verl's compute_score

A function gets the keywords that it takes, and may be async.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from titan_rl.tasks.rewards import (
    OFFERED,
    Answered,
    accepted_keywords,
    keyword_values,
    load_function,
    number,
    parameters,
    short_repr,
)
from titan_rl.tasks.verifiers import AT_ONCE, VERIFIERS
from titan_rl.wire.types import Prompt

Arguments = Mapping[str, bool | int | float | str]


class ComponentScore(NamedTuple):
    value: float | None  # None: the function does not apply to this answer
    more: Mapping[str, float] = {}  # other numbers that it returned
    feedback: str = ""  # the text that it returned under this name


@dataclass(frozen=True, slots=True)
class Component:
    """A reward function, ready to be called."""

    name: str
    call: Callable[..., Any]  # (prompt, answer), or (prompt, answers) if `at_once`; may return an awaitable
    read: Callable[[Any], Any]  # makes a ComponentScore, or a list of them, from the value that `call` returned
    at_once: bool = False  # it judges all answers to a prompt in one call
    asynchronous: bool = False


def component(name: str, arguments: Arguments | None = None) -> Component:
    """Return the built-in verifier of that name, or the user's "package.module:function"."""
    if name in VERIFIERS:
        verify = VERIFIERS[name](arguments or {})
        if name in AT_ONCE:
            return Component(name, verify, lambda rewards: _scores(rewards, name, Extras()), at_once=True)
        return Component(
            name, verify, lambda value: ComponentScore(number(value, name)), asynchronous=asynchronous(verify)
        )
    function = load_function(name, VERIFIERS)
    keywords = {p.name: p for p in parameters(function, name)}
    spread = any(p.kind is p.VAR_KEYWORD for p in keywords.values())
    if "solution_str" in keywords:
        return _of_verl(function, name)
    if "completions" in keywords and (spread or "prompts" in keywords):
        return _of_trl(function, name)
    return _own(function, name, at_once="completions" in keywords)


def asynchronous(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _own(function: Callable[..., Any], name: str, *, at_once: bool) -> Component:
    keys = accepted_keywords(function, name, [*_offered_at_once(Prompt(0, "", [], ""), ())] if at_once else OFFERED)

    def one(prompt: Prompt, answer: Answered) -> Any:
        return function(**keyword_values(keys, prompt, answer))

    def all_at_once(prompt: Prompt, answers: Sequence[Answered]) -> Any:
        every = _offered_at_once(prompt, answers)
        return function(**{key: every[key] for key in keys})

    if at_once:
        return Component(name, all_at_once, lambda rewards: _scores(rewards, name, Extras()), at_once=True)
    return Component(name, one, partial(_one_score, name=name), asynchronous=asynchronous(function))


def _offered_at_once(prompt: Prompt, answers: Sequence[Answered]) -> dict[str, Any]:
    texts, tokens = [answer.text for answer in answers], [list(answer.tokens) for answer in answers]
    one = {"prompt": prompt.text, "completions": texts, "completion_ids": tokens}
    return one | {"answer": prompt.answer, "row": prompt.row}


# -- TRL ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Extras:
    """Collects the numbers that a TRL function passes to log_metric and log_extra. Of texts, "feedback" is kept."""

    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[str(name)] = float(value)

    def log_extra(self, column: str, values: list[Any]) -> None:
        self.columns[str(column)] = list(values)

    def of(self, row: int) -> tuple[dict[str, float], str]:
        cells = {name: values[row] for name, values in self.columns.items() if row < len(values)}
        return self.metrics | numbers_of(cells), feedback_of(cells)


def _of_trl(function: Callable[..., Any], name: str) -> Component:
    def call(prompt: Prompt, answers: Sequence[Answered]) -> Any:
        extras = Extras()
        rewards = function(**_columns(function, name, prompt, answers, extras))
        if not inspect.isawaitable(rewards):
            return rewards, extras

        async def later() -> Any:
            return await rewards, extras

        return later()

    return Component(name, call, lambda result: _scores(result[0], name, result[1]), at_once=True)


def _columns(
    function: Callable[..., Any], name: str, prompt: Prompt, answers: Sequence[Answered], extras: Extras
) -> dict[str, Any]:
    """Return the arguments that TRL calls a reward function with. For a chat, prompts and completions are lists of
    messages."""
    n, chat = len(answers), [dict(message) for message in prompt.messages]
    completions = [[{"role": "assistant", "content": answer.text}] if chat else answer.text for answer in answers]
    reserved = ("prompt", "completion", "completion_ids")
    row = {"answer": prompt.answer} | {key: value for key, value in prompt.row.items() if key not in reserved}
    every: dict[str, Any] = {key: [value] * n for key, value in row.items()} | {
        "prompts": [chat or prompt.text] * n,
        "completions": completions,
        "completion_ids": [list(answer.tokens) for answer in answers],
        "trainer_state": SimpleNamespace(global_step=max((answer.version for answer in answers), default=0)),
        "log_metric": extras.log_metric,
        "log_extra": extras.log_extra,
    }
    return {key: every[key] for key in accepted_keywords(function, name, [*every])}


def _scores(rewards: Any, name: str, extras: Extras) -> list[ComponentScore]:
    if not isinstance(rewards, Sequence) and hasattr(rewards, "tolist"):  # an array, a tensor
        rewards = rewards.tolist()
    if not isinstance(rewards, Sequence) or isinstance(rewards, str | bytes):
        raise TypeError(f"task.reward: expected {name!r} to return a list of rewards, found {short_repr(rewards)}")
    values = [None if value is None else _finite(value, name) for value in rewards]
    return [ComponentScore(value, *extras.of(row)) for row, value in enumerate(values)]


def _finite(value: Any, name: str) -> float:
    """Return one of several rewards as a float; NaN if it is none, so that the others stay."""
    try:
        return number(value, name)
    except ValueError:
        return math.nan


# -- verl ---------------------------------------------------------------------------------------------------------


def _of_verl(function: Callable[..., Any], name: str) -> Component:
    keys = accepted_keywords(function, name, ["data_source", "solution_str", "ground_truth", "extra_info"])

    def call(prompt: Prompt, answer: Answered) -> Any:
        row, model = prompt.row, prompt.row.get("reward_model")
        truth = model.get("ground_truth", prompt.answer) if isinstance(model, Mapping) else prompt.answer
        extra = row.get("extra_info")
        every = {
            "data_source": row.get("data_source", ""),
            "solution_str": answer.text,
            "ground_truth": row.get("ground_truth", truth),
            "extra_info": dict(extra) if isinstance(extra, Mapping) else {},
        }
        return function(**{key: every[key] for key in keys})

    return Component(name, call, partial(_one_score, name=name), asynchronous=asynchronous(function))


def _one_score(result: Any, name: str) -> ComponentScore:
    """Read a number, or a dict with it as "score", other numbers, and a text as "feedback"."""
    if not isinstance(result, Mapping):
        return ComponentScore(number(result, name))
    if "score" not in result:
        raise TypeError(
            f"task.reward: expected {name!r} to return a float, or a dict with a 'score', found {short_repr(result)}"
        )
    others = {key: value for key, value in result.items() if key != "score"}
    return ComponentScore(number(result["score"], name), numbers_of(others), feedback_of(others))


def feedback_of(values: Mapping[str, Any]) -> str:
    feedback = values.get("feedback")
    return feedback if isinstance(feedback, str) else ""


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among some values; others cannot be logged."""
    numbers = dict[str, float]()
    for key, value in values.items():
        if isinstance(value, int | float) and math.isfinite(value):
            numbers[str(key)] = float(value)
    return numbers
