"""Checks of [task]: the reward functions, and every row of its files."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from titan_rl.agents.games import GAMES
from titan_rl.config.data_sources import DataSource, data_sources, source_of, source_problems
from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.preflight.checks.assets import policy_tokenizer
from titan_rl.preflight.checks.reward_keys import check_rewards, rewards_of
from titan_rl.preflight.row_lengths import first_unfit, other_unfit, unfit_rows
from titan_rl.tasks import procedural
from titan_rl.tasks.announced import announced
from titan_rl.tasks.examples import BadRows, Example, named, read_source
from titan_rl.tasks.rewards import last_number
from titan_rl.tasks.row_files import EXPECTED
from titan_rl.tasks.task import addition, load_task, played
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Prompt

ADDITION_HELD_OUT = 2000  # of the 10,000 sums; the others are training examples
MANY_DIGITS = re.compile(r"\d{1000}")  # comparing such numbers takes seconds


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that a run trains on, or is evaluated on, and what is wrong with them."""

    examples: list[Example]
    problems: list[str]


def check_task(config: Config) -> Iterator[str]:
    task = config.task
    if task.system_prompt and task.template == "plain":
        yield f'task.system_prompt: expected "" with task.template = "plain", found {as_toml(task.system_prompt)}'
    if key := task.demonstration_key:
        if task.name != "jsonl":
            yield f'task.demonstration_key: expected "" with task.name = "{task.name}", found {as_toml(key)}'
        elif config.algorithm.kind in ("preference", "reward"):
            why = f"with algorithm.name = {as_toml(config.algorithm.name)}, which reads pairs"
            yield f'task.demonstration_key: expected "" {why}, found {as_toml(key)}'
    if task.sources and task.name != "jsonl":
        yield f'task.sources: expected none with task.name = "{task.name}", found {as_toml(list(task.sources))}'
    elif found := list(source_problems(task)):
        yield from found
        return
    if task.datasets and task.name != procedural.NAME:
        yield f'task.datasets: expected none with task.name = "{task.name}", found {as_toml(list(task.datasets))}'
    elif found := list(_procedural_problems(config)):
        yield from found
        return
    own = {"addition": _addition, "jsonl": _files, procedural.NAME: _procedural}
    train, heldout = own.get(task.name, _played)(config)
    yield from check_rewards(config, train.examples, heldout.examples)
    yield from (*train.problems, *heldout.problems)


def _addition(config: Config) -> tuple[Rows, Rows]:
    size = config.eval.size
    if size <= ADDITION_HELD_OUT:
        train, heldout = addition(derive(config.debug.seed, "task"), size)
        return Rows(train, []), Rows(heldout, [])
    most = f"expected at most {ADDITION_HELD_OUT} of addition's 10,000 sums"
    return Rows([], [f"eval.size: {most}, found {size}"]), Rows([], [])


def _played(config: Config) -> tuple[Rows, Rows]:
    size, count = config.eval.size, GAMES[config.task.name].count
    if size <= count // 5:
        train, heldout = played(config.task.name, derive(config.debug.seed, "task"), size)
        return Rows(train, []), Rows(heldout, [])
    most = f"expected at most {count // 5} of {config.task.name}'s {count:,} problems"
    return Rows([], [f"eval.size: {most}, found {size}"]), Rows([], [])


def _procedural_problems(config: Config) -> Iterator[str]:
    """Yield the problems of a config whose task generates endless problems."""
    if config.task.name != procedural.NAME:
        return
    yield from procedural.set_problems(config.task)
    if config.curriculum.on:
        yield f'curriculum: expected none with task.name = "{procedural.NAME}", whose problems never come back'
    if config.algorithm.kind in ("preference", "reward"):
        name = as_toml(config.algorithm.name)
        yield f'task.name: expected "jsonl" with algorithm.name = {name}, which reads pairs, found "{procedural.NAME}"'


def _procedural(config: Config) -> tuple[Rows, Rows]:
    train, heldout = procedural.procedural(config.task, derive(config.debug.seed, "task"), config.eval.size)
    return Rows(train[:1], []), Rows(heldout, [])


