"""Policies that play the same episodes: each is played once, in any order of requests."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from titan_rl.config.toml import load
from titan_rl.ext.policies.checks import check_policies
from titan_rl.ext.policies.shared_episodes import Table
from titan_rl.rollout.player import Play, Played, Player
from titan_rl.wire.errors import DeadlinePassed
from titan_rl.wire.sessions import Outcome
from titan_rl.wire.types import Branch, Cast, Completion, Prompt, Rollout, Sampling, Turn

NAMES = ["black", "white", "grey"]


class Seated(Player):
    """A player whose episodes have a turn of each seat, at its own pace."""

    def __init__(self, name: str, draws: random.Random, played: Counter[str]) -> None:
        self._name, self._draws, self._played = name, draws, played
        self._warned = set()
        self._decode = str

    async def play_with(self, play: Play, guests: Any) -> Played:
        assert [*sorted(guests)] == sorted(NAMES)
        assert all(own.id == play.id and name not in own.cast for name, (_, own) in guests.items())
        self._played[play.id] += 1
        await asyncio.sleep(self._draws.random() / 100)
        turns = [Turn([1], Completion([2], [0.0], [0], "stop"), 0.0, i, name) for i, name in enumerate(NAMES)]
        rewards = {name: float(i) for i, name in enumerate(NAMES)}
        return Played(play.id, [Branch([turn]) for turn in turns], Outcome(reward=1.0, seats=rewards), 1)


def play_of(id: int) -> Play:
    return Play(id=f"prompt-{id}", prompt=Prompt(id, "", [1], ""), sampling=Sampling(1))


@pytest.mark.parametrize("seed", range(6))
def test_each_episode_is_played_once_and_seen_by_each_as_its_own(seed: int) -> None:
    draws, played = random.Random(seed), Counter[str]()
    table = Table(NAMES, 5.0)
    players = {name: Seated(name, draws, played) for name in NAMES}

    async def of_policy(name: str) -> list[Rollout]:
        found = list[Rollout]()
        for step in range(3):
            await asyncio.sleep(draws.random() / 50)
            ids = draws.sample(range(8 * step, 8 * step + 8), 8)
            found += await asyncio.gather(*(table.play(name, players[name], play_of(id)) for id in ids))
        return found

    async def all_of() -> list[list[Rollout]]:
        return await asyncio.gather(*map(of_policy, NAMES))

    for name, rollouts in zip(NAMES, asyncio.run(all_of()), strict=True):
        assert len(rollouts) == 24
        for rollout in rollouts:
            assert rollout.opponents == {other: other for other in NAMES if other != name}
            assert rollout.reward == float(NAMES.index(name))
    assert set(played.values()) == {1}
    assert len(played) == 24


def test_a_policy_that_does_not_come_is_named() -> None:
    table = Table(NAMES, 0.05)
    players = {name: Seated(name, random.Random(0), Counter()) for name in NAMES}

    async def two() -> None:
        await asyncio.gather(*(table.play(name, players[name], play_of(0)) for name in NAMES[:2]))

    with pytest.raises(DeadlinePassed, match=r"policy (black|white) waits for grey to play prompt-0"):
        asyncio.run(two())


def test_a_rollout_without_other_policies_has_no_opponents() -> None:
    player = Seated("white", random.Random(0), Counter())
    cast: Cast = {}
    assert player.rollout_of(Played("p", [], Outcome(), 1), cast).opponents == {}


TOGETHER = """
base = "kuhn_llama"
lora = {rank = 8, sync = "adapter"}
placement.kind = "disaggregated"
[policies.first.optimizer]
lr = 1e-3
[policies.second.optimizer]
lr = 1e-3
"""


def problems_with(tmp_path: Path, more: str) -> list[str]:
    (path := tmp_path / "two.toml").write_text(TOGETHER + more)
    return list(check_policies({name: load(path, policy=name) for name in ("first", "second")}))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("", ""),
        ("[policies.second.training]\nsteps = 9\n", "training.steps: expected the same for all policies"),
        ("[policies.second.rollout]\ngroup_size = 4\n", "rollout: expected the same for all policies"),
        ('[model]\nvision = "frozen"\n', 'model.vision: expected "none" of a run with [policies]'),
        ("[policies.second.debug]\nseed = 4\n", "debug.seed: expected the same for all policies"),
        ("[policies.first.algorithm]\ndynamic_sampling = true\n", "algorithm.dynamic_sampling: expected none of"),
        ('[environment]\nseats = ["first", "third"]\n', "environment.seats: expected the policies first, second"),
    ],
)
def test_what_cannot_be_played_together_is_refused(more: str, message: str, tmp_path: Path) -> None:
    found = problems_with(tmp_path, more)
    assert any(message in line for line in found) if message else not found
