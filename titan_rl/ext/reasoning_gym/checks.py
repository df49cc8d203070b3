"""Checks of task.name = "reasoning_gym"."""

from collections.abc import Iterator

from titan_rl.config.sections import Config, TaskSection
from titan_rl.config.toml import as_toml
from titan_rl.ext.reasoning_gym.problems import CPU_SECONDS, NAME, TRIED, procedural_sets, set_problems, try_sets
from titan_rl.preflight.checks.task import PAIRS
from titan_rl.preflight.child import ask
from titan_rl.preflight.refusal import problem

GENERATING_SECONDS = 120.0  # for a process to import reasoning-gym, and for the problems of each set, on a busy machine


def gym_problems(config: Config) -> Iterator[str]:
    """Yield the problems of a config whose task generates endless problems."""
    yield from set_problems(config.task)
    yield from _endless_sets(config.task)
    if config.curriculum.on:
        yield f'curriculum: expected none with task.name = "{NAME}", whose problems never come back'
    if config.algorithm.kind in PAIRS:
        name = as_toml(config.algorithm.name)
        yield problem(config, "task.name", f'"jsonl" with algorithm.name = {name}, which reads pairs')


def _endless_sets(task: TaskSection) -> Iterator[str]:
    """Have another process generate problems of each sound table: some settings take for ever, or all of the memory."""
    if any(set_problems(task)):
        return
    sets = procedural_sets(task)
    answer = ask(f"{try_sets.__module__}:{try_sets.__name__}", sets, seconds=GENERATING_SECONDS, lines=len(sets) + 1)
    yield from filter(None, answer.lines[1:])  # the first: the package is imported
    if answer.failed and answer.lines:
        key = f"task.datasets.{sets[len(answer.lines) - 1].name}"
        least = f"{TRIED} problems within {CPU_SECONDS} s of the CPU"
        yield f"{key}: expected settings with which reasoning-gym generates {least}, found {answer.ended}"
    elif answer.failed:
        yield f'task.name: expected to import reasoning-gym for "{NAME}", found {answer.ended}'
