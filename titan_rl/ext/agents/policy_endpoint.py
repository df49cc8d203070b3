"""The OpenAI-compatible server for any client: each request is a new conversation.

    http://HOST:PORT/v1/{models,chat/completions,completions}      http://HOST:PORT/inference/v1/generate

Unlike an agent's endpoint, one key opens it, and clients choose how to sample. What is not supported is refused, never
ignored. Images of a chat are data URLs; their files are deleted when the request ends.
"""

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from http import HTTPStatus
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from aiohttp import web

from titan_rl.ext.agents.agent_session import CODES, AgentSession, Refused, ServedTurn, Wish, image_tokens
from titan_rl.ext.agents.conversation import Delta, ReadsImages, Renderer
from titan_rl.ext.agents.episodes import Limits, messages_from
from titan_rl.ext.agents.message_tree import readable
from titan_rl.ext.agents.openai_endpoint import (
    Answers,
    Body,
    OpenAIEndpoint,
    authorize,
    bad_request,
    json_body,
    replied,
)
from titan_rl.ext.agents.play import Asks, Sampled
from titan_rl.text.template import Message
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.errors import RequestRefused
from titan_rl.wire.types import Completion, ContextScore, Generates, ImagePlace, Prompt, Request, Sampling

MOST_CHARACTERS = 2**16  # prompts of this length are always read
MOST_ANSWERS = 4096  # to one request
MOST_STOPS = 16
MOST_KEPT = 2**20  # largest top_k; 0 and -1: all
NO_LIMITS = Limits(max_turns=1 << 30, max_tokens=0, turn_seconds=0, rollout_seconds=0)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
}
"""Fields that a client may send only with a value that changes nothing."""

Answer = TypeVar("Answer")


class ImagesOfRequests(Protocol):
    """Reads the images of requests (ext/vision/request_images.py)."""

    def request(self) -> AbstractContextManager[ReadsImages]:
        """Return a context in which the images of one request are kept for engines."""
        ...


