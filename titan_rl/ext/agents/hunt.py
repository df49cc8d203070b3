"""A treasure on a 5 x 5 board, to be found in 8 moves (u, d, l, r) with a hint after each.

ur   ->   r   ->   u.   ->   u   ->   found
hint      move     hint      move
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from titan_rl.ext.agents.episodes import Reply, Step

SIDE, MOVES = 5, 8
SQUARES = SIDE**2
COUNT = SQUARES * (SQUARES - 1)
LONGEST = 4 * MOVES
DIRECTIONS = {"u": (0, -1), "d": (0, 1), "l": (-1, 0), "r": (1, 0)}


def row(number: int) -> dict[str, Any]:
    """Return a start and a treasure elsewhere."""
    start, treasure = divmod(number, SQUARES - 1)
    treasure += treasure >= start
    return {"x": start % SIDE, "y": start // SIDE, "treasure_x": treasure % SIDE, "treasure_y": treasure // SIDE}


def prompt(row: Mapping[str, Any]) -> str:
    return Board(row).hint()


def answer(row: Mapping[str, Any]) -> str:
    """There is no answer to compare with: the environment knows when the treasure is found."""
    return ""


def demonstration(row: Mapping[str, Any], seed: int) -> list[tuple[str, str]]:
    """Return (move, hint) by turn, with random moves: they teach how to move, and nothing about where to."""
    board, draws = Board(row), np.random.PCG64(seed)
    turns: list[tuple[str, str]] = []
    while not board.over:
        move = "udlr"[draws.random_raw() % 4]
        board.move(move)
        turns.append((move, "" if board.over else board.hint()))
    return turns


class Board:
    def __init__(self, row: Mapping[str, Any]) -> None:
        self._at = (row["x"], row["y"])
        self._treasure = (row["treasure_x"], row["treasure_y"])
        self._left = MOVES

    @property
    def found(self) -> bool:
        return self._at == self._treasure

    @property
    def over(self) -> bool:
        return self.found or self._left == 0

    def hint(self) -> str:
        """Return the direction of the treasure: "ul", ".r", "d."."""
        dx, dy = (goal - at for goal, at in zip(self._treasure, self._at, strict=True))
        return ("d" if dy > 0 else "u" if dy < 0 else ".") + ("r" if dx > 0 else "l" if dx < 0 else ".")

    def move(self, move: str) -> None:
        """Use up a move. One that is no direction, or leads off the board, changes nothing else."""
        self._left -= 1
        dx, dy = DIRECTIONS.get(move, (0, 0))
        self._at = tuple(min(max(at + d, 0), SIDE - 1) for at, d in zip(self._at, (dx, dy), strict=True))


class Hunt:
    async def reset(self, row: Mapping[str, Any]) -> str:
        self._board = Board(row)
        return ""

    async def step(self, reply: Reply) -> Step:
        self._board.move(reply.text if reply.finish == "stop" else "")
        if self._board.over:
            return Step(reward=float(self._board.found), done=True)
        return Step(self._board.hint())
