"""Keeps a running mean of each player's rewards, the baseline of algorithm.advantage = "role_mean".

A player's rewards are compared with its own earlier ones, so a group may have one rollout, and a player whose game is
unfair (who moves second, who hides a card) is not punished for its seat. SPIRAL and prime-rl call it RAE.
"""

from collections.abc import Mapping, Sequence


class RoleMeans:
    def __init__(self, decay: float) -> None:
        """`decay`: the weight of the mean so far, when a reward is added."""
        self._decay = decay
        self._means: dict[str, float] = {}  # by seat; an episode of one player has the seat ""

    def advantages(self, seat: str, rewards: Sequence[float]) -> list[float]:
        """Return each reward less the mean before it, and add it to the mean."""
        found = list[float]()
        for reward in rewards:
            mean = self._means.get(seat, 0.0)
            found.append(reward - mean)
            self._means[seat] = self._decay * mean + (1 - self._decay) * reward
        return found

    @property
    def state(self) -> Mapping[str, float]:
        return dict(self._means)

    @state.setter
    def state(self, means: Mapping[str, float]) -> None:
        self._means = dict(means)