class PolicyEndpoint(OpenAIEndpoint):
    root = ""

    def __init__(
        self,
        generators: Generates,
        renderer: Renderer,
        *,
        key: str,
        sampling: Sampling,
        context: int,
        model: str,
        images: ImagesOfRequests | None = None,
    ) -> None:
        """`sampling` applies where a client chooses nothing; `context` limits the tokens of a prompt and its answer;
        `images`: None if the model reads none."""
        super().__init__(model, context)
        self._images = images
        self._generators, self._renderer, self._access = generators, renderer, key
        self._sampling, self._context = sampling, context
        self._numbers = itertools.count()

    def _seats(self, request: web.Request) -> Mapping[str, AgentSession]:
        authorize(request, self._access)
        return {"": self._fresh(self._renderer, self._sampling, 0, ())}

    def _route(self, answers: Answers) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handled(request: web.Request) -> web.StreamResponse:
            authorize(request, self._access)
            body = json_body(await request.read())
            chosen = body.get("sampling_params") or body
            sampling, seed, stops, n = self._wishes(chosen if isinstance(chosen, dict) else {})
            with self._reading() as renderer:
                if answers == self._chat:
                    body = {**body, "messages": await named(renderer, readable(body.get("messages"), names=False))}
                each = [{**one, "n": 1} for one in one_by_one(body) for _ in range(n)]
                for one in each[::n]:
                    self._refuse_long(one)
                if len(each) > MOST_ANSWERS:
                    raise bad_request(f"n, prompt: expected at most {MOST_ANSWERS} answers, found {len(each)}")
                sessions = [self._fresh(renderer, sampling, seed + i, stops) for i in range(len(each))]
                replies = await all_of(map(answers, sessions, each))
            return await replied(request, body, *together(replies))

        return handled

    @contextmanager
    def _reading(self) -> Iterator[Renderer]:
        """Yield the renderer of one request. What it reads of images is kept until the end."""
        if self._images is None:
            yield self._renderer
            return
        with self._images.request() as images:
            yield self._renderer.reading(images)

    def _refuse_long(self, body: Body) -> None:
        """Refuse a text with more characters than the longest tokens of a context have: to tokenize it would keep every
        other client waiting."""
        most = max(MOST_CHARACTERS, self._context * self._renderer.tokenizer.longest_token)
        if (found := sum(map(characters, (body.get(key) for key in ("prompt", "messages", "tools"))))) > most:
            text = f"a prompt of {found:,} characters has more than {self._context} tokens (context_overflow)"
            raise Refused(HTTPStatus.BAD_REQUEST, CODES["context_overflow"], text)

    def _wishes(self, body: Body) -> tuple[Sampling, int, Sequence[str], int]:
        """Return how to sample, the seed, the texts that end an answer, and the number of answers per prompt."""
        for name, neutral in NEUTRAL.items():
            if body.get(name) is not None and body[name] not in neutral:
                raise bad_request(f"{name}: expected none, because it is not supported, found {body[name]!r}")
        temperature = _number(body, "temperature", self._sampling.temperature, 0.0, 2.0)
        if 0 < temperature < 0.01:
            raise bad_request(f"temperature: expected 0 or a number of at least 0.01, found {temperature:g}")
        top_p = _number(body, "top_p", self._sampling.top_p, 1e-6, 1.0)
        top_k = self._sampling.top_k if body.get("top_k") is None else body["top_k"]
        if type(top_k) is not int or not -1 <= top_k <= MOST_KEPT:
            raise bad_request(f"top_k: expected an integer from -1 to {MOST_KEPT}, found {top_k!r}")
        min_p = _number(body, "min_p", self._sampling.min_p, 0.0, 1.0)
        seed = secrets.randbelow(2**31) if body.get("seed") is None else body["seed"]
        if type(seed) is not int:
            raise bad_request(f"seed: expected an integer, found {seed!r}")
        given = body.get("stop") or ()
        stops = (given,) if isinstance(given, str) else given
        if not all(isinstance(stop, str) and stop for stop in stops) or len(stops) > MOST_STOPS:
            raise bad_request(f"stop: expected at most {MOST_STOPS} texts, found {given!r}")
        n = 1 if body.get("n") is None else body["n"]
        if type(n) is not int or not 1 <= n <= MOST_ANSWERS:
            raise bad_request(f"n: expected an integer from 1 to {MOST_ANSWERS}, found {n!r}")
        truncation = {"top_p": top_p, "top_k": max(top_k, 0), "min_p": min_p}
        return replace(self._sampling, temperature=temperature, **truncation), seed, stops, n

    def _fresh(self, renderer: Renderer, sampling: Sampling, seed: int, stops: Sequence[str]) -> AgentSession:
        """Return the session of one answer."""
        opening = renderer.tokenizer.opening

        async def generated(
            tokens: list[int], most: int | None, *, scores: bool = False, images: tuple[ImagePlace, ...] = ()
        ) -> tuple[int, Completion]:
            room = self._context - len(tokens)
            if room < 1:
                raise overflow(self._context, len(tokens), len(images))
            number, most = next(self._numbers), min(most or sampling.max_new_tokens, room)
            limited = replace(sampling, max_new_tokens=most, scores_context=scores)
            try:
                (completion,) = await self._generators.generate(
                    Request(f"serve-{number}", tokens, [seed % 2**31], limited, images=images)
                )
            except RequestRefused as error:
                raise Refused(HTTPStatus.BAD_REQUEST, "invalid_request", str(error)) from error
            return number, completion

        async def ask(delta: Delta, most: int | None, *, after: int | None = None, logprobs: bool = False) -> Sampled:
            number, completion = await generated([*opening[: delta.kept], *delta.new], most, images=delta.images)
            return Sampled(completion.tokens, completion.finish, number, completion.logprobs if logprobs else ())

        async def score(tokens: list[int], most: int | None) -> tuple[Sampled, list[ContextScore]]:
            number, completion = await generated(tokens, most, scores=True)
            return Sampled(completion.tokens, completion.finish, number, completion.logprobs), completion.context

        return OneAnswer(Prompt(0, "", opening, ""), renderer, ask, score, stops)

    async def _complete(self, session: AgentSession, body: Body) -> tuple[Any, list[Any]]:
        """Answer a completion. With `echo` its text and log-probs begin with the prompt's: log-likelihood tasks of
        lm-eval ask for one token, or none, and read those."""
        if not body.get("echo"):
            return await super()._complete(session, body)
        assert isinstance(session, OneAnswer)
        if body.get("stream") or body.get("suffix"):
            raise bad_request("echo: expected neither stream nor suffix with it")
        if (given := body.get("logprobs")) not in (None, 0, 1):
            raise bad_request(f"logprobs: expected 0 or 1 with echo, found {given!r}")
        most = body.get("max_tokens")
        if most is not None and (type(most) is not int or most < 0):
            raise bad_request(f"max_tokens: expected an integer of at least 0 with echo, found {most!r}")
        served, scores = await session.echo(prompt := body.get("prompt"), most)
        reply, _ = self._replies.text(served, session.tokenizer, {**body, "logprobs": None})
        (choice,) = reply["choices"]
        read = prompt if isinstance(prompt, str) else session.tokenizer.decode(served.context, skip_special=False)
        choice["text"] = read + served.text
        if given is not None:
            choice["logprobs"] = echoed(served, scores, session.tokenizer)
        return reply, []


Scores = Callable[[list[int], int | None], Awaitable[tuple[Sampled, list[ContextScore]]]]
"""Samples after these tokens, at most a number of them, and scores the read tokens from the second on."""


