"""The built-in tasks of several turns, if this installation has any."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.wire.parts import part

Row = Mapping[str, Any]
GAMES = ("calc", "hunt")
"""Their names."""


@dataclass(frozen=True, slots=True)
class Game:
    """Problems, demonstrations and an environment."""

    environment: Callable[[], Any]
    count: int  # all problems
    row: Callable[[int], dict[str, Any]]  # the columns of a problem, by its number
    prompt: Callable[[Row], str]
    answer: Callable[[Row], str]
    demonstration: Callable[[Row, int], list[tuple[str, str]]]  # (text, text read next) by turn
    longest: int  # tokens of a demonstration


def game_of(name: str) -> Game | None:
    """Return the game of a task, or None if the task is none, or this installation has no games."""
    return (part("games") or {}).get(name) if name in GAMES else None
