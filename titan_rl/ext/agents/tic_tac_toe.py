"""Tic-tac-toe: three in a row win. A player reads the board and replies with the number of a free square.

    x..   o to move: "x..o.....?" -> "5"         squares are 1 2 3
    o..                                                      4 5 6
    ...                                                      7 8 9

Who names no free square moves at random, in self-play for a fine, so that random weights play at random. In the
held-out games one player is perfect, or moves at random.
"""

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from titan_rl.ext.agents.episodes import Reply, Step

SEATS = ("x", "o")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
EMPTY = "." * 9
ROWS = 4000
FINE = 0.25  # for a move to a square that is not free
OPPONENTS = ("perfect", "random")
AGAINST = [(opponent, seat) for opponent in OPPONENTS for seat in SEATS]  # in the order of the held-out games


def games(seed: int, eval_size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows of self-play to train on, and rows to evaluate on, against each opponent from each seat."""
    plain = {"question": "", "answer": ""}
    heldout = [
        {
            **plain,
            "game": n,
            "opponent": opponent,
            "opponent_seat": seat,
        }
        for n in range(eval_size)
        for opponent, seat in [AGAINST[n % len(AGAINST)]]
    ]
    return [
        {
            **plain,
            "game": n,
            "opponent": "",
            "opponent_seat": "",
        }
        for n in range(ROWS)
    ], heldout


class TicTacToe:
    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._opponent, self._opponent_seat = row["opponent"], row["opponent_seat"]
        self._board, self._draws = EMPTY, random.Random(seed)
        self._answer()
        return self._shown()

    def to_move(self) -> str:
        return mover(self._board)

    def step(self, reply: Reply) -> Step:
        move = int(reply.text[0]) - 1 if reply.text[:1].isdecimal() else -1
        illegal = move not in free(self._board)
        self._play(self._draws.choice(free(self._board)) if illegal else move)
        self._answer()
        fine = -FINE if illegal and not self._opponent else 0.0
        info: dict[str, Any] = {"illegal": float(illegal)}
        if not over(self._board):
            return Step(self._shown(), fine, info=info)
        won = winner(self._board)
        scores = {seat: 0.0 if not won else 1.0 if seat == won else -1.0 for seat in SEATS}
        if self._opponent:
            del scores[self._opponent_seat]
            (score,) = scores.values()
            results = {"won": score > 0, "drawn": score == 0, "lost": score < 0}
            info |= {f"{self._opponent}_{result}": float(held) for result, held in results.items()}
        return Step("", fine, True, {**info, "seats": scores})

    def _play(self, move: int) -> None:
        self._board = self._board[:move] + mover(self._board) + self._board[move + 1 :]

    def _answer(self) -> None:
        """Make the opponent's move, if the game has one and it is its turn."""
        if mover(self._board) == self._opponent_seat and not over(self._board):
            moves = best_moves(self._board) if self._opponent == "perfect" else free(self._board)
            self._play(self._draws.choice(moves))

    def _shown(self) -> str:
        return f"{self._board}?"


def mover(board: str) -> str:
    return SEATS[(9 - board.count(".")) % 2]


def free(board: str) -> list[int]:
    return [at for at, mark in enumerate(board) if mark == "."]


def winner(board: str) -> str:
    return next((board[a] for a, b, c in LINES if board[a] != "." and board[a] == board[b] == board[c]), "")


def over(board: str) -> bool:
    return bool(winner(board)) or "." not in board


@cache
def outcome(board: str) -> int:
    """Return 1 if the player to move wins against a perfect one, 0 if it draws, -1 if it loses."""
    if over(board):
        return -1 if winner(board) else 0
    return max(-outcome(_after(board, move)) for move in free(board))


def best_moves(board: str) -> list[int]:
    return [move for move in free(board) if -outcome(_after(board, move)) == outcome(board)]


def _after(board: str, move: int) -> str:
    return board[:move] + mover(board) + board[move + 1 :]
