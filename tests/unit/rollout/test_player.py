"""How a rollout ends: each ending has a name, failures are data, and only a mesh's failure ends the run."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from support.turn_drivers import PROMPT, SAMPLING, Answering, Conversation, Forking, player
from titan_rl.rollout.player import Play
from titan_rl.rollout.session import SessionLimits
from titan_rl.wire.errors import RankDied, RequestRefused
from titan_rl.wire.sessions import DriverLost, Outcome, Session
from titan_rl.wire.types import Completion, Request, Rollout


class By:
    def __init__(self, ends: Callable[[Session], Awaitable[Outcome]]) -> None:
        self.ends = ends

    async def drive(self, session: Session) -> Outcome:
        return await self.ends(session)


def ended(ends: Callable[[Session], Awaitable[Outcome]], **keys: object) -> tuple[Rollout, Answering]:
    engine = Answering()
    return asyncio.run(player(By(ends), engine, **keys).play(Play(id="p", prompt=PROMPT, sampling=SAMPLING))), engine


async def one_turn_then(session: Session, outcome: Outcome | Exception) -> Outcome:
    await session.sample(session.prompt.tokens)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


@pytest.mark.parametrize(
    ("outcome", "status", "error"),
    [
        (ValueError("no such tool"), "error", "ValueError: no such tool"),
        (TimeoutError("the driver's"), "error", "TimeoutError: the driver's"),
        (Outcome("timeout", reward=0.0, error="a tool hung"), "timeout", "a tool hung"),
        (Outcome(reward=float("nan")), "error", "ValueError: expected a finite reward, found nan"),
        (
            Outcome(reward=1.0, metrics={"calls": float("inf")}),
            "error",
            "ValueError: expected a finite calls, found inf",
        ),
        (Outcome(reward=1.0, rewards={"format": cast(Any, "good")}), "error", "TypeError: must be real number"),
        (Outcome(reward=1.0, turn_rewards=[math.nan]), "error", "ValueError: expected a finite turn_rewards[0], found"),
        (RequestRefused("request p:1: token 99 is not in the vocabulary"), "error", "RequestRefused: request p:1: tok"),
    ],
)
def test_a_rollout_that_fails_has_a_status_its_tokens_and_no_reward(
    outcome: Outcome | Exception, status: str, error: str
) -> None:
    rollout, _ = ended(lambda session: one_turn_then(session, outcome))
    assert (rollout.status, rollout.valid, rollout.sampled > 0) == (status, False, True)
    assert rollout.error.startswith(error)


def test_messages_that_no_file_can_hold_cost_nothing_but_themselves() -> None:
    messages = ({"role": "tool", "content": object, ("a",): 1},)
    rollout, _ = ended(lambda session: one_turn_then(session, Outcome(reward=1.0, messages=messages)))
    assert (rollout.reward, rollout.messages) == (1.0, [{"role": "tool", "content": "<class 'object'>"}])
    assert rollout.status == "completed"


async def test_the_first_failure_of_each_kind_is_said() -> None:
    said: list[str] = []
    engine = Answering()

    made = player(By(lambda session: one_turn_then(session, ValueError("no such tool"))), engine, warn=said.append)
    for k in range(3):
        await made.play(Play(id=f"p{k}", prompt=PROMPT, sampling=SAMPLING))
    assert said == ["p0 ended as error: ValueError: no such tool. The metrics stop/* count these"]


def test_a_reward_that_a_driver_gives_is_the_rollouts() -> None:
    rollout, _ = ended(lambda session: one_turn_then(session, Outcome("max_turns", 0.0, {"format": 0.5})))
    assert (rollout.status, rollout.reward, rollout.rewards) == ("max_turns", 0.0, {"format": 0.5})


def test_a_rollout_that_takes_too_long_ends_as_a_timeout() -> None:
    async def hangs(session: Session) -> Outcome:
        await session.sample(session.prompt.tokens)
        await asyncio.Event().wait()
        raise AssertionError

    rollout, _ = ended(hangs, limits=SessionLimits(seconds=0.2))
    assert (rollout.status, rollout.error, rollout.valid) == ("timeout", "the rollout took longer than 0.2 s", False)


@pytest.mark.parametrize("losses", [1, 2])
def test_a_lost_driver_begins_again_from_the_start_with_the_same_seeds(losses: int) -> None:
    begun: list[tuple[str, int]] = []

    async def lost(session: Session) -> Outcome:
        begun.append((session.id, session.seed))
        await session.sample(session.prompt.tokens)
        if len(begun) <= losses:
            raise DriverLost("environment1[e=0] died: exit code 7")
        return Outcome(reward=1.0)

    rollout, engine = ended(lost, attempts=2)
    assert len({id for id, _ in begun}) == len({request.id for request in engine.requests}) == 2, "ids are not reused"
    assert len({seed for _, seed in begun}) == len({request.seeds[0] for request in engine.requests}) == 1
    assert rollout.attempts == 2
    assert engine.said[0] == engine.said[1]
    if losses == 1:
        assert (rollout.status, rollout.reward) == ("completed", 1.0)
    else:
        assert (rollout.status, rollout.error) == ("lost", "DriverLost: environment1[e=0] died: exit code 7")


def test_a_dead_rank_is_no_rollouts_failure() -> None:
    with pytest.raises(RankDied):
        ended(lambda session: one_turn_then(session, RankDied("generator0[tp=0]", "was killed by signal 9")))


def test_a_rollouts_turns_ask_for_the_replica_that_knows_them() -> None:
    engine = Answering()
    play = Play(id="prompt-4.1", prompt=PROMPT, sampling=SAMPLING, sample=1, group="prompt-4", expected=5)
    rollout = asyncio.run(player(Forking(lambda seed: 2), engine).play(play))
    assert [request.id for request in engine.requests] == [f"prompt-4.1:{turn}" for turn in range(3)]
    assert {request.affinity for request in engine.requests} == {("prompt-4.1", "prompt-4")}
    assert [request.expected for request in engine.requests] == [5, 5, 5]
    assert [len(branch.turns) for branch in rollout.branches] == [2, 1]


def test_an_evaluation_is_greedy_and_has_the_same_turns_every_time() -> None:
    async def body() -> tuple[list[Request], Completion]:
        engine = Answering()
        rollout = await player(Conversation(lambda seed: 3), engine).play_for_evaluation(
            PROMPT, replace(SAMPLING, temperature=0.0)
        )
        return engine.requests, rollout.completion

    (requests, completion), again = asyncio.run(body()), asyncio.run(body())
    assert [request.seeds for request in requests] == [[0]] * 3
    assert (requests, completion) == again


async def test_each_turn_of_a_sampled_evaluation_has_noise_of_its_own() -> None:
    engine = Answering()
    play = player(Conversation(lambda seed: 3), engine).play_for_evaluation
    await play(PROMPT, SAMPLING)
    await play(replace(PROMPT, id=PROMPT.id + 1), SAMPLING)
    assert len({tuple(request.seeds) for request in engine.requests}) == 6


def test_a_rollout_without_a_driver_is_that_of_one_that_samples_a_single_turn() -> None:
    class OneTurn:
        async def drive(self, session: Session) -> Outcome:
            await session.sample(session.prompt.tokens)
            return Outcome()

    play = Play(id="p", prompt=PROMPT, sampling=SAMPLING)
    alone, played = (asyncio.run(player(driver, Answering()).play(play)) for driver in (None, OneTurn()))
    assert math.isnan(alone.reward)
    assert math.isnan(played.reward)
    assert replace(alone, reward=0.0) == replace(played, reward=0.0)
