"""Kuhn poker, the smallest game in which bluffing is right: three cards, one chip each in the pot, one to bet.

    first: pass or bet; second: pass or bet; after pass and bet, first once more

A bet is answered with a bet (call) or a pass (fold). A player reads its seat, its card and what the other did: "1q",
then "b" after a pass that was answered with a bet. Letters from n to z bet, everything else passes, so that random
weights play at random.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

SEATS = ("first", "second")
CARDS = "jqk"  # the lowest first
DEALS = [*permutations(CARDS, 2)]
ENDS = ("pp", "pbp", "pbb", "bp", "bb")
ROWS = 6000


def deals(seed: int, eval_size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows to train on, and to evaluate on: each deal equally often."""
    dealt = ("".join(DEALS[n % len(DEALS)]) for n in range(ROWS))
    rows = [
        {
            "question": "",
            "answer": cards,
            "cards": cards,
            "hand": n,
        }
        for n, cards in enumerate(dealt)
    ]
    return rows[eval_size:], rows[:eval_size]


async def play(policies: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Play a hand, as a rollout function of environment.seats = ["first", "second"]."""
    moves = ""
    while moves not in ENDS:
        number = len(moves) % 2
        seen = f"{number + 1}{row['cards'][number]}{moves}" if len(moves) < 2 else moves[-1]
        reply = await policies[SEATS[number]].observe(seen)
        moves += move_of(reply.text)
    won = payoff(row["cards"], moves)
    return {"seats": dict(zip(SEATS, (won, -won), strict=True)), "bets": moves.count("b")}


def move_of(text: str) -> str:
    """Return the move that a reply means: "b" for a bet, "p" for a pass."""
    return "b" if "n" <= text[:1] <= "z" else "p"


def payoff(cards: Sequence[str], moves: str) -> float:
    """Return the chips that the first player wins."""
    if moves.endswith("bp"):
        return 1.0 if len(moves) == 2 else -1.0  # who bet wins the other's first chip
    better = CARDS.index(cards[0]) > CARDS.index(cards[1])
    return (2.0 if moves.endswith("bb") else 1.0) * (1 if better else -1)
