"""Checks of [task]: rewards, every row of its files, and what the chat template makes of sample conversations."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from titan_rl.config.data_sources import DataSource, data_sources, source_of, source_problems
from titan_rl.config.eval_sets import eval_sets
from titan_rl.config.eval_sets import problems_of as set_problems
from titan_rl.config.sections import Config, TaskSection
from titan_rl.config.toml import as_toml, did_you_mean
from titan_rl.preflight.checks.model import policy_tokenizer
from titan_rl.preflight.probe import probe, tools_found, untokenized
from titan_rl.preflight.refusal import problem
from titan_rl.preflight.unfit_rows import first_unfit, image_problems, other_unfit, unfit_rows
from titan_rl.tasks.announced import announced
from titan_rl.tasks.examples import GYM, BadRows, Example, named, read_source
from titan_rl.tasks.games import game_of
from titan_rl.tasks.judging import evaluation_rubric
from titan_rl.tasks.own_task import own_examples
from titan_rl.tasks.reward_shapes import component
from titan_rl.tasks.rewards import BUILT_IN, expected_number
from titan_rl.tasks.row_files import EXPECTED, row_files
from titan_rl.tasks.task import addition, load_task, played, template_text, with_chat
from titan_rl.tasks.verifiers import AT_ONCE, TAKES
from titan_rl.text.inspection import DATE, END, LATER, Finding, inspect_template
from titan_rl.text.template import is_inline
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.parts import missing_part, needed_part, part
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Prompt

ADDITION_HELD_OUT = 2000  # sums out of 10,000; the others are training examples
MANY_DIGITS = re.compile(r"\d{1000}")  # comparing such numbers takes seconds
MAY_HANG = ("regex", "math", "json_schema", GYM)
"""Verifiers that run in processes only."""
HEAVY = ("math",)
"""Verifiers whose package takes long to import, so that another process does."""
LEAST_MEMORY_MB = 64
"""Of a reward process: before it imports the user's module, it has 39 MiB."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
PAIRS = ("preference", "reward")  # kinds of algorithms that read them

Rows = tuple[list[Example], list[str]]
"""Rows to train on or to evaluate on, and their problems."""


def check_task(config: Config) -> Iterator[str]:
    wrong, task = partial(problem, config), config.task
    own = f'with task.name = "{task.name}"'
    if task.system_prompt and task.template == "plain":
        yield wrong("task.system_prompt", '"" with task.template = "plain"')
    if task.demonstration_key and task.name != "jsonl":
        yield wrong("task.demonstration_key", f'"" {own}')
    elif task.demonstration_key and config.algorithm.kind in PAIRS:
        why = f"with algorithm.name = {as_toml(config.algorithm.name)}, which reads pairs"
        yield wrong("task.demonstration_key", f'"" {why}')
    if task.sources and task.name != "jsonl":
        yield f"task.sources: expected none {own}, found {as_toml(list(task.sources))}"
    elif found := list(source_problems(task)):
        yield from found
        return
    if task.datasets and task.name != GYM:
        yield f"task.datasets: expected none {own}, found {as_toml(list(task.datasets))}"
    elif found := list(_procedural_problems(config)):
        yield from found
        return
    if ":" in task.name and (found := list(probe(task.name, None, "task.name"))):
        yield from found
        return
    rows = {"jsonl": _files, GYM: _procedural}.get(task.name, _own if ":" in task.name else _generated)
    (train, bad), (heldout, bad_heldout) = rows(config)
    yield from check_rewards(config, train, heldout)
    yield from (*bad, *bad_heldout)


def _generated(config: Config) -> tuple[Rows, Rows]:
    name, size, seed = config.task.name, config.eval.size, derive(config.debug.seed, "task")
    most, problems = ADDITION_HELD_OUT, "addition's 10,000 sums"
    if game := game_of(name):
        most, problems = game.count // 5, f"{name}'s {game.count:,} problems"
    if size > most:
        return ([], [problem(config, "eval.size", f"at most {most} of {problems}")]), ([], [])
    train, heldout = addition(seed, size) if name == "addition" else played(name, seed, size)
    return (train, []), (heldout, [])


def _own(config: Config) -> tuple[Rows, Rows]:
    pairs, seed = config.algorithm.kind in PAIRS, derive(config.debug.seed, "task")
    try:
        train, heldout = own_examples(config.task, seed, config.eval.size, pairs=pairs)
    except BadRows as error:
        return ([], error.problems), ([], [])
    except Exception as error:  # a user's function may raise any error
        text = str(error)
        known = text.startswith("task.")
        return ([], [text if known else f"task.name = {config.task.name!r}: {type(error).__name__}: {text}"]), ([], [])
    unusable = [*_unusable(config, "path", train), *_unusable(config, "eval_path", heldout)]
    return (train, named(unusable, config.task.name)), (heldout, [])


