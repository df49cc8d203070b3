"""Rollouts are placed, moved and replayed; on loops of this process."""

import asyncio
import gc
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.environment_meshes import Scripted, scripted
from support.fake_environments import fake_environments
from support.odd_environments import TURNS
from support.played import LIMITS, prompt_of
from titan_rl.ext.agents.episode_news import Answer
from titan_rl.ext.agents.episodes import Reply
from titan_rl.record.ledger import Ledger
from titan_rl.rollout.player import Play, Player
from titan_rl.rollout.session import SessionLimits
from titan_rl.wire.errors import RunError
from titan_rl.wire.sessions import ContextOverflow, DriverLost
from titan_rl.wire.types import Completion, ImagePlace, Request, Sampling, Turn

pytestmark = pytest.mark.usefixtures("no_ranks", "ended_loops")

ODD, UNRULY = "support.odd_environments:Odd", "support.lookalikes:Unruly"


class Moody:
    """Asks something else each time it is made."""

    made = 0

    def reset(self) -> str:
        type(self).made += 1
        return str(self.made)

    def step(self, reply: Reply) -> tuple[str, float, bool, dict[str, Any]]:
        return "0", 1.0, False, {}


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.01)


class Gated(Scripted):
    """A session whose policy waits for the test."""

    def __init__(self, session: Scripted) -> None:
        super().__init__(session.prompt, order=session.order)
        self.open = asyncio.Event()

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        seat: str = "",
        images: Sequence[ImagePlace] = (),
    ) -> Completion:
        completion = await super().sample(tokens, max_new_tokens=max_new_tokens)
        await self.open.wait()
        return completion


async def test_rollouts_are_spread_and_wait_for_a_place_in_their_order(tmp_path: Path) -> None:
    mesh, _, _ = await fake_environments(ODD, tmp_path, LIMITS, concurrency=2)
    sessions = [Gated(each) for each in scripted([{}] * 6)]
    driven = [asyncio.create_task(mesh.drive(each)) for each in sessions]
    await until(lambda: sum(len(each.asked) for each in sessions) == 4)
    assert [process.load for process in mesh.processes] == [2, 2]
    assert [bool(each.asked) for each in sessions] == [True] * 4 + [False] * 2
    sessions[1].open.set()
    await until(lambda: bool(sessions[4].asked))
    assert not sessions[5].asked
    for each in sessions:
        each.open.set()
    assert [outcome.status for outcome in await asyncio.gather(*driven)] == ["completed"] * 6
    assert [process.load for process in mesh.processes] == [0, 0]
    await mesh.close()


async def test_a_turn_that_is_sampled_while_its_process_dies_is_not_sampled_again(tmp_path: Path) -> None:
    mesh, ranks, said = await fake_environments(ODD, tmp_path, LIMITS)
    sessions = [Gated(each) for each in scripted([{}] * 4)]
    driven = [asyncio.create_task(mesh.drive(each)) for each in sessions]
    await until(lambda: all(each.asked for each in sessions))
    ranks[0].die()
    await until(lambda: any("is back" in line for line in said))
    for each in sessions:
        each.open.set()
    assert [outcome.reward for outcome in await asyncio.gather(*driven)] == [1.0] * 4
    assert [len(each.asked) for each in sessions] == [TURNS] * 4
    assert [process.state for process in mesh.processes] == ["serving"] * 2
    await mesh.close()


async def test_a_rollout_that_ends_its_other_python_is_found_and_the_others_are_played(tmp_path: Path) -> None:
    mesh, ranks, said = await fake_environments(UNRULY, tmp_path, LIMITS, python=sys.executable)
    does = ["nothing", "nothing", "exit", "nothing"]
    sessions = scripted([{"does": each} for each in does])
    outcomes = await asyncio.gather(*(mesh.drive(session) for session in sessions))
    assert [outcome.status for outcome in outcomes] == ["completed", "completed", "lost", "completed"]
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, None, 1.0]
    assert len(ranks) > 2, "the process was not replaced"
    assert any("environment.python ended with exit code 7" in line for line in said), said
    await mesh.close()


