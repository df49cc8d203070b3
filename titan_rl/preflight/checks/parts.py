"""Checks that this installation has the optional parts that the keys need, and the checks of these parts themselves."""

from collections.abc import Callable, Iterator, Sequence

from titan_rl.config.sections import Config
from titan_rl.tasks.games import GAMES
from titan_rl.wire import parts

CHECKS = parts.modules_of(parts.CHECKS)

NEEDED: Sequence[tuple[str, str, Callable[[Config], bool]]] = (
    ("environments", "environment.name", lambda config: bool(config.environment.name)),
    ("environments", "task.agent", lambda config: bool(config.task.agent)),
    ("games", "task.name", lambda config: config.task.name in GAMES),
    ("curriculum", "curriculum", lambda config: config.curriculum.on),
    ("kept batches", "record.batches", lambda config: config.record.batches > 0),
    ("losses of pairs", "algorithm.name", lambda c: c.algorithm.kind == "preference" or c.algorithm.online_pairs),
    ("losses of reward models", "algorithm.name", lambda config: config.algorithm.kind == "reward"),
    ("trackers", "metrics.trackers", lambda config: bool({*config.metrics.trackers} - {"tensorboard"})),
)
"""A part, the key that needs it, and whether it does."""


def check_parts(config: Config) -> Iterator[str]:
    for name, key, needs in NEEDED:
        if needs(config) and not parts.has_part(name):
            yield parts.missing_part(name, key)
