"""Turns on the real routing: they stay with the replica that knows them, and a lost one costs the turn in flight."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.fake_engines import FakeEngine, fake_mesh
from support.turn_drivers import SAMPLING, Answering, Conversation, player
from titan_rl.actors.vllm.engine import Done
from titan_rl.rollout.player import Play
from titan_rl.wire.errors import RankDied
from titan_rl.wire.spans import span
from titan_rl.wire.types import Prompt, Request, Rollout

pytestmark = pytest.mark.usefixtures("no_ranks")

ROLLOUTS, TURNS = 6, 4
LONG = Prompt(4, "", [1] * 200, "")  # worth more to a replica than all other turns


class Talking(FakeEngine):
    """Answers at once; from its `mute` request on, never."""

    def __init__(self, mute: int = 1 << 62) -> None:
        super().__init__()
        self.mute = mute

    async def do_submit(self, requests: list[Request], withdrawn: Sequence[str]) -> None:
        for request in requests:
            self.requests.append(request)
            if len(self.requests) <= self.mute:
                said = [Answering().completion(request, seed) for seed in request.seeds]
                self.done.put_nowait(Done(request.id, said))


def played(folder: Path, mute: int = 1 << 62) -> tuple[list[Rollout], list[Talking]]:
    """Play rollouts on two replicas; the second is lost once it is mute."""

    async def body() -> tuple[list[Rollout], list[Talking]]:
        async def catch_up(_: object) -> None: ...

        engines = [Talking(), Talking(mute)]
        mesh = fake_mesh(engines, folder, max_restarts=0, seconds=60, hang_seconds=60)
        await mesh.start()
        mesh.tend(catch_up, lambda _: None)
        await mesh.pull(0)
        plays = [Play(id=f"prompt-4.{k}", prompt=LONG, sampling=SAMPLING, seed=3, sample=k) for k in range(ROLLOUTS)]
        rollouts = asyncio.gather(*map(player(Conversation(lambda seed: TURNS), mesh).play, plays))
        if mute < 1 << 62:
            while len(engines[1].requests) <= mute:
                await asyncio.sleep(0.01)
            engines[1].dead.set_exception(RankDied("generator1[tp=0]", "was killed by signal 9"))
        return await asyncio.wait_for(rollouts, 60), engines

    return asyncio.run(body())


def test_a_rollout_stays_with_its_replica(tmp_path: Path) -> None:
    span.take()
    rollouts, engines = played(tmp_path)
    homes = defaultdict[str, set[int]](set)
    for replica, engine in enumerate(engines):
        for request in engine.requests:
            homes[request.affinity[0]].add(replica)
    assert sorted(map(sorted, homes.values())) == [[0]] * (ROLLOUTS // 2) + [[1]] * (ROLLOUTS // 2)
    assert all(len(rollout.turns) == TURNS for rollout in rollouts)
    turns = [each for each in span.take().spans if each.name == "turn"]
    assert len(turns) == ROLLOUTS * TURNS
    assert len({each.id for each in turns}) == ROLLOUTS, "a track of the timeline for each rollout"


@pytest.mark.parametrize("mute", [0, 4, 7])
def test_a_lost_replica_costs_the_turns_in_flight_only(tmp_path: Path, mute: int) -> None:
    (tmp_path / "calm").mkdir()
    calm, undisturbed = played(tmp_path / "calm")
    rollouts, engines = played(tmp_path, mute)
    assert rollouts == calm, "the same tokens from the same seeds"
    turns = {each.id: (each.tokens, each.seeds) for engine in undisturbed for each in engine.requests}
    assert len(turns) == ROLLOUTS * TURNS
    again = [request for request in engines[0].requests if "~" in request.id]
    assert 1 <= len(again) <= ROLLOUTS // 2, "at most one turn of each rollout that the other had"
    for request in again:
        assert (request.tokens, request.seeds) == turns[request.id.partition("~")[0]]
    others = [request.id for request in (*engines[0].requests, *engines[1].requests[:mute]) if "~" not in request.id]
    assert len(others) == len(set(others)), "no other turn is sampled twice"
    assert {*others, *(request.id.partition("~")[0] for request in again)} == turns.keys()
