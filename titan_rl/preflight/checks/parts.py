"""Checks that this installation has the optional parts that the keys need, and finds the checks of those parts."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from titan_rl.config.sections import Config, SandboxSection
from titan_rl.preflight.checks.task import rewards_of, rewards_of_sets
from titan_rl.tasks.games import GAMES
from titan_rl.wire import parts

Needs = Callable[[Config], bool]


def tracks(config: Config) -> bool:
    return bool(config.metrics.services) or not config.metrics.project.strip()


def plays(config: Config) -> bool:
    return bool(config.rollout_code) or config.task.name in GAMES


def runs_code(config: Config) -> bool:
    """Return True if code of the user or of a model may run in the sandbox."""
    named = [config.environment.name, config.task.agent, *rewards_of_sets(config)]
    named += [name for _, name in rewards_of(config.task)]
    return config.sandbox != SandboxSection() or any(":" in name or name == "code_tests" for name in named)


def distills(config: Config) -> bool:
    """Return True if there is a teacher, or a key of one that has no effect."""
    a = config.algorithm
    keys = a.needs_teacher or a.teacher_weights != "folder" or a.teacher_context or config.cold_start.teacher_prompts
    return a.kind == "rl" and bool(keys)


NEEDED: Sequence[tuple[str, str, Needs]] = (
    ("environments", "environment.name", lambda config: bool(config.environment.name)),
    ("environments", "task.agent", lambda config: bool(config.task.agent)),
    ("games", "task.name", lambda config: config.task.name in GAMES),
    ("curriculum", "curriculum", lambda config: config.curriculum.on),
    ("column kept", "rollout.top_p, top_k or min_p", lambda config: config.rollout.truncates),
    ("column routes", "algorithm.routing_replay", lambda config: config.algorithm.routing_replay),
    ("kept batches", "record.batches", lambda config: config.record.batches > 0),
    ("losses of pairs", "algorithm.name", lambda c: c.algorithm.kind == "preference" or c.algorithm.online_pairs),
    ("losses of reward models", "algorithm.name", lambda config: config.algorithm.kind == "reward"),
    ("teacher", "algorithm.advantage", distills),
    ("trackers", "metrics.trackers", lambda config: bool(config.metrics.services)),
)
"""A part, the key that needs it, and whether it does."""

CHECKS: Sequence[tuple[str, Needs]] = (
    ("ext.agents.checks", plays),
    ("ext.sandbox.checks", runs_code),
    ("ext.teachers.checks", distills),
    ("ext.trackers.checks", tracks),
)
"""A module with `problems(config)` and `warnings(config)`, and whether a config needs its checks."""


def check_parts(config: Config) -> Iterator[str]:
    for name, key, needs in NEEDED:
        if needs(config) and not parts.has_part(name):
            yield parts.missing_part(name, key)


def checks_of_parts(config: Config) -> list[Any]:
    """Return the modules of the checks that a config needs. No others are imported."""
    return parts.modules_of(name for name, needs in CHECKS if needs(config))