def _procedural_problems(config: Config) -> Iterator[str]:
    """Yield the problems of a config whose task generates endless problems."""
    if config.task.name == GYM:
        check = part("checks of reasoning_gym")
        yield from check(config) if check else [missing_part("task reasoning_gym", "task.name")]


def _procedural(config: Config) -> tuple[Rows, Rows]:
    load = needed_part("task reasoning_gym", "task.name")
    train, heldout = load(config.task, derive(config.debug.seed, "task"), config.eval.size)
    return (train[:1], []), (heldout, [])


def data_warnings(config: Config) -> Iterator[str]:
    """Yield what makes evaluations or steps mean less than they seem to."""
    task = config.task
    if task.name != "jsonl" or any(source_problems(task)) or any(set_problems(config.eval.sets)):
        return
    with suppress(OSError, ValueError, BadRows):
        train = {file.path.resolve() for source in data_sources(task) for file in row_files(source.path, "task.path")}
        held_out = {"task.eval_path": task.eval_path if config.eval.size else ""}
        held_out |= {f"eval.sets.{each.name}.path": each.path for each in eval_sets(config.eval.sets)}
        for key, path in held_out.items():
            files = row_files(path, key) if path else ()
            if both := sorted(str(file.path) for file in files if file.path.resolve() in train):
                yield f"{key}: expected rows that are not trained on, found the training rows in {both[0]}"
        step = config.rollout.groups_per_step
        count = sum(
            len(read_source(source, pairs=config.algorithm.kind in PAIRS).examples) for source in data_sources(task)
        )
        if config.algorithm.kind == "rl" and 0 < count < step:
            rows = f"{count} row{'s' * (count > 1)}"
            yield f"task.path: {rows} for the {step} prompts of a step, which then has each several times"


def _files(config: Config) -> tuple[Rows, Rows]:
    task, size = config.task, config.eval.size
    train: Rows = [], [f'task.path: {EXPECTED} for task.name = "jsonl", found ""']
    if task.path or task.sources:
        parts = [_rows(config, source, "path") for source in data_sources(task)]
        train = [e for examples, _ in parts for e in examples], [each for _, bad in parts for each in bad]
    if size and task.eval_path:
        return train, _rows(config, source_of(task, task.eval_path, "task.eval_path"), "eval_path")
    missing = f'task.eval_path: {EXPECTED} for eval.size = {size} (0 disables evaluation), found ""'
    return train, ([], [missing] if size else [])


def _rows(config: Config, source: DataSource, key: Literal["path", "eval_path"]) -> Rows:
    try:
        limit = config.eval.size if key == "eval_path" else None
        examples = read_source(source, limit, pairs=config.algorithm.kind in PAIRS).examples
    except BadRows as error:
        return [], error.problems
    except (OSError, ValueError) as error:
        return [], [str(error)]
    if source.demonstration_key and key == "path" and not any(example.demonstration for example in examples):
        expected = f"a column with a conversation in some row of {source.path}"
        return [], [
            f"{source.section}.demonstration_key: expected {expected}, found none in {source.demonstration_key!r}"
        ]
    return examples, named(list(_unusable(config, key, examples)), source.path)


def _unusable(config: Config, key: Literal["path", "eval_path"], examples: list[Example]) -> Iterator[str]:
    """Check well-formed rows against the config."""
    steps = config.cold_start.steps
    unused = "eval_reward" if key == "path" else "grader"
    named = {name: set_by for set_by, name in rewards_of(config.task) if set_by != unused}
    if key == "eval_path" and config.task.eval_reward:
        named = {config.task.eval_reward: "eval_reward"}
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
        found = expected_number(example.answer)
    except ValueError as error:
        return f"a number that is too large to compare ({error})"
    return as_toml(example.answer[:200]) if found is None else ""


def check_row_lengths(config: Config) -> Iterator[str]:
    """Check that every row fits, of a task that can be loaded, with a tokenizer that can be."""
    tokenizer, pairs = policy_tokenizer(config), config.algorithm.kind in PAIRS
    task = load_task(config.task, seed=derive(config.debug.seed, "task"), eval_size=config.eval.size, pairs=pairs)
    if tokenizer is None:
        return
    if config.environment.name and (begun := part("openings of environments")):
        task = replace(task, openings=begun(config, task, tokenizer).by_row)  # check_environment has its problem
    if refused := image_problems(config, [*task.known, *task.heldout], tokenizer):
        yield from refused
        return
    try:
        unfit_by_part = unfit_rows(config, task, tokenizer)
    except BadRows as error:  # rows that the chat template refuses
        yield from error.problems
        return
    for examples, unfit in zip((task.known, task.heldout), unfit_by_part, strict=True):
        if unfit and config.task.bad_rows == "refuse":
            drops = f"to drop {len(unfit)} of {len(examples)} rows{other_unfit(examples, unfit)}"
            yield f'{first_unfit(examples, unfit)}, or set task.bad_rows = "drop" {drops}'
        elif unfit and len(unfit) == len(examples):
            yield f"{first_unfit(examples, unfit)}; no row fits, so they cannot be dropped"


