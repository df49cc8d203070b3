"""One rollout behind the endpoint: which turn each request continues, and how many tokens it may still sample.

    chat, complete, generate ──> after which turn, which tokens stay, which are new ──> ask, the policy's turn

Sampled tokens are never tokenized again: a request that continues a turn is read from that turn's tokens, and only
later messages are rendered. Any other request is rendered whole, and begins a branch.
"""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from titan_rl.ext.agents.conversation import Delta, Renderer
from titan_rl.ext.agents.episode_news import PROMPT, Contexts
from titan_rl.ext.agents.episodes import EpisodeOver, Limits, messages_from
from titan_rl.ext.agents.message_tree import MessageTree, digest, key_of
from titan_rl.ext.agents.play import Asks, Sampled
from titan_rl.text.answers import MalformedCall
from titan_rl.text.chat import ChatRenderer, common_length
from titan_rl.text.template import Message
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.sessions import Status
from titan_rl.wire.types import Prompt

CODES: dict[Status, str] = {"context_overflow": "context_length_exceeded"}
"""Error codes that clients know; other limits are named as a rollout's status."""


OFFERED = ("row", "prompt", "answer", "seed", "base_url", "api_key", "model", "tokenizer")
"""What an agent may take by keyword. `tokenizer`: its folder, for one that renders messages itself."""


