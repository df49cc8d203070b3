"""Rollouts behind an endpoint, sampled as the controller does, and requests to it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from support.chat_folders import chat_folder
from support.played import LIMITS
from titan_rl.ext.agents.agent_session import AgentSession
from titan_rl.ext.agents.conversation import ChatText, Delta, PlainText, Renderer
from titan_rl.ext.agents.episode_news import PROMPT, Contexts
from titan_rl.ext.agents.episodes import EpisodeOver, Limits
from titan_rl.ext.agents.openai_endpoint import OpenAIEndpoint
from titan_rl.ext.agents.play import Sampled
from titan_rl.rollout.session import Images, RolloutSession, SessionLimits
from titan_rl.text import tokenizer as characters
from titan_rl.text.template import ChatSettings
from titan_rl.text.tokenizer import OWN_CHAT, TextTokenizer
from titan_rl.wire.sessions import LimitReached
from titan_rl.wire.types import Completion, ImagePlace, Prompt

USER = {"role": "user", "content": "Hello"}


def chatting(folder: Path, template: str = "hermes", settings: ChatSettings = OWN_CHAT) -> ChatText:
    return ChatText(TextTokenizer.load(chat_folder(folder, template), settings))


def writing(folder: Path) -> PlainText:
    characters.build(folder)
    return PlainText(TextTokenizer.load(folder))


class AgentRollout:
    """A rollout whose policy samples `answers(context)`."""

    def __init__(
        self,
        renderer: Renderer,
        answers: Callable[[list[int]], list[int]],
        limits: Limits = LIMITS,
        *,
        room: SessionLimits | None = None,
    ) -> None:
        chat, tokenizer = renderer.chat, renderer.tokenizer
        tokens = chat.prompt([USER]) if chat is not None else tokenizer.prompt("7=", "plain")
        prompt = Prompt(0, "Hello" if chat is not None else "7=", tokens, "")
        self.engine: list[tuple[list[int], list[int]]] = []  # contexts and samples
        self.shown: list[list[ImagePlace]] = []  # the images of each context
        self.asked = self.cancelled = 0
        self.gate = asyncio.Event()  # open, unless a test closes it
        self.gate.set()
        self.recorded = RolloutSession("rollout", prompt, 0, self._complete, limits=room or SessionLimits())
        self.session = AgentSession(prompt, renderer, limits, self._ask)
        self._answers, self._contexts = answers, Contexts(tokens)

    async def _ask(
        self, delta: Delta, most: int | None, *, after: int | None = None, logprobs: bool = False
    ) -> Sampled:
        turn, self.asked = self.asked, self.asked + 1
        line = self._contexts.open(PROMPT if after is None else after, *delta)
        self.shown.append(list(line.images))
        try:
            await self.gate.wait()
            completion = await self.recorded.sample(line.tokens, max_new_tokens=most, images=line.images)
        except BaseException as error:
            self._contexts.close(line)
            self.cancelled += isinstance(error, asyncio.CancelledError)
            if isinstance(error, LimitReached):
                raise EpisodeOver(error.status) from error
            raise
        self._contexts.close(line, turn, completion.tokens)
        return Sampled(completion.tokens, completion.finish, turn, completion.logprobs if logprobs else ())

    async def _complete(self, turn: int, context: list[int], most: int, seat: str, images: Images) -> Completion:
        await asyncio.sleep(0)
        said = self._answers(context)
        tokens = said[:most]
        self.engine.append((context, tokens))
        finish = "length" if len(tokens) < len(said) else "stop"
        return Completion(tokens, [-0.5] * len(tokens), [0] * len(tokens), finish)

    def check(self) -> None:
        """Assert that the sampled tokens are trained, and no others, after the context that the engine read."""
        branches = self.recorded.branches()
        assert sum(sum(branch.mask) for branch in branches) == sum(len(said) for _, said in self.engine)
        for read, said in self.engine:
            whole = [*read, *said]
            assert any(branch.tokens[: len(whole)] == whole for branch in branches)


class Client:
    """Sends JSON to one rollout's URL."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str) -> None:
        self.http, self.url, self.key = http, url, key

    async def post(self, path: str, body: Any, key: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        async with self.http.post(f"{self.url}{path}", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """Return the answer to a conversation, which must be given."""
        status, answer = await self.post("/chat/completions", {"model": "policy", "messages": [*messages], **more})
        assert status == 200, answer
        return answer


@asynccontextmanager
async def endpoint_client(*rollouts: AgentRollout) -> AsyncIterator[list[Client]]:
    """Yield a client of each rollout, on one server."""
    endpoint = OpenAIEndpoint()
    await endpoint.listen()
    opened = [endpoint.opened(str(i), {"": rollout.session}) for i, rollout in enumerate(rollouts)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        try:
            yield [Client(http, *each.__enter__()) for each in opened]
        finally:
            for each in opened:
                each.__exit__(None, None, None)
            await endpoint.close()
