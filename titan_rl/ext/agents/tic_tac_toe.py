"""Tic-tac-toe: three in a row win. A player reads the board and replies with the number of a free square.

    x..   x to move: "a23u56789?" -> "5"         squares are 1 2 3
    o..                                                      4 5 6
    ...                                                      7 8 9

A free square is shown by its number, the player's own marks by the letters a to i, the other's by r to z: a letter for
each square, because a small model reads which tokens there are long before it reads where. Each board replaces what the
player has read before. Training games begin after some random moves, because who always begins with an empty board
rarely meets most of the others. A row's answer is a random move: the cold start teaches the rules, and nothing about
which moves are good.

Who names no free square moves at random, in self-play for a fine. In the held-out games one player is perfect, or moves
at random.
"""

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from titan_rl.ext.agents.adapters import Conversation
from titan_rl.ext.agents.episodes import Reply, Step

SEATS = ("x", "o")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
EMPTY = "." * 9
ROWS = 10_000
MOVED = 7  # most random moves before a training game
FINE = 1.0  # for a move to a square that is not free
OPPONENTS = ("perfect", "random")
AGAINST = [(opponent, seat) for opponent in OPPONENTS for seat in SEATS]  # in the order of the held-out games


def games(seed: int, eval_size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows of self-play to train on, and rows to evaluate on, against each opponent from each seat."""
    draws = random.Random(seed)
    heldout = [_row(n, EMPTY, *AGAINST[n % len(AGAINST)], draws) for n in range(eval_size)]
    return [_row(n, _begun(draws), "", "", draws) for n in range(ROWS)], heldout


def _row(n: int, board: str, opponent: str, opponent_seat: str, draws: random.Random) -> dict[str, Any]:
    return {
        "question": shown(board),
        "answer": str(draws.choice(free(board)) + 1),
        "game": n,
        "board": board,
        "opponent": opponent,
        "opponent_seat": opponent_seat,
    }


def _begun(draws: random.Random) -> str:
    """Return the board after up to MOVED random moves that have not ended the game."""
    board = EMPTY
    for _ in range(draws.randint(0, MOVED)):
        board = _after(board, draws.choice(free(board)))
        if over(board):
            return _begun(draws)
    return board


class TicTacToe:
    def reset(self, row: Mapping[str, Any], seed: int) -> str | Conversation:
        self._opponent, self._opponent_seat = row["opponent"], row["opponent_seat"]
        self._board, self._draws = row["board"], random.Random(seed)
        self._answer()
        return self._read() if self._board != row["board"] else ""  # the prompt has the row's board

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
            return Step(self._read(), fine, info=info)
        won = winner(self._board)
        scores = {seat: 0.0 if not won else 1.0 if seat == won else -1.0 for seat in SEATS}
        if self._opponent:
            del scores[self._opponent_seat]
            (score,) = scores.values()
            results = {"won": score > 0, "drawn": score == 0, "lost": score < 0}
            info |= {f"{self._opponent}_{result}": float(held) for result, held in results.items()}
        return Step("", fine, True, {**info, "seats": scores})

    def _play(self, move: int) -> None:
        self._board = _after(self._board, move)

    def _answer(self) -> None:
        """Make the opponent's move, if the game has one and it is its turn."""
        if mover(self._board) == self._opponent_seat and not over(self._board):
            moves = best_moves(self._board) if self._opponent == "perfect" else free(self._board)
            self._play(self._draws.choice(moves))

    def _read(self) -> Conversation:
        return Conversation([{"role": "user", "content": shown(self._board)}])


def shown(board: str) -> str:
    """Return what the player to move reads."""
    letters = {".": "123456789", mover(board): "abcdefghi"}
    return "".join(letters.get(mark, "rstuvwxyz")[at] for at, mark in enumerate(board)) + "?"


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
