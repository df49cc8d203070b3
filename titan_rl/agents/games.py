"""The built-in tasks of several turns: their problems, their demonstrations, their environments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_rl.agents import calc, hunt

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Game:
    environment: Callable[[], Any]
    count: int  # all problems
    row: Callable[[int], dict[str, Any]]  # the columns of a problem, by its number
    prompt: Callable[[Row], str]
    answer: Callable[[Row], str]
    demonstration: Callable[[Row, int], list[tuple[str, str]]]  # (text, text read next) by turn
    longest: int  # tokens of a demonstration


GAMES = {
    "calc": Game(calc.Calc, calc.COUNT, calc.row, calc.prompt, calc.answer, calc.demonstration, calc.LONGEST),
    "hunt": Game(hunt.Hunt, hunt.COUNT, hunt.row, hunt.prompt, hunt.answer, hunt.demonstration, hunt.LONGEST),
}
