"""Engines that answer turns, and drivers of rollouts with several of them."""

import asyncio
import random
from collections.abc import Callable

from titan_rl.rollout.player import Player
from titan_rl.rollout.session import SessionLimits
from titan_rl.wire.sessions import Driver, Outcome, Session
from titan_rl.wire.types import Completion, Generates, Prompt, Request, Sampling

EOS, TOOL = 2, 60
PROMPT = Prompt(4, "1+1=", [1, 8, 9], "20")


class Answering:
    """Answers each request from its own seed, and remembers contexts and answers."""

    def __init__(self, most: int = 6, vocabulary: int = 3) -> None:
        self.most, self.vocabulary = most, vocabulary  # few tokens: different turns often sample the same
        self.requests: list[Request] = []
        self.said: list[tuple[list[int], list[int]]] = []
        self.version = 0

    async def generate(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        draw = random.Random(request.seeds[0])
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
        return [self.completion(request, seed) for seed in request.seeds]

    def completion(self, request: Request, seed: int) -> Completion:
        draw = random.Random(seed)
        n, stops = draw.randint(1, self.most), draw.random() < 0.7
        n = min(n, request.sampling.max_new_tokens)
        tokens = [draw.randrange(10, 10 + self.vocabulary) for _ in range(n - stops)] + [EOS] * stops
        self.said.append((list(request.tokens), tokens))
        finish = "stop" if stops else "length"
        return Completion(tokens, [-0.5] * n, [self.version] * n, finish)


class Conversation:
    """Answers every turn of the policy with one token of a tool, which is never trained on. The reward is the share of
    turns that ended with EOS."""

    def __init__(self, turns: Callable[[int], int] = lambda seed: 1 + seed % 3) -> None:
        self.turns = turns
        self.begun: list[tuple[str, int]] = []  # id and seed of each session

    async def drive(self, session: Session) -> Outcome:
        self.begun.append((session.id, session.seed))
        tokens, ended = list(session.prompt.tokens), []
        turns = self.turns(session.seed)
        for _ in range(turns):
            completion = await session.sample(tokens)
            ended.append(float(completion.finish == "stop"))
            tokens += [*completion.tokens, TOOL]
        return Outcome(reward=sum(ended) / turns, turn_rewards=ended, messages=({"role": "user", "content": "hm"},))


class Forking(Conversation):
    """Forgets all but the prompt after its second turn, as an agent does that writes itself a summary."""

    async def drive(self, session: Session) -> Outcome:
        outcome = await super().drive(session)
        await session.sample([*session.prompt.tokens, TOOL, TOOL])
        return outcome


def player(driver: Driver | None, engine: Generates, **keys: object) -> Player:
    settings: dict[str, object] = {"limits": SessionLimits(), **keys}
    return Player(driver, engine, lambda tokens: " ".join(map(str, tokens)), **settings)  # type: ignore[arg-type]


SAMPLING = Sampling(8, stop_token_ids=(EOS,))
