"""Checks of [task]: the reward functions, and the first rows of JSONL files."""

from collections.abc import Iterator
from typing import Literal

from titan_rl.config.sections import Config
from titan_rl.tasks.rewards import last_number, reward_for
from titan_rl.tasks.task import jsonl
from titan_rl.wire.types import Prompt

ADDITION_HELD_OUT = 2000  # of the 10,000 sums; the others are training examples
ROWS_READ = 100  # of each JSONL file


def check_task(config: Config) -> Iterator[str]:
    task = config.task
    yield from _check_rewards(config)
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
        examples = jsonl(config.task, key, ROWS_READ, pairs=config.algorithm.kind in ("preference", "reward"))
    except (OSError, ValueError) as error:
        yield str(error)
        return
    file, steps = getattr(config.task, key), config.cold_start.steps
    for row, example in enumerate(examples, 1):
        if config.task.template == "plain" and not isinstance(example.prompt, str):
            yield f'task.template: expected "chat" for the messages in row {row} of {file}, found "plain"'
        elif steps and key == "path" and not example.answer.strip():
            yield f"cold_start.steps: expected 0, because row {row} of {file} has no answer to learn, found {steps}"
        elif config.task.reward == "last_number" and not _has_number(example.answer):
            yield f'task.reward: expected a number in the answer of row {row} of {file}, found "{example.answer}"'
        else:
            continue
        return  # report one row per file


def _has_number(answer: str) -> bool:
    try:
        last_number(Prompt(0, "", [], answer), "")
    except ValueError:
        return False
    return True