def check_rewards(config: Config, train: Sequence[Example], heldout: Sequence[Example]) -> Iterator[str]:
    """Check that every reward can be called. A user's function is called once, with the first row's own answer."""
    task = config.task
    yield from _table(task)
    if 0 < task.reward_memory_mb < LEAST_MEMORY_MB:
        yield problem(config, "task.reward_memory_mb", f"0 or at least {LEAST_MEMORY_MB}, as an idle process has 40")
    named = dict.fromkeys([*(name for _, name in rewards_of(task)), *rewards_of_sets(config)])
    arguments = {key for name in named for key in TAKES.get(name, ())}
    for key in task.reward_args:
        if key not in arguments:
            used = ", ".join(sorted(arguments)) or "none, because no verifier in use takes any"
            yield f"task.reward_args: expected keys among {used}, found {key!r}{did_you_mean(key, arguments)}"
    for key, name in rewards_of(task):
        if name == "model" and key != "reward":
            why = "because a reward model cannot measure a policy trained against it"
            why = why if key in ("eval_reward", "grader") else "which has its own mesh: name it in task.reward"
            yield f'task.{key}: expected a reward other than "model", {why}, found "model"'
        if name in ("model", *BUILT_IN):
            continue
        if name in AT_ONCE and config.algorithm.kind == "rl" and config.rollout.group_size < 2:
            yield problem(config, "rollout.group_size", f'at least 2, because task.{key} = "{name}" compares answers')
        first = next(iter(train if key != "eval_reward" else heldout or train), None)
        prompt = first and untokenized(first, task)
        yield from check_callable(f"task.{key}", name, prompt, task)
        if name == "code_tests" and (untested := part("tests of code")):
            yield from untested(config, key, [*train, *heldout])
    compares = next((name for name, _ in evaluation_rubric(task).parts if name in AT_ONCE), "")
    if compares and config.eval.size and config.samples_rollouts:
        why = f'because "{compares}" compares the answers of a group (eval.size = 0 disables evaluation)'
        yield problem(config, "task.eval_reward", f"a reward for the held-out answers, {why}")


def rewards_of_sets(config: Config) -> list[str]:
    """Return the rewards of [eval.sets], whose tables may not be sound."""
    names = [table.get("reward") for table in config.eval.sets.values() if isinstance(table, dict)]
    return [name for name in names if isinstance(name, str) and name]


def rewards_of(task: TaskSection) -> list[tuple[str, str]]:
    """Return every reward that the task names, and the key that names it."""
    rewards = [("rewards", name) for name in task.rewards] or [("reward", task.reward)]
    return [*rewards, *((key, getattr(task, key)) for key in ("eval_reward", "grader") if getattr(task, key))]


def _table(task: TaskSection) -> Iterator[str]:
    for name, weight in task.rewards.items():
        if isinstance(weight, bool | str) or not 0 < abs(weight) <= 1e6:
            expected = "a number other than 0, at most 1e6 in size"
            yield f"task.rewards: expected {expected}, as the weight of {name!r}, found {as_toml(weight)}"
    if task.rewards and task.reward != TaskSection().reward:
        yield f"task.reward: expected to be unset where task.rewards is set, found {as_toml(task.reward)}"


def check_callable(key: str, name: str, prompt: Prompt | None, task: TaskSection) -> Iterator[str]:
    """Check that a reward can be called; `key` names it. A user's function is called once."""
    if name in MAY_HANG and not task.reward_workers:
        yield f'task.reward_workers: expected at least 1 for "{name}", which may hang, found 0'
    if ":" in name or name in HEAVY:
        for text in probe(name, prompt, arguments=task.reward_args):
            yield text.replace("task.reward:", f"{key}:").replace("task.reward =", f"{key} =")
        return
    try:
        component(name, task.reward_args)
        if name == "code_tests" and prompt is not None:
            needed_part("tests of a row", key)(prompt.answer, prompt.row)
    except (TypeError, ValueError) as error:
        text = str(error).replace("task.reward:", f"{key}:").replace("task.reward =", f"{key} =")
        yield text if text.startswith(("task.", key)) else f"{key}: {text}"


