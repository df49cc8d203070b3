"""Splits episodes of several players into groups of one player each.

    game 0: white +1, black -1            prompt 7, white: +1 -1 ...
    game 1: white -1, black +1     ──>    prompt 7, black: -1 +1 ...

Baselines, masks, denominators and minibatches know groups only, so a player is compared with itself, in other games of
the same prompt. A player without a reward is frozen: none of the groups has its turns.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from titan_rl.wire.types import Group, Rollout, Sample

SEATED = 2**40
"""Numbers of groups of one player are at least this. The other groups have their prompts' ids."""
MOST_SEATS = 64


def seat_groups(groups: Iterable[Group]) -> list[Group]:
    """Return the groups that are trained on: for a group of episodes of several players one for each trained player."""
    return [each for group in groups for each in _of_players(group)]


def with_seats(groups: Sequence[Group], trained: Sequence[Group], samples: Sequence[Sample]) -> list[Group]:
    """Return the groups with the advantage of each rollout, as the mean over its players' tokens, and with the digests
    of the tokens under the masks of its `samples`. `trained`: the groups of the players, with their advantages."""
    by_sequence = defaultdict[int, list[Sample]](list)
    for sample in samples:
        by_sequence[sample.sequence].append(sample)
    remaining = iter(trained)
    players = [[next(remaining) for _ in _players(group)] for group in groups]
    return [_merged(group, own, by_sequence) for group, own in zip(groups, players, strict=True)]


def _digest(samples: Iterable[Sample]) -> str:
    """Return the digest of the tokens under the samples' masks."""
    return tokens_digest(np.asarray(sample.tokens)[np.asarray(sample.mask) > 0] for sample in samples)


def tokens_digest(tokens: Iterable[Sequence[int] | np.ndarray]) -> str:
    """Return a checksum of tokens, however they are divided into parts."""
    crc = 0
    for part in tokens:
        crc = zlib.crc32(np.asarray(part, np.int64).tobytes(), crc)
    return f"{crc:08x}"


def mean_reward(seats: Iterable[float | None]) -> float:
    """Return the mean over the trained players; NaN if there is none."""
    rewards = [reward for reward in seats if reward is not None]
    return math.fsum(rewards) / len(rewards) if rewards else math.nan


def _players(group: Group) -> list[str]:
    """Return the seats that are trained; "" for a group of one player. Opponents' are not."""
    if not any(rollout.seats for rollout in group.rollouts):
        return [""]
    own = [(seat, reward) for r in group.rollouts for seat, reward in r.seats.items() if seat not in r.opponents]
    return sorted({seat for seat, reward in own if reward is not None})


def _of_players(group: Group) -> list[Group]:
    players = _players(group)
    if players == [""]:
        return [group]
    return [
        replace(
            group,
            rollouts=[_of_player(rollout, seat) for rollout in group.rollouts],
            seat=seat,
            number=SEATED + group.prompt.id * MOST_SEATS + i,
        )
        for i, seat in enumerate(players)
    ]


def _of_player(rollout: Rollout, seat: str) -> Rollout:
    """Return a rollout as a player's own: invalid if the player never moved."""
    branches, reward = [branch for branch in rollout.branches if branch.seat == seat], rollout.seats.get(seat)
    return replace(
        rollout,
        branches=branches,
        reward=reward if reward is not None and branches else math.nan,
    )


def _merged(group: Group, players: Sequence[Group], by_sequence: dict[int, list[Sample]]) -> Group:
    if len(players) == 1 and not players[0].seat:
        return players[0]
    rollouts = list[Rollout]()
    for k, rollout in enumerate(group.rollouts):
        own = [player.rollouts[k] for player in players]
        sampled = sum(each.sampled for each in own)
        advantage = sum(each.advantage * each.sampled for each in own) / max(sampled, 1)
        trained = {player.seat: _digest(by_sequence[player.sequence(k)]) for player in players}
        rollouts.append(replace(rollout, advantage=advantage, trained=trained))
    return replace(group, rollouts=rollouts)
