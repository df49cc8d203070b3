"""Asks an environment how it begins each row, so that demonstrations are read after what rollouts read.

    rows -> reset, once per row, in a child process -> Openings: tools and first observation by row -> Task.openings

The first observation must be a function of the row: a demonstration of another one teaches nonsense. So every row of a
file or of a user's own task is asked for. Generated problems have no place by which an opening could be found again:
theirs must have no observation and equal tools, of which the first few problems are taken as proof.
"""

import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from titan_rl.config.data_sources import source_problems
from titan_rl.config.sections import Config
from titan_rl.config.system_sections import EnvironmentSection
from titan_rl.ext.agents.adapters import Conversation
from titan_rl.ext.agents.environment_calls import offered_by, reset_environment, tools_of
from titan_rl.ext.agents.environments import Maker, made, run_with_maker
from titan_rl.ext.agents.episodes import messages_from
from titan_rl.ext.agents.tools import Toolbox, shows_images
from titan_rl.preflight.child import Write, ask
from titan_rl.preflight.probe import untokenized
from titan_rl.tasks.examples import BadRows
from titan_rl.tasks.games import GAMES
from titan_rl.tasks.rubric import users_place
from titan_rl.tasks.task import Task, load_task
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.seeds import derive
from titan_rl.wire.sessions import Opening
from titan_rl.wire.types import Prompt

SECONDS = 60.0  # for the child to import the environment, and again for each row
REPEATED = 4  # rows that are reset with two seeds; problems that are compared


class Openings(NamedTuple):
    by_row: Mapping[str, Opening]  # key: file:line. A generated problem has none: "" is the opening of all
    problem: str = ""


class Question(NamedTuple):
    environment: EnvironmentSection
    rows: Sequence[Sequence[Mapping[str, Any]]]  # what the environment is offered, for each reset of a row


def first_prompt(config: Config) -> Prompt | None:
    """Return the first row as an environment sees it; None if there is none, which check_task reports."""
    task = config.task
    if any(source_problems(task)):
        return None
    with suppress(BadRows, OSError, ValueError, IndexError):
        seed = derive(config.debug.seed, "task")
        return untokenized(load_task(replace(task, eval_path=""), seed=seed, eval_size=0).train[0], task)
    return None


_known: dict[bytes, Openings] = {}


def openings(config: Config, task: Task, tokenizer: TextTokenizer) -> Openings:
    """Return how the environment begins each training row, if supervised steps train on its conversations."""
    e, known = config.environment, task.known
    trains = config.algorithm.kind == "supervised" or config.cold_start.steps > 0
    if not (trains and e.name) or e.name in GAMES:
        return Openings({})
    examples = [example for example in known if example.where] or known[:REPEATED]
    try:
        prompts = [task.prompt(example, id, tokenizer) for id, example in enumerate(examples)]
    except Exception:  # the chat template refuses a row, which check_row_lengths reports
        return Openings({})
    question = Question(e, [[_offered(p, seed) for seed in range(1 + (p.id < REPEATED))] for p in prompts])
    places = [prompt.where for prompt in prompts]
    key = hashlib.sha256(pickle.dumps((question, places))).digest()
    if key not in _known:
        _known[key] = _asked(question, places)
    return _known[key]


def _offered(prompt: Prompt, seed: int) -> dict[str, Any]:
    return offered_by(prompt.row, prompt.text, prompt.answer, seed, prompt.messages, prompt.id + seed)


def _asked(question: Question, places: Sequence[str]) -> Openings:
    e = question.environment
    answer = ask(f"{__name__}:answer", question, seconds=SECONDS, lines=len(places) + 1, rows="resetting environments")
    by_row, begun = dict[str, Opening](), list[Opening]()
    for place, line in zip(places, answer.lines, strict=False):
        row = place or f"problem {len(begun) + 1}"
        if "error" in line:
            return Openings({}, f"environment.name: expected {e.name!r} to reset for {row}, found {line['error']}")
        first, *others = (_opening(each) for each in line["openings"])
        if others and first != others[0]:
            seen = " and ".join(repr(each.observation)[:200] for each in (first, others[0]))
            why = "because demonstrations are read after it"
            expected = f"a first observation and tools that depend on the row only, not on seeds, {why}"
            return Openings({}, f"environment.name: expected {expected}; found for {row}: {seen}")
        begun.append(first)
        if not place and (first.observation or first != begun[0]):
            read = "first observation" if first.observation else "tools, which differ between problems,"
            why = f"its demonstrations are read after the {read} of {e.name!r}, and these are asked of rows only"
            return Openings({}, f'task.name: expected "jsonl" or a function of rows, because {why}, found another')
        if first.observation or first.tools:
            by_row[place] = first
    if answer.failed:
        row = places[min(len(answer.lines), len(places) - 1)] or f"problem {len(answer.lines) + 1}"
        return Openings({}, f"environment.name: expected {e.name!r} to reset for {row}, found {answer.ended}")
    return Openings(by_row)


def _opening(line: Mapping[str, Any]) -> Opening:
    observation = line["observation"]
    return Opening(Conversation(observation) if line["whole"] else observation, tuple(line["tools"]))


def answer(question: Question, write: Write) -> None:
    """Write the openings of each row, as the child; or the error of the first row that has none."""
    e, rows = question

    async def each_row(make: Maker | None) -> None:
        if make is not None:
            for resets in rows:
                write({"openings": [await _begun(make, offered, e) for offered in resets]})

    try:
        run_with_maker(e, each_row)
    except BaseException as error:  # the user's code may raise any
        text = f"{type(error).__name__}: {error}"
        write({"error": f"{text}{users_place(error)}"})


async def _begun(make: Maker, offered: Mapping[str, Any], e: EnvironmentSection) -> dict[str, Any]:
    async with made(make, offered, e) as environment:
        observation = await reset_environment(environment, e.name, offered)
        if any(shows_images(message.get("content")) for message in messages_from(observation)):
            raise ValueError("an image, which demonstrations do not read (cold_start.steps = 0 needs none)")
        tools = Toolbox(tools_of(environment)).schemas  # now, because reset may choose them
        line = {"observation": observation, "whole": isinstance(observation, Conversation), "tools": tools}
        return json.loads(json.dumps(line))
