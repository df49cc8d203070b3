"""What an engine says about a token that it read: how likely it was, and which token was the most likely."""

from typing import NamedTuple


class ContextScore(NamedTuple):
    logprob: float  # at temperature 1, of the whole distribution
    best: int
    best_logprob: float