class Refused(Exception):
    """A request that is not answered. str() is the error's message."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def image_tokens() -> Refused:
    """Return the refusal of token ids that stand for an image."""
    text = "expected tokens of text, found an image's: send images to /v1/chat/completions"
    return Refused(HTTPStatus.BAD_REQUEST, "invalid_tokens", text)


class Wish(NamedTuple):
    """What a client may choose about a turn."""

    most: int | None = None  # tokens to sample, below the configured limit
    logprobs: bool = False


class ServedTurn(NamedTuple):
    """An answered request."""

    context: list[int]
    sampled: Sampled
    text: str  # the sampled tokens as text
    message: Message  # the reply to a chat; else empty


class AgentSession:
    def __init__(self, prompt: Prompt, renderer: Renderer, limits: Limits, ask: Asks) -> None:
        self._prompt, self._renderer, self._limits, self._ask = prompt, renderer, limits, ask
        self._contexts, self._tree = Contexts(prompt.tokens, prompt.images), MessageTree()
        self._texts = [(prompt.text, PROMPT)] if renderer.chat is None else []  # completions, and their turns
        self._spent = 0  # tokens sampled, and read after the first context of a branch
        self._requests: set[asyncio.Task[Any]] = set()  # that wait for the policy
        self.turns = 0  # that were answered
        self._asked = self._continued = 0
        self._model: str | None = None  # the name that its requests give the policy
        self.refused: Status | None = None  # the limit that the last request ran into
        self.messages: Sequence[Message] = ()  # the latest conversation

    async def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], wish: Wish) -> ServedTurn:
        """Answer a conversation."""
        chat = self._renderer.chat
        if chat is None:
            remedy = 'set task.template = "chat", or use /v1/completions or /inference/v1/generate'
            raise Refused(HTTPStatus.BAD_REQUEST, "no_chat_template", f"this run has no chat template: {remedy}")
        try:
            messages = messages_from(await self._renderer.named(messages))
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, "invalid_messages", str(error)) from error
        keys = [key_of(message) for message in messages]
        keys[0] += digest(tools) if tools else ""
        node, depth = self._tree.find(keys)
        try:
            after, delta = self._delta(chat, node.turn, messages, depth, tools)
        except Exception as error:  # a template may raise any error
            raise Refused(HTTPStatus.BAD_REQUEST, "invalid_messages", f"{type(error).__name__}: {error}") from error
        if after == PROMPT:
            node, depth = self._tree.root, 0
        served = await self._sample(after, delta, wish)
        sampled = served.sampled
        try:
            message = chat.parse(sampled.tokens, tools or None, f"call_{sampled.turn}")
        except MalformedCall as malformed:
            message = malformed.message
        self._tree.grow(node, keys[depth:], key_of(message), sampled.turn, sampled.tokens)
        self.messages = [*messages, message]
        return served._replace(message=message)

    async def complete(self, prompt: str, wish: Wish) -> ServedTurn:
        """Continue a text. It may begin with an earlier text and its completion."""
        earlier = [(text, turn) for text, turn in self._texts if prompt.startswith(text)]
        known, after = max(earlier, key=lambda each: len(each[0]), default=("", None))
        tokenizer = self.tokenizer
        new = tokenizer.encode_outside(prompt[len(known) :])
        if after is None:
            new = [*tokenizer.opening, *new]
        kept = 0 if after is None else self._contexts.length(after)
        served = await self._sample(PROMPT if after is None else after, Delta(kept, new), wish)
        self._texts.append((prompt + served.text, served.sampled.turn))
        return served

    async def generate(self, tokens: Sequence[int], wish: Wish) -> ServedTurn:
        """Continue tokens."""
        size = self.tokenizer.size
        if not all(type(token) is int and 0 <= token < size for token in tokens):
            raise Refused(HTTPStatus.BAD_REQUEST, "invalid_tokens", f"expected token ids from 0 to {size - 1}")
        after = self._contexts.longest(tokens)
        kept = 0 if after is None else self._contexts.length(after)
        new = list(tokens[kept:])
        if self._renderer.reads_image(new):
            raise image_tokens()
        return await self._sample(PROMPT if after is None else after, Delta(kept, new), wish)

    def take_model(self, model: object) -> None:
        """Take the name by which a request calls the policy. Refuse a second one: every turn would be trained on with
        one reward."""
        if not isinstance(model, str) or model == (known := self._model or model):
            self._model = model if isinstance(model, str) else self._model
            return
        raise Refused(
            HTTPStatus.BAD_REQUEST,
            "several_models",
            f"model: expected {known!r}, as in this rollout's earlier requests, found {model!r}. List an episode's "
            "players in environment.seats, or ask another server for the others.",
        )

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._renderer.tokenizer

    def end(self) -> None:
        """Answer nothing more."""
        for request in self._requests:
            request.cancel()

    def metrics(self) -> dict[str, float]:
        return {"requests": float(self._asked), "requests/continued": float(self._continued)}

    def _delta(
        self, chat: ChatRenderer, turn: int | None, messages: Sequence[Message], depth: int, tools: Sequence[Any]
    ) -> tuple[int, Delta]:
        """Return the context as what follows a turn; the whole of it if it continues none."""
        if turn is not None:
            calls = messages[depth - 1].get("tool_calls") or ()
            new = chat.extend(self._contexts.last(turn), messages[depth:], tools or None, calls)
            if new is not None:
                return turn, self._renderer.delta(self._contexts.length(turn), new, messages[depth:])
        _, whole, images = self._renderer.delta(0, chat.prompt(messages, tools or None), messages)
        kept = common_length(self._prompt.tokens, whole)
        # Equal tokens may stand for different images: the first of these ends the common part.
        apart = set(self._prompt.images) ^ set(images)
        kept = min([kept, *(image.begin for image in apart)])
        return PROMPT, Delta(kept, whole[kept:], tuple(image for image in images if image.begin >= kept))

    async def _sample(self, after: int, delta: Delta, wish: Wish) -> ServedTurn:
        """Sample after the context up to the turn `after`, changed by `delta`."""
        read = len(delta.new) if after != PROMPT else 0
        most = self._most(delta.kept + len(delta.new), read, wish.most)
        line = self._contexts.open(after, *delta)
        context, request = list(line.tokens), asyncio.current_task()
        assert request is not None
        self._requests.add(request)
        self._asked += 1
        self._continued += after != PROMPT
        try:
            sampled = await self._ask(delta, most, after=after, logprobs=wish.logprobs)
        except BaseException as error:
            self._contexts.close(line)
            if isinstance(error, EpisodeOver):
                raise self._over(error.status, f"a context of {len(context)} tokens cannot be sampled") from error
            raise
        finally:
            self._requests.discard(request)
        self._contexts.close(line, sampled.turn, sampled.tokens)
        self._spent += read + len(sampled.tokens)
        self.turns += 1
        self.refused = None
        ended = bool(sampled.tokens) and sampled.tokens[-1] in self._renderer.ends
        text = self.tokenizer.decode(sampled.tokens[:-1] if ended else sampled.tokens)
        return ServedTurn(context, sampled, text, {})

    def _most(self, length: int, read: int, wished: int | None) -> int | None:
        """Return how many tokens may be sampled; None: the configured number."""
        limits = self._limits
        if not length:
            raise Refused(HTTPStatus.BAD_REQUEST, "empty_prompt", "expected a prompt of at least 1 token, found none")
        if self._asked >= limits.max_turns:
            raise self._over("max_turns", f"the limit of environment.max_turns = {limits.max_turns} is reached")
        if not limits.max_tokens:
            return wished
        room = limits.max_tokens - self._spent - read
        if room <= 0:
            raise self._over("max_tokens", f"the limit of environment.max_tokens = {limits.max_tokens} is reached")
        return room if wished is None else min(room, wished)

    def _over(self, status: Status, message: str) -> Refused:
        self.refused = status
        return Refused(HTTPStatus.BAD_REQUEST, CODES.get(status, status), f"{message} ({status})")
