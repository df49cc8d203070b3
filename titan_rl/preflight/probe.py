"""Imports a user's modules, and calls a reward function once, before the run relies on them.

    probe (this process) -> key, name, first row -> problem_of (a child process) -> one line, or nothing

The function or its module may exit, hang (even while it holds the interpreter's lock) or crash: that ends only the
child, and is one line.
"""

import importlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

from titan_rl.config.sections import TaskSection
from titan_rl.config.system_sections import EnvironmentSection
from titan_rl.preflight.child import Write, ask
from titan_rl.preflight.refusal import MOST_CHARACTERS
from titan_rl.tasks.examples import Example
from titan_rl.tasks.reward_shapes import Arguments, component
from titan_rl.tasks.rewards import Answered
from titan_rl.tasks.rubric import judge_once, users_place
from titan_rl.text.tokenizer import messages_of
from titan_rl.wire.parts import needed_part
from titan_rl.wire.types import Prompt
from titan_rl.wire.user_functions import load

PROBE_SECONDS = 30  # to import a module, and again to call its function
EXTERNAL_FACTOR = 5  # times PROBE_SECONDS, if environment.python imports it: nothing has read its packages yet
IMPORTING, CALLING, CONSTRUCTED, RESET, TOOLS = "importing", "calling", "constructed", "reset", "tools"
TRIED = "tried"
STAGES = {
    IMPORTING: "be imported",
    CALLING: "return a number for the first row",
    CONSTRUCTED: "be constructed for the first row",
    RESET: "be reset for the first row",
    TRIED: "take random numbers",
}
OWN = {
    "algorithm.advantage": "titan_rl.batch.own_advantages",
    "algorithm.loss": "titan_rl.kernels.own_loss",
    "task.filter": "titan_rl.batch.own_filter",
    "task.name": "titan_rl.tasks.own_task",
}
"""Keys of a user's functions, and the module with their check."""


PLAYERS = ("environment.name", "task.agent")
"""Keys of what plays rollouts."""


class Question(NamedTuple):
    key: str
    name: str
    prompt: Prompt | None
    arguments: Arguments | None
    environment: EnvironmentSection


def probe(
    name: str,
    prompt: Prompt | None,
    key: str = "task.reward",
    arguments: Arguments | None = None,
    environment: EnvironmentSection = EnvironmentSection(),  # noqa: B008 (frozen)
) -> Iterator[str]:
    """Yield the problem of `name`, if it has one. A reward is imported, and called with the prompt's own answer; an
    override is imported and must be registered; an advantage, a loss or a filter is tried on random numbers; an
    environment or an agent is imported as `environment` configures, and a user's environment is constructed, reset and
    closed for the prompt."""
    seconds = PROBE_SECONDS * (EXTERNAL_FACTOR if environment.python else 1)
    question = Question(key, name, prompt, arguments, environment)
    longest = max(seconds, environment.turn_seconds)
    answer = ask(f"{__name__}:answer", question, seconds=seconds, longest=longest, lines=len(STAGES))
    _tools[name] = next((line[TOOLS] for line in answer.lines if isinstance(line, dict)), [])
    texts = [line for line in answer.lines if isinstance(line, str)]
    stages = [line for line in texts if line in STAGES]
    if answer.failed or len(stages) == len(texts):
        limit = environment.turn_seconds if stages[-1:] == [RESET] else seconds
        within = f" within {limit:g} s" if answer.late else ""
        yield f"{key}: expected {name!r} to {STAGES[stages[-1] if stages else IMPORTING]}{within}, found {answer.ended}"
    elif found := texts[-1]:
        yield found


_tools: dict[str, list[Any]] = {}


def tools_found(name: str) -> list[Any]:
    """Return the schemas of the tools that an environment offered when it was probed."""
    return _tools.get(name, [])


def untokenized(example: Example, task: TaskSection) -> Prompt:
    """Return an example as a run's code sees it, but for tokens: without a tokenizer a chat's text is not rendered."""
    messages = messages_of(example.prompt, task.system_prompt) if task.template == "chat" else ()
    text = example.prompt if isinstance(example.prompt, str) else str(example.prompt[-1].get("content", ""))
    return Prompt(0, text, [], example.answer, example.row, example.rejected, messages)


def answer(question: Question, write: Write) -> None:
    """Write each stage as it begins, and then the problem, as the child."""
    write(problem_of(question, write))


def problem_of(question: Question, begin: Write) -> str:
    """Import the code, and call a reward; return the problem, or "". `begin` is called with each stage."""
    key, name, prompt, arguments, environment = question
    verb = "import"

    def next_stage(stage: str, next_verb: str) -> None:
        nonlocal verb
        verb = next_verb
        begin(stage, environment.turn_seconds if stage == RESET else None)  # a reset has as long as in the run

    begin(IMPORTING, None)
    try:
        if key in PLAYERS:
            rehearse = needed_part("rehearsal of environments", key)
            rehearse(question, next_stage, lambda tools: begin({TOOLS: tools}, None))
        elif key in OWN:
            check = import_module(OWN[key]).check
            next_stage(TRIED, "be tried")
            return check(load(name, key), f"{key} = {name!r}")
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
        if text.startswith((key, "environment.python:")):
            return text
        found = f"{type(error).__name__}: {text}" if text else type(error).__name__
        found = text if text.startswith("environment.python ") else found  # how it ended
        return f"{key}: expected {name!r} to {verb}, found {found}{users_place(error)}"
    return ""
