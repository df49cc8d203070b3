"""What a strategy in Kuhn poker is worth, and how much better two players would do who know it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from titan_rl.ext.agents import kuhn

Strategy = Mapping[str, float]
"""Probability of a bet, by what a player knows: its card and the moves so far, as "jp"."""


def value(first: Strategy, second: Strategy) -> float:
    """Return the chips that the first player wins on average."""

    def after(cards: Sequence[str], moves: str) -> float:
        if moves in kuhn.ENDS:
            return kuhn.payoff(cards, moves)
        number = len(moves) % 2
        bets = (first, second)[number][cards[number] + moves]
        return bets * after(cards, moves + "b") + (1 - bets) * after(cards, moves + "p")

    return sum(after(cards, "") for cards in kuhn.DEALS) / len(kuhn.DEALS)


def pure_strategies(seat: str) -> list[Strategy]:
    """Return all strategies of a seat without chance: one of them is the best reply to any strategy."""
    known = [card + moves for card in kuhn.CARDS for moves in (("", "pb") if seat == "first" else ("p", "b"))]
    return [dict(zip(known, bets, strict=True)) for bets in product((0.0, 1.0), repeat=len(known))]


def exploitability(strategy: Strategy) -> float:
    """Return the mean over both seats of what a best reply to the strategy wins more than an equilibrium would."""
    first = max(value(reply, strategy) for reply in pure_strategies("first"))
    second = max(-value(strategy, reply) for reply in pure_strategies("second"))
    return (first + second) / 2


def played(moves_of: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Return the strategy of played hands, each (cards, moves). What never happened counts as a pass."""
    bets, times = Counter[str](), Counter[str]()
    for cards, moves in moves_of:
        for at, move in enumerate(moves):
            known = cards[at % 2] + moves[:at]
            times[known] += 1
            bets[known] += move == "b"
    every = [known for seat in kuhn.SEATS for known in pure_strategies(seat)[0]]
    return {known: bets[known] / max(times[known], 1) for known in every}