async def test_an_environment_that_asks_something_else_begins_from_scratch(tmp_path: Path) -> None:
    mesh, ranks, _ = await fake_environments(f"{__name__}:Moody", tmp_path, LIMITS, processes=1)
    session = Gated(scripted([{}])[0])
    driven = asyncio.create_task(mesh.drive(session))
    await until(lambda: bool(session.asked))
    ranks[0].die()
    session.open.set()
    with pytest.raises(DriverLost, match="turn 0 differs when it is replayed"):
        await driven
    await mesh.close()


async def test_a_session_that_has_no_room_ends_the_rollout_with_what_it_has_earned(tmp_path: Path) -> None:
    class Full(Scripted):
        async def sample(
            self,
            tokens: Sequence[int],
            *,
            max_new_tokens: int | None = None,
            seat: str = "",
            images: Sequence[ImagePlace] = (),
        ) -> Completion:
            if len(self.asked) == 2:
                raise ContextOverflow("no room")
            return await super().sample(tokens, max_new_tokens=max_new_tokens)

    mesh, _, _ = await fake_environments(ODD, tmp_path, LIMITS)
    (session,) = scripted([{}])
    outcome = await mesh.drive(Full(session.prompt))
    assert (outcome.status, outcome.reward, len(outcome.turn_rewards)) == ("context_overflow", 0.0, 2)
    await mesh.close()


async def test_a_failing_session_frees_its_place_and_ends_the_users_code(tmp_path: Path) -> None:
    class Broken(Scripted):
        async def sample(
            self,
            tokens: Sequence[int],
            *,
            max_new_tokens: int | None = None,
            seat: str = "",
            images: Sequence[ImagePlace] = (),
        ) -> Completion:
            raise RunError("the generators are gone")

    mesh, _, _ = await fake_environments(ODD, tmp_path, LIMITS, processes=1)
    with pytest.raises(RunError, match="the generators are gone"):
        await mesh.drive(Broken(scripted([{}])[0].prompt))
    while await mesh.running():
        await asyncio.sleep(0.01)
    assert mesh.processes[0].load == 0
    await mesh.close()
    with pytest.raises(RunError, match="the environments are closed"):
        await mesh.drive(scripted([{}])[0])


async def test_lockstep_waits_for_rollouts_that_move(tmp_path: Path) -> None:
    """The turns of a step are sampled together, also after a death: batches, and so bits, are the same."""

    async def orders(kill: bool) -> list[tuple[int, int]]:
        mesh, ranks, said = await fake_environments(ODD, tmp_path, LIMITS, concurrency=4, lockstep=True)
        sessions = scripted([{}] * 8, seconds=0.1)
        driven = [asyncio.create_task(mesh.drive(each)) for each in sessions]
        await until(lambda: len(sessions[0].order) == 8)
        if kill:
            ranks[1].die()
        assert [outcome.status for outcome in await asyncio.gather(*driven)] == ["completed"] * 8
        assert bool(said) == kill
        await mesh.close()
        return sessions[0].order

    expected = [(id, turn) for turn in range(TURNS) for id in range(8)]
    assert await orders(kill=False) == expected
    moved = await orders(kill=True)
    assert [sorted(moved[i : i + 8]) for i in (0, 8, 16)] == [sorted(expected[i : i + 8]) for i in (0, 8, 16)]
    assert moved == expected, "requests enter in another order"


async def test_a_rollout_that_has_ended_leaves_nothing_for_the_garbage_collector(tmp_path: Path) -> None:
    """A cycle would keep its tokens until the oldest objects are collected, which is rare in a run."""

    class Engine:
        async def generate(self, request: Request) -> list[Completion]:
            await asyncio.sleep(0.001)
            return [Completion([8, 2], [-0.5] * 2, [0] * 2, "stop")]

    mesh, _, _ = await fake_environments(ODD, tmp_path, LIMITS)
    limits = SessionLimits(context=1000, seconds=60)
    player = Player(mesh, Engine(), lambda _: "", limits=limits, ledger=Ledger(tmp_path))

    async def some(first: int) -> None:
        plays = [Play(id=f"p{first + n}", prompt=prompt_of("7=", {}, n), sampling=Sampling(4)) for n in range(8)]
        rollouts = await asyncio.gather(*map(player.play, plays))
        assert [rollout.status for rollout in rollouts] == ["completed"] * 8

    await some(0)
    gc.collect()
    gc.disable()
    try:
        await some(8)
        await asyncio.sleep(0.05)  # for what the last message to the process still refers to
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, Completion | Turn | Answer | asyncio.Timeout)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    await mesh.close()
