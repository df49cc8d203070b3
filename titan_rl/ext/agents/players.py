"""The players of one episode: a policy for each seat, and a reward for each.

    async def rollout(policies, row):                          task.agent: a request's `model` names the seat
        reply = await policies["white"].observe("Your move.")
        ...
        return {"seats": {"white": 1.0, "black": -1.0}}        None: that player is not trained on

    class Game:                                                 players that move in turn
        def to_move(self): ...                                  whose turn it is; the others as in episodes.py

The policy that is trained plays all seats that environment.endpoints does not list (endpoint_seats.py). The ones in
environment.frozen_seats are played, but not trained on.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_rl.batch.seats import mean_reward
from titan_rl.ext.agents.endpoint_seats import EndpointPolicy, SeatEndpoint
from titan_rl.ext.agents.environment_calls import make_environment, offered_by, reset_environment, tools_of
from titan_rl.ext.agents.episodes import EpisodeOver, Step, finite
from titan_rl.ext.agents.play import Bounded, Policy, Score, answer_to
from titan_rl.ext.agents.tools import Toolbox
from titan_rl.tasks.user_code import call_user, shortened
from titan_rl.text.template import Message
from titan_rl.wire.sessions import Outcome, Status
from titan_rl.wire.types import Prompt


@dataclass(frozen=True, slots=True)
class Seats:
    names: tuple[str, ...] = ()  # empty: an episode of one player, without a name
    frozen: frozenset[str] = frozenset()  # and all of endpoints
    endpoints: tuple[SeatEndpoint, ...] = ()


def outcome_of_players(
    result: object, status: Status, moved: Collection[str], seats: Seats, messages: Sequence[Message], name: str
) -> Outcome:
    """Return the outcome that a function means by {"seats": {seat: reward}, **info}. `moved`: the seats that had a
    turn. An episode that a limit ended without a result has reward 0 for all of them."""
    if result is None and status != "completed":
        result = {"seats": dict.fromkeys(seats.names, 0.0)}
    given = result.get("seats") if isinstance(result, Mapping) else None
    if not isinstance(result, Mapping) or not isinstance(given, Mapping):
        expected = f'{{"seats": {{"{seats.names[0]}": reward, ...}}}}'
        raise TypeError(
            f"{name}: expected {expected}, a reward for each of environment.seats, found {shortened(result)}"
        )
    if unknown := [seat for seat in given if seat not in seats.names]:
        raise ValueError(f"{name}: expected rewards of {', '.join(seats.names)}, found one of {unknown[0]!r}")
    if missing := [seat for seat in seats.names if seat in moved and seat not in given and seat not in seats.frozen]:
        raise ValueError(
            f"{name}: expected a reward of {missing[0]}, which had a turn, found none (None: not trained on)"
        )
    rewards: dict[str, float | None] = dict.fromkeys(sorted(seats.frozen))
    for seat, reward in given.items():
        frozen = reward is None or seat in seats.frozen
        rewards[seat] = None if frozen else finite(reward, f"{name}: the reward of {seat}")
    if all(reward is None for reward in rewards.values()):
        raise ValueError(f"{name}: expected a reward of at least one player, found none")
    score = Score(judged=False)
    turns = result.get("turn_rewards", ())
    info = {key: value for key, value in result.items() if key not in ("seats", "reward", "turn_rewards")}
    shown = result.get("reward")
    score.final(mean_reward(rewards.values()) if shown is None else finite(shown, name), info)
    return replace(score.outcome(status, 0, messages), seats=rewards, turn_rewards=turns)


async def play_in_turn(
    make: Callable[..., Any],
    name: str,
    policies: Mapping[str, Policy | EndpointPolicy],
    prompt: Prompt,
    seed: int,
    bounded: Bounded,
    args: Mapping[str, Any],
) -> tuple[dict[str, Any], Status]:
    """Play an episode in the environment that `make` returns, whose `to_move()` is the seat, by name or number, that
    reads the next observation and replies. A step's reward is the mover's; "seats" in the last info are rewards of the
    end, by the same names or numbers."""
    seats = [*policies]
    rewards, metrics, turns = dict.fromkeys(seats, 0.0), defaultdict[str, float](float), list[float]()
    offered = offered_by(
        prompt.row,
        prompt.text,
        prompt.answer,
        seed,
        prompt.messages,
        prompt.id,
        seats,
    )
    environment, tools = await bounded(make_environment(make, name, offered, args)), Toolbox(())
    try:
        step = Step(await bounded(reset_environment(environment, name, offered)))
        tools = Toolbox(tools_of(environment))
        while not step.done:
            seat = _seat(await bounded(call_user(environment.to_move)), seats, f"{name}.to_move")
            reply = await policies[seat].observe(step.observation, tools.schemas)
            step = await bounded(answer_to(environment, tools, reply, name))
            rewards[seat] += step.reward or 0.0
            if isinstance(policies[seat], Policy):
                turns.append(step.reward or 0.0)
            for key, value in step.info.items():
                if key != "seats" and isinstance(value, int | float):
                    metrics[key] += finite(value, f"info {key}")
            for key, reward in (step.info.get("seats") or {}).items():
                rewards[_seat(key, seats, f"{name}: seats")] += finite(reward, f"{name}: the reward of {key}")
        status = step.status
    except EpisodeOver as over:
        status = over.status
    finally:
        if hasattr(environment, "close"):
            await bounded(call_user(environment.close))
    earned = {seat: reward for seat, reward in rewards.items() if policies[seat].turns} or rewards
    return {"seats": earned, "turn_rewards": turns, **metrics, **tools.metrics()}, status


def _seat(found: Any, seats: Sequence[str], name: str) -> str:
    """Return the seat that an environment names, or numbers."""
    text = str(found)
    if text in seats:
        return text
    if text.isdecimal() and int(text) < len(seats):
        return seats[int(text)]
    raise ValueError(f"{name}: expected one of {', '.join(seats)}, or its number, found {found!r}")