def _files(config: Config) -> tuple[Rows, Rows]:
    task, size = config.task, config.eval.size
    train = heldout = Rows([], [])
    if task.path or task.sources:
        parts = [_rows(config, source, "path") for source in data_sources(task)]
        train = Rows([e for part in parts for e in part.examples], [p for part in parts for p in part.problems])
    else:
        train = Rows([], [f'task.path: {EXPECTED} for task.name = "jsonl", found ""'])
    if size and task.eval_path:
        heldout = _rows(config, source_of(task, task.eval_path, "task.eval_path"), "eval_path")
    elif size:
        why = f"eval.size = {size} (0 disables evaluation)"
        heldout = Rows([], [f'task.eval_path: {EXPECTED} for {why}, found ""'])
    return train, heldout


def _rows(config: Config, source: DataSource, key: Literal["path", "eval_path"]) -> Rows:
    try:
        limit = config.eval.size if key == "eval_path" else None
        examples = read_source(source, limit, pairs=config.algorithm.kind in ("preference", "reward")).examples
    except BadRows as error:
        return Rows([], error.problems)
    except (OSError, ValueError) as error:
        return Rows([], [str(error)])
    return Rows(examples, named(list(_unusable(config, key, examples)), source.path))


def _unusable(config: Config, key: Literal["path", "eval_path"], examples: list[Example]) -> Iterator[str]:
    """Yield what is wrong with a row that is otherwise well formed."""
    steps = config.cold_start.steps
    named = {name: set_by for set_by, name in rewards_of(config.task)}
    if key == "eval_path" and config.task.eval_reward:
        named = {config.task.eval_reward: "eval_reward"}
    elif key == "path":
        named = {name: set_by for name, set_by in named.items() if set_by != "eval_reward"}
    else:
        named = {name: set_by for name, set_by in named.items() if set_by != "grader"}
    numeric = next((named[name] for name in ("last_number", "number") if name in named), "")
    for example in announced(examples, f"checking task.{key}", len(examples)):
        if config.task.template == "plain" and not isinstance(example.prompt, str):
            yield f'task.template: expected "chat" for the messages in {example.where}, found "plain"'
        elif steps and key == "path" and not example.answer.strip():
            yield f"cold_start.steps: expected 0, because {example.where} has no answer to learn, found {steps}"
        elif numeric and (answer := unnumbered(example)):
            yield f"task.{numeric}: expected a number in the answer of {example.where}, found {answer}"


def unnumbered(example: Example) -> str:
    """Return why "last_number" finds no number in an answer, or ""."""
    if MANY_DIGITS.search(example.answer):
        return "one of 1000 digits or more"
    try:
        last_number(Prompt(0, "", [], example.answer), "")
    except ValueError as error:
        if str(error).startswith("task.reward"):
            return as_toml(example.answer[:200])
        return f"a number that is too large to compare ({error})"
    return ""


def check_row_lengths(config: Config) -> Iterator[str]:
    """Check that every row fits, of a task that can be loaded, with a tokenizer that can be."""
    pairs = config.algorithm.kind in ("preference", "reward")
    task = load_task(config.task, seed=derive(config.debug.seed, "task"), eval_size=config.eval.size, pairs=pairs)
    with policy_tokenizer(config) as tokenizer:
        if tokenizer is None:
            return
        try:
            found = unfit_rows(config, task, tokenizer)
        except BadRows as error:  # rows that the chat template refuses
            yield from error.problems
            return
    for examples, unfit in zip((task.known, task.heldout), found, strict=True):
        if unfit and config.task.on_unfit_rows == "refuse":
            drops = f"to drop {len(unfit)} of {len(examples)} rows{other_unfit(examples, unfit)}"
            yield f'{first_unfit(examples, unfit)}, or set task.on_unfit_rows = "drop" {drops}'
        elif unfit and len(unfit) == len(examples):
            yield f"{first_unfit(examples, unfit)}; no row fits, so they cannot be dropped"
