"""Checks that this installation has the optional parts that the keys need, and finds the checks of those parts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from titan_rl.config.sections import Config, FaultSection, SandboxSection
from titan_rl.preflight.checks.task import rewards_of, rewards_of_sets
from titan_rl.preflight.load import Invocation
from titan_rl.tasks.games import GAMES
from titan_rl.wire import parts

Needs = Callable[[Config], bool]
SNAPSHOT_STEPS = FaultSection().snapshot_interval


def tracks(config: Config) -> bool:
    return bool(config.metrics.services) or not config.metrics.project.strip()


def plays(config: Config) -> bool:
    return bool(config.rollout_code) or config.task.name in GAMES


def runs_code(config: Config) -> bool:
    """Return True if code of the user or of a model may run in the sandbox."""
    named = [config.environment.name, config.task.agent, *rewards_of_sets(config)]
    named += [name for _, name in rewards_of(config.task)]
    return config.sandbox != SandboxSection() or any(":" in name or name == "code_tests" for name in named)


NEEDED: Sequence[tuple[str, str, Needs]] = (
    ("environments", "environment.name", lambda config: bool(config.environment.name)),
    ("environments", "task.agent", lambda config: bool(config.task.agent)),
    ("games", "task.name", lambda config: config.task.name in GAMES),
    ("curriculum", "curriculum", lambda config: config.curriculum.on),
    ("kept batches", "record.batches", lambda config: config.record.batches > 0),
    ("losses of pairs", "algorithm.name", lambda c: c.algorithm.kind == "preference" or c.algorithm.online_pairs),
    ("losses of reward models", "algorithm.name", lambda config: config.algorithm.kind == "reward"),
    ("snapshots", "fault.snapshot_interval", lambda config: config.fault.snapshot_interval not in (0, SNAPSHOT_STEPS)),
    ("snapshots", "fault.snapshot_gbps", lambda config: config.fault.snapshot_gbps > 0),
    ("trackers", "metrics.trackers", lambda config: bool(config.metrics.services)),
)
"""A part, the key that needs it, and whether it does."""

CHECKS: Sequence[tuple[str, Needs]] = (
    ("ext.agents.checks", plays),
    ("ext.sandbox.checks", runs_code),
    ("ext.trackers.checks", tracks),
)
"""A module with `problems(config)` and `warnings(config)`, and whether a config needs its checks."""


def check_parts(config: Config) -> Iterator[str]:
    for name, key, needs in NEEDED:
        if needs(config) and not parts.has_part(name):
            yield parts.missing_part(name, key)


def without_snapshots(run: Invocation) -> Invocation:
    """Return a run that takes no snapshots by default if this installation takes none, with a warning."""
    fault = run.config.fault
    if run.policies or fault.snapshot_interval != SNAPSHOT_STEPS or parts.has_part("snapshots"):
        return run
    config = replace(run.config, fault=replace(fault, snapshot_interval=0))
    warning = (
        f"fault.snapshot_interval: 0 in place of {SNAPSHOT_STEPS} in an installation without titan_rl/ext/snapshots: a "
        "lost trainer costs the steps since the last checkpoint"
    )
    return replace(run, config=config, warnings=(*run.warnings, warning))


def checks_of_parts(config: Config) -> list[Any]:
    """Return the modules of the checks that a config needs. No others are imported."""
    return parts.modules_of(name for name, needs in CHECKS if needs(config))