def check_template_keys(config: Config) -> Iterator[str]:
    """Check the chat template's keys in [task], and in each source that renders chats in another way."""
    task = config.task
    own = source_of(task, task.path, "task.path")
    yield from _template_keys(own, task.template)
    for source in styled_sources(config):
        yield from _template_keys(source, task.template)
        turns = config.rollout_code or source.demonstration_key
        if turns and _style(source) != _style(own):
            why = f"because the later turns of {turns!r} are rendered by [task]'s"
            yield f"{source.section}.chat_template: expected none, {why}, found one, or other kwargs"


def styled_sources(config: Config) -> list[DataSource]:
    """Return the sources of sound tables that render chats in another way than [task]."""
    task = config.task
    if not task.sources or any(source_problems(task)):
        return []
    own = source_of(task, task.path, "task.path")
    return [
        source
        for source in data_sources(task)
        if (*_style(source), source.system_prompt) != (*_style(own), own.system_prompt)
    ]


def _style(source: DataSource) -> tuple[str, dict[str, Any]]:
    return source.chat_template, source.chat_template_kwargs


def _template_keys(source: DataSource, template: str) -> Iterator[str]:
    section = source.section
    if template == "plain":
        keys = (("chat_template", ""), ("chat_template_kwargs", {}), *([("system_prompt", "")] if source.name else []))
        for key, default in keys:
            if (found := getattr(source, key)) != default:
                expected = f'expected {as_toml(default)} with task.template = "plain"'
                yield f"{section}.{key}: {expected}, found {as_toml(found)}"
    for name in RESERVED:
        if name in source.chat_template_kwargs:
            expected = f"expected variables of the template other than {', '.join(RESERVED)}"
            yield f"{section}.chat_template_kwargs: {expected}, found {name!r}"
    found = as_toml(source.chat_template)
    if source.chat_template and not is_inline(source.chat_template):
        try:
            readable = os.path.isfile(source.chat_template) and bool(template_text(source.chat_template))
        except (OSError, ValueError) as error:
            found, readable = f"{found}: {error}", False
        if not readable:
            yield f"{section}.chat_template: expected a Jinja template or the path of a file with one, found {found}"


def check_chat(config: Config) -> Iterator[str]:
    """Render sample conversations, if the run renders chats with a tokenizer that can be loaded."""
    tokenizer = policy_tokenizer(config) if config.task.template == "chat" else None
    if tokenizer is None:
        return
    key = "task.chat_template" if config.task.chat_template else f"the chat template of {tokenizer.folder}"
    rendered = [(key, tokenizer)]
    for source in styled_sources(config):
        template = template_text(source.chat_template)
        own = replace(tokenizer.chat_settings, template=template, kwargs=source.chat_template_kwargs)
        rendered.append((f"{source.section}.chat_template", with_chat(tokenizer, own)))
    for key, each in rendered:
        yield from (f"{key}: {found.check}: {found.detail}" for found in inspected(config, each) if found.refuses)


def chat_warnings(config: Config) -> list[str]:
    """Warn about prompts that change from day to day, and turns that sampling does not end."""
    tokenizer = policy_tokenizer(config) if config.task.template == "chat" else None
    found = inspect_template(tokenizer) if tokenizer else []
    keys = {DATE: "task.chat_template_kwargs", END: "rollout.stop_token_ids"}
    warned = [f"{keys[each.check]}: {each.detail}" for each in found if each.check in keys and each.detail]
    return warned + (_unwritten_tools(config, tokenizer) if tokenizer else [])


def _unwritten_tools(config: Config, tokenizer: TextTokenizer) -> list[str]:
    """Return a warning of tools that the chat template does not tell the policy of."""
    schemas = tools_found(config.environment.name) if config.environment.name else []
    with suppress(Exception):  # a template may raise any error, which check_chat reports
        text = tokenizer.chat.render([{"role": "user", "content": "?"}], schemas) if schemas else ""
        if names := [name for each in schemas if (name := each["function"]["name"]) not in text]:
            of = "it" if config.task.chat_template else f"the template of {tokenizer.folder}"
            return [f"task.chat_template: {of} does not write the tools, so the policy cannot know {', '.join(names)}"]
    return []


def inspected(config: Config, tokenizer: TextTokenizer) -> Iterator[Finding]:
    """Yield what an inspection finds. An environment needs more than one question to be read."""
    for finding in inspect_template(tokenizer):
        needed = finding.check == LATER and bool(config.rollout_code)
        yield replace(finding, refuses=True) if finding.detail and needed else finding