class OneAnswer(AgentSession):
    """A session whose answer ends before the first of the texts `stops`."""

    def __init__(self, prompt: Prompt, renderer: Renderer, ask: Asks, score: Scores, stops: Sequence[str]) -> None:
        super().__init__(prompt, renderer, NO_LIMITS, ask)
        self._score, self._stops = score, stops

    async def echo(self, prompt: Any, most: int | None) -> tuple[ServedTurn, list[ContextScore]]:
        """Continue a text or tokens by at most `most` tokens (None: as configured), and score the prompt."""
        size = self.tokenizer.size
        tokens = (
            [*self.tokenizer.opening, *self.tokenizer.encode_outside(prompt)] if isinstance(prompt, str) else prompt
        )
        known = isinstance(tokens, list) and all(type(token) is int and 0 <= token < size for token in tokens)
        if not known or not tokens:
            raise bad_request(f"prompt: expected one text, or a list of token ids from 0 to {size - 1}, with echo")
        if self._renderer.reads_image(tokens):
            raise image_tokens()
        sampled, scores = await self._score(tokens, most or 1 if most is not None else None)
        if most == 0:
            sampled = sampled._replace(tokens=[], logprobs=(), finish="length")
        return self._cut(ServedTurn(tokens, sampled, self.tokenizer.decode(sampled.tokens), {})), scores

    async def complete(self, prompt: str, wish: Wish) -> ServedTurn:
        return self._cut(await super().complete(prompt, wish))

    async def generate(self, tokens: Sequence[int], wish: Wish) -> ServedTurn:
        return self._cut(await super().generate(tokens, wish))

    async def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], wish: Wish) -> ServedTurn:
        return self._cut(await super().chat(messages, tools, wish))

    def _cut(self, served: ServedTurn) -> ServedTurn:
        """Return the answer up to the first stop. The tokens and their log-probs stay whole."""
        text, message = first_part(served.text, self._stops), dict(served.message)
        if isinstance(content := message.get("content"), str):
            message["content"] = first_part(content, self._stops)
        if (text, message) == (served.text, served.message):
            return served
        return served._replace(text=text, message=message, sampled=served.sampled._replace(finish="stop"))


async def named(renderer: Renderer, messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the names of their images. A thread reads them, and ends before a cancelled request."""
    reading = asyncio.ensure_future(renderer.named(messages))
    try:
        return messages_from(await asyncio.shield(reading))
    except ValueError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, "invalid_messages", str(error)) from error
    finally:
        await asyncio.wait([reading])


async def all_of(answers: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Return all answers. If one is refused, the others end first."""
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def overflow(context: int, tokens: int, images: int) -> Refused:
    """Return the refusal of a prompt that leaves no room for an answer."""
    found = f"{tokens}, with the placeholders of {images} images" if images else f"{tokens}"
    text = f"expected a prompt of at most {context - 1} tokens, found {found} (context_overflow)"
    return Refused(HTTPStatus.BAD_REQUEST, CODES["context_overflow"], text)


def characters(value: Any) -> int:
    """Return the number of characters, keys and numbers in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(characters(key) + characters(part) for key, part in value.items())
    return sum(map(characters, value)) if isinstance(value, list) else int(value is not None)


def first_part(text: str, stops: Sequence[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def echoed(served: ServedTurn, scores: Sequence[ContextScore], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the log-probs of a prompt and its answer. The first token has none. The most likely token is known in the
    prompt only."""
    names = [tokenizer.decode([token], skip_special=False) for token in (*served.context, *served.sampled.tokens)]
    own = [score.logprob for score in scores] + list(served.sampled.logprobs)
    top: list[dict[str, float]] = [{name: p} for name, p in zip(names[1:], own, strict=True)]
    for each, score in zip(top, scores, strict=False):
        each[tokenizer.decode([score.best], skip_special=False)] = score.best_logprob
    offsets = list(accumulate(map(len, names), initial=0))[:-1]
    return {"tokens": names, "token_logprobs": [None, *own], "top_logprobs": [None, *top], "text_offset": offsets}


def one_by_one(body: Body) -> list[Body]:
    """Return a body for each prompt of a batch of texts or of token lists."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt):
        return [{**body, "prompt": each} for each in prompt]
    return [body]


def together(found: Sequence[tuple[Any, list[Any]]]) -> tuple[Any, list[Any]]:
    """Return several replies as one whose choices are numbered."""
    if len(found) == 1:
        return found[0]
    (first, _), replies = found[0], [reply for reply, _ in found]
    choices = [{**choice, "index": i} for i, reply in enumerate(replies) for choice in reply["choices"]]
    usage = {name: sum(reply["usage"][name] for reply in replies) for name in first["usage"]}
    chunks = [
        {**chunk, "choices": [{**choice, "index": i} for choice in chunk["choices"]]}
        for i, (_, parts) in enumerate(found)
        for chunk in parts
    ]
    return {**first, "choices": choices, "usage": usage}, chunks


def _number(body: Body, name: str, default: float, low: float, high: float) -> float:
    value = default if body.get(name) is None else body[name]
    if type(value) not in (int, float) or not low <= value <= high:
        raise bad_request(f"{name}: expected a number from {low:g} to {high:g}, found {value!r}")
    return float(value)
