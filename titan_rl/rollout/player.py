"""Plays rollouts: opens a session for each, lets the driver drive it, and returns a Rollout.

    Play ──> session ── driver.drive ──> Outcome ──> Rollout: its branches, a reward if the driver gave one, a status

Failures of a driver are data: the rollout's status. Only a failure of a mesh (RunError) ends the run or is repaired.
"""

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from titan_rl.batch.seats import mean_reward
from titan_rl.record.ledger import Ledger
from titan_rl.rollout.session import RolloutSession, SessionLimits
from titan_rl.wire.deadlines import deadline
from titan_rl.wire.errors import RequestRefused, RunError
from titan_rl.wire.seeds import derive, turn_seed
from titan_rl.wire.sessions import Driver, DriverLost, LimitReached, Outcome
from titan_rl.wire.spans import span
from titan_rl.wire.stop_reasons import FAILED
from titan_rl.wire.types import (
    Branch,
    Cast,
    Completion,
    Decode,
    Generates,
    ImagePlace,
    Opponent,
    Prompt,
    Request,
    Rollout,
    Sampling,
    Turn,
)

MAX_ERROR_CHARACTERS = 200


Casts = Callable[[Prompt], Cast]
"""Chooses who plays against the policy in the episodes of a prompt."""


def no_opponents(prompt: Prompt) -> Cast:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """A rollout to play: number `sample` of its prompt's group, which the run's `seed` seeds."""

    id: str
    prompt: Prompt
    sampling: Sampling
    seed: int = 0
    sample: int = 0
    greedy: bool = False  # for an evaluation: no turn is recorded, and greedy seeds do not matter
    group: str = ""  # the name of what begins with the same tokens
    expected: int = 0  # tokens of a turn
    cast: Cast = field(default_factory=dict)

    def turn_seed(self, turn: int) -> int:
        if self.greedy and not self.sampling.temperature:
            return 0
        return turn_seed(self.seed, self.prompt.id, self.sample, turn)

    @property
    def own_seed(self) -> int:
        return derive(self.seed, "greedy" if self.greedy else "environment", self.prompt.id, self.sample) % 2**31


class Played(NamedTuple):
    """An episode that has ended."""

    name: str
    branches: list[Branch]
    outcome: Outcome
    attempts: int


Guests = Mapping[str, "tuple[Player, Play]"]
"""The players of an episode and their settings, by seat. Other seats are the host's."""
Shares = Callable[["Player", Play], Awaitable[Rollout]]
"""Plays an episode together with other policies."""


DRIVER_ATTEMPTS = 2
"""Attempts at a rollout whose environment process dies and whose turns cannot be replayed."""


