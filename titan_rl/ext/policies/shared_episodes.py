"""Episodes that several policies play together: each plays the seat of its name, and learns from its own turns.

    white's controller ── play(prompt-7.0) ──┐                    ┌── the rollout, in which black is an opponent
                                             ├── one episode ─────┤
    black's controller ── play(prompt-7.0) ──┘                    └── the rollout, in which white is an opponent

The policies have the same prompts in the same order, so that all ask for the same episodes, each of which is played
once. A seat's turns are sampled by its policy's version, settings and seeds, and are in the ledgers of all.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from titan_rl.rollout.player import Play, Played, Player
from titan_rl.wire.deadlines import deadline
from titan_rl.wire.errors import DeadlinePassed
from titan_rl.wire.types import Opponent, Rollout


@dataclass(slots=True)
class Asked:
    """An episode for which some of the policies have asked."""

    players: dict[str, tuple[Player, Play]] = field(default_factory=dict)  # by policy
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    playing: asyncio.Task[Played] | None = None


class Table:
    def __init__(self, names: Sequence[str], seconds: float) -> None:
        """`seconds`: how long a policy waits until all others ask for its episode."""
        self._names, self._seconds = list(names), seconds
        self._asked: dict[str, Asked] = {}  # by the episode's id

    async def play(self, name: str, player: Player, play: Play) -> Rollout:
        """Play an episode together, and return it as the policy `name` sees it."""
        others = {other: Opponent(other, "", 0) for other in self._names if other != name}
        play = replace(play, cast=others)
        asked = self._asked.setdefault(play.id, Asked())
        asked.players[name] = player, play
        if len(asked.players) == len(self._names):
            del self._asked[play.id]
            host, its_play = asked.players[self._names[0]]
            asked.playing = asyncio.create_task(host.play_with(its_play, asked.players))
            asked.complete.set()
        try:
            async with deadline(self._seconds):
                await asked.complete.wait()
        except TimeoutError:
            missing = ", ".join(other for other in self._names if other not in asked.players)
            raise DeadlinePassed(
                f"policy {name} waits for {missing} to play {play.id}",
                f"It waited {self._seconds:g} s. If this is slow rather than stuck, raise rollout.timeout_seconds.",
            ) from None
        assert asked.playing is not None
        try:
            return player.rollout_of(await asyncio.shield(asked.playing), play.cast)
        except asyncio.CancelledError:
            asked.playing.cancel()  # a stop, which is all policies' own
            raise
