"""Checks of the rewards of [task]: their names, weights and arguments, and one call of each of the user's functions."""

from collections.abc import Iterator, Sequence

from titan_rl.config.sections import Config, TaskSection
from titan_rl.config.toml import as_toml, did_you_mean
from titan_rl.preflight.reward_probe import probe
from titan_rl.sandbox.code_tests import row_tests
from titan_rl.tasks import procedural
from titan_rl.tasks.examples import Example
from titan_rl.tasks.reward_shapes import component
from titan_rl.tasks.rewards import BUILT_IN
from titan_rl.tasks.verifiers import TAKES, VERIFIERS
from titan_rl.wire.types import Prompt

MAY_HANG = ("regex", "math", "json_schema", procedural.NAME)
"""Verifiers that run in processes only."""
HEAVY = ("math",)
"""Verifiers whose package takes long to import, so that a process of its own does."""


def check_rewards(config: Config, train: Sequence[Example], heldout: Sequence[Example]) -> Iterator[str]:
    """Check that every reward can be called. A user's function is called once, with the first row's own answer."""
    task = config.task
    yield from _table(task)
    named = dict.fromkeys([*(name for _, name in rewards_of(task)), *rewards_of_sets(config)])
    arguments = {key for name in named for key in TAKES.get(name, ())}
    for key in task.reward_args:
        if key not in arguments:
            used = ", ".join(sorted(arguments)) or "none, because no verifier in use takes any"
            yield f"task.reward_args: expected keys among {used}, found {key!r}{did_you_mean(key, arguments)}"
    for key, name in rewards_of(task):
        if name == "model" and key != "reward":
            why = "because a reward model cannot measure a policy trained against it"
            why = why if key in ("eval_reward", "grader") else "which is a mesh of its own: name it in task.reward"
            yield f'task.{key}: expected a reward other than "model", {why}, found "model"'
        if name in ("model", *BUILT_IN):
            continue
        first = next(iter(train if key != "eval_reward" else heldout or train), None)
        prompt = first and Prompt(0, str(first.prompt), [], first.answer, first.row, first.rejected)
        yield from check_callable(f"task.{key}", name, prompt, task)


def rewards_of_sets(config: Config) -> list[str]:
    """Return the rewards of [eval.sets], whose tables may not be sound."""
    found = [table.get("reward") for table in config.eval.sets.values() if isinstance(table, dict)]
    return [name for name in found if isinstance(name, str) and name]


def rewards_of(task: TaskSection) -> list[tuple[str, str]]:
    """Return every reward that the task names, and the key that names it."""
    found = [("rewards", name) for name in task.rewards] or [("reward", task.reward)]
    return [*found, *((key, getattr(task, key)) for key in ("eval_reward", "grader") if getattr(task, key))]


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
    if name not in VERIFIERS or name in HEAVY:
        for problem in probe(name, prompt, arguments=task.reward_args):
            yield problem.replace("task.reward:", f"{key}:").replace("task.reward =", f"{key} =")
        return
    try:
        component(name, task.reward_args)
        if name == "code_tests" and prompt is not None:
            row_tests(prompt.answer, prompt.row)
    except (TypeError, ValueError) as error:
        yield str(error) if str(error).startswith("task.") else f"{key}: {error}"