class Player:
    def __init__(
        self,
        driver: Driver | None,
        generators: Generates,
        decode: Decode,
        *,
        limits: SessionLimits,
        attempts: int = 1,
        ledger: Ledger | None = None,
        warn: Callable[[str], None] = lambda message: None,
        cast: Casts = no_opponents,
        shares: Shares | None = None,
    ) -> None:
        """Without a `driver`, a rollout is one answer to its prompt. `attempts` of a driver whose process is lost; then
        the rollout's status is "lost". `cast` chooses the opponents in an evaluation. `shares`: episodes are
        played together with other policies."""
        self._driver, self._generators, self._decode = driver, generators, decode
        self._limits, self._attempts, self._ledger, self._warn = limits, attempts, ledger, warn
        self._cast, self._shares = cast, shares
        self._warned: set[str] = set()  # subjects of the warnings so far, each of which is shown once

    async def play_for_evaluation(
        self, prompt: Prompt, sampling: Sampling, *, sample: int = 0, seed: int = 0, set_name: str = ""
    ) -> Rollout:
        """Play a rollout for an evaluation, as wire.sessions.Plays."""
        name = f"greedy-{f'{set_name}-' if set_name else ''}{prompt.id}"
        play = Play(
            id=f"{name}.{sample}" if set_name else name,
            prompt=prompt,
            sampling=sampling,
            seed=seed,
            sample=sample,
            greedy=True,
            group=name if set_name else "",
            cast=self._cast(prompt),
        )
        return await self.play(play)

    @property
    def single(self) -> bool:
        return self._driver is None

    def answered(self, prompt: Prompt, completion: Completion) -> Rollout:
        """Return the rollout of a single turn that has been sampled, as `play` would. A step has one for each of its
        samples, so there is no session."""
        turn = Turn(prompt.tokens, completion, images=prompt.images)
        return Rollout([Branch([turn])], self._decode(completion.tokens), math.nan)

    async def play(self, play: Play) -> Rollout:
        """Play a rollout, together with other policies if it is shared."""
        if self._driver is None:
            return await self._answer(play)
        if self._shares is not None:
            return await self._shares(self, play)
        return self.rollout_of(await self.play_with(play, {}), play.cast)

    async def play_with(self, play: Play, guests: Guests) -> Played:
        """Play an episode. A driver whose process is lost begins again with a new session and the same seeds."""
        assert self._driver is not None
        attempt, session = 1, self._open(play, 1, guests)
        try:
            async with deadline(self._limits.seconds):
                while (outcome := await self._drive(self._driver, session, last=attempt >= self._attempts)) is None:
                    attempt += 1
                    session = self._open(play, attempt, guests)
        except TimeoutError:
            outcome = Outcome("timeout", error=f"the rollout took longer than {self._limits.seconds:g} s")
        finally:
            session.end()
        return Played(session.id, session.branches(outcome.turn_rewards), outcome, attempt)

    async def _answer(self, play: Play) -> Rollout:
        """Sample the single turn of a rollout."""
        expected = min(play.expected, play.sampling.max_new_tokens)
        request = Request(
            play.id,
            play.prompt.tokens,
            [play.turn_seed(0)],
            play.sampling,
            expected=expected,
            images=play.prompt.images,
        )
        try:
            (completion,) = await self._generators.generate(request)
        except RequestRefused as error:
            return self.rollout_of(Played(play.id, [], Outcome("error", error=_named(error)), 1), {})
        return self.answered(play.prompt, completion)

    async def _drive(self, driver: Driver, session: RolloutSession, *, last: bool) -> Outcome | None:
        """Return how a rollout ended; None if its driver was lost and another attempt is left."""
        try:
            return checked(await driver.drive(session))
        except LimitReached as reached:
            return Outcome(reached.status)
        except DriverLost as lost:
            return Outcome("lost", error=_named(lost)) if last else None
        except RequestRefused as error:
            return Outcome("error", error=_named(error))
        except RunError:
            raise
        except Exception as error:
            return Outcome("error", error=_named(error))
        finally:
            session.end()

    def _open(self, play: Play, attempt: int, guests: Guests) -> RolloutSession:
        name = play.id if attempt == 1 else f"{play.id}.{attempt}"

        async def ask(
            turn: int, tokens: list[int], max_tokens: int, seat: str, images: tuple[ImagePlace, ...]
        ) -> Completion:
            player, own = guests.get(seat, (self, play))
            opponent = play.cast.get(seat) if own is play else None
            return await player._sample(own, name, turn, tokens, max_tokens, opponent, images)

        def answered(read: tuple[int, int], turn: Turn) -> None:
            for player, own in [*guests.values()] or [(self, play)]:
                if player._ledger is not None and not play.greedy:
                    opponent = own.cast[turn.seat].name if turn.seat in own.cast else ""
                    player._ledger.turn(play.prompt.id, play.sample, attempt, read, turn, opponent)

        begins = None if "branch" in self._warned else self._warn_of_branch
        settings = {"limits": self._limits, "answered": answered, "begins": begins}
        return RolloutSession(name, play.prompt, play.own_seed, ask, **settings)

    async def _sample(
        self,
        play: Play,
        name: str,
        turn: int,
        tokens: list[int],
        max_tokens: int,
        opponent: Opponent | None,
        images: tuple[ImagePlace, ...],
    ) -> Completion:
        """Sample a turn of the session `name`, by an opponent if that is not the policy."""
        sampling = play.sampling
        if max_tokens < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=max_tokens)
        request = Request(
            f"{name}:{turn}",
            tokens,
            [play.turn_seed(turn)],
            sampling,
            expected=min(play.expected, sampling.max_new_tokens),
            affinity=(name, play.group) if play.group else (name,),
            images=images,
        )
        if opponent is not None:
            request = replace(request, adapter=opponent.adapter, version=opponent.version)
        began = span.now()
        try:
            (completion,) = await self._generators.generate(request)
        finally:
            span.since(began, "turn", lane="rollouts", id=play.own_seed, prompt=play.prompt.id, turn=turn)
        return completion

    def _warn_of_branch(self, message: str) -> None:
        if "branch" not in self._warned:
            self._warned.add("branch")
            self._warn(f"{message}. The metric branches/mean counts them")

    def rollout_of(self, played: Played, cast: Cast) -> Rollout:
        """Return an episode as the policy sees it, whose opponents are `cast`."""
        name, branches, outcome, attempts = played
        last = max((turn for branch in branches for turn in branch.turns), key=lambda turn: turn.index, default=None)
        if any(branch.seat for branch in branches) and not outcome.seats and outcome.status not in FAILED:
            outcome = Outcome("error", error="expected a reward of each player, found none")
        if outcome.status in FAILED and outcome.status not in self._warned:
            self._warned.add(outcome.status)
            self._warn(f"{name} ended as {outcome.status}: {outcome.error}. The metrics stop/* count these")
        if cast and outcome.reward is not None:
            own = mean_reward(reward for seat, reward in outcome.seats.items() if seat not in cast)
            outcome = replace(outcome, reward=None if math.isnan(own) else own)
        failed = outcome.status in FAILED or last is None or outcome.reward is None
        return Rollout(
            branches,
            self._decode(last.completion.tokens) if last else "",
            math.nan if failed else float(outcome.reward or 0.0),
            status=outcome.status,
            rewards=outcome.rewards,
            messages=outcome.messages,
            metrics=outcome.metrics,
            error=outcome.error,
            attempts=attempts,
            feedback=outcome.feedback,
            seats={} if failed else outcome.seats,
            opponents={seat: opponent.name for seat, opponent in cast.items()},
        )


def checked(outcome: Outcome) -> Outcome:
    """Return the outcome of a user's code with messages that JSON can hold. Raise ValueError or TypeError if a number
    is not finite."""
    numbers = {"reward": outcome.reward or 0.0, **outcome.rewards, **outcome.metrics}
    numbers |= {f"turn_rewards[{k}]": reward for k, reward in enumerate(outcome.turn_rewards)}
    numbers |= {f"seats[{seat}]": reward or 0.0 for seat, reward in outcome.seats.items()}
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"expected a finite {name}, found {number}")
    if not outcome.messages:
        return outcome
    return replace(outcome, messages=json.loads(json.dumps(list(outcome.messages), default=repr, skipkeys=True)))


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}"
