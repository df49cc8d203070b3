"""The built-in tasks of several turns: their problems, their demonstrations, their environments."""

from titan_rl.ext.agents import calc, hunt
from titan_rl.tasks.games import Game

GAMES = {
    "calc": Game(calc.Calc, calc.COUNT, calc.row, calc.prompt, calc.answer, calc.demonstration, calc.LONGEST),
    "hunt": Game(hunt.Hunt, hunt.COUNT, hunt.row, hunt.prompt, hunt.answer, hunt.demonstration, hunt.LONGEST),
}
