"""Checks of [task]: the reward functions, and every row of JSONL files."""

from collections.abc import Iterator
from typing import Literal

from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.preflight.checks.assets import policy_tokenizer
from titan_rl.preflight.row_lengths import first_unfit, unfit_rows
from titan_rl.tasks.rewards import last_number, reward_for
from titan_rl.tasks.task import jsonl, load_task
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Prompt

ADDITION_HELD_OUT = 2000  # of the 10,000 sums; the others are training examples


def check_task(config: Config) -> Iterator[str]:
    task = config.task
    yield from _check_rewards(config)
    if task.system_prompt and task.template == "plain":
        yield f'task.system_prompt: expected "" with task.template = "plain", found {as_toml(task.system_prompt)}'
    if task.name == "addition":
        if config.eval.size > ADDITION_HELD_OUT:
            yield f"eval.size: expected at most {ADDITION_HELD_OUT} of addition's 10,000 sums, found {config.eval.size}"
        return
    if not task.path:
        yield 'task.path: expected a JSONL file for task.name = "jsonl", found ""'
    if config.eval.size and not task.eval_path:
        size = f"eval.size = {config.eval.size} (0 disables evaluation)"
        yield f'task.eval_path: expected a JSONL file for {size}, found ""'
    if task.path:
        yield from _check_rows(config, "path")
    if task.eval_path and config.eval.size:
        yield from _check_rows(config, "eval_path")


def _check_rewards(config: Config) -> Iterator[str]:
    for key, reward in (("reward", config.task.reward), ("eval_reward", config.task.eval_reward)):
        if key == "eval_reward" and reward == "model":
            why = "because a reward model cannot measure a policy trained against it"
            yield f'task.eval_reward: expected a reward other than "model", {why}, found "model"'
        if reward in ("", "model"):
            continue
        try:
            reward_for(reward)
        except (TypeError, ValueError) as error:
            yield str(error).replace("task.reward", f"task.{key}")
        except Exception as error:  # importing the user's module runs it
            yield f'task.{key}: expected "{reward}" to import, found {type(error).__name__}: {error}'


def _check_rows(config: Config, key: Literal["path", "eval_path"]) -> Iterator[str]:
    try:
        limit = config.eval.size if key == "eval_path" else None
        examples = jsonl(config.task, key, limit, pairs=config.algorithm.kind in ("preference", "reward"))
    except (OSError, ValueError) as error:
        yield str(error)
        return
    file, steps = getattr(config.task, key), config.cold_start.steps
    reward = config.task.eval_reward if key == "eval_path" and config.task.eval_reward else config.task.reward
    for row, example in enumerate(examples, 1):
        if config.task.template == "plain" and not isinstance(example.prompt, str):
            yield f'task.template: expected "chat" for the messages in row {row} of {file}, found "plain"'
        elif steps and key == "path" and not example.answer.strip():
            yield f"cold_start.steps: expected 0, because row {row} of {file} has no answer to learn, found {steps}"
        elif reward == "last_number" and not _has_number(example.answer):
            set_by = "eval_reward" if key == "eval_path" and config.task.eval_reward else "reward"
            yield f'task.{set_by}: expected a number in the answer of row {row} of {file}, found "{example.answer}"'
        else:
            continue
        return  # report one row per file


def check_row_lengths(config: Config) -> Iterator[str]:
    """Check that every row fits, of a task that can be loaded, with a tokenizer that can be."""
    pairs = config.algorithm.kind in ("preference", "reward")
    task = load_task(config.task, seed=derive(config.debug.seed, "task"), eval_size=config.eval.size, pairs=pairs)
    with policy_tokenizer(config) as tokenizer:
        if tokenizer is None:
            return
        try:
            found = unfit_rows(config, task, tokenizer)
        except ValueError as error:  # a row that the chat template refuses
            yield str(error)
            return
    for examples, unfit in zip((task.train, task.heldout), found, strict=True):
        if unfit and config.task.on_unfit_rows == "refuse":
            drops = f"to drop {len(unfit)} of {len(examples)} rows"
            yield f'{first_unfit(examples, unfit)}, or set task.on_unfit_rows = "drop" {drops}'
        elif unfit and len(unfit) == len(examples):
            yield f"{first_unfit(examples, unfit)}; no row fits, so they cannot be dropped"


def _has_number(answer: str) -> bool:
    try:
        last_number(Prompt(0, "", [], answer), "")
    except ValueError:
        return False
    return True
