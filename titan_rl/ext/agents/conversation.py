"""A rollout's conversation as tokens. Sampled tokens are never tokenized again.

    prompt | observation, sampled, observation, sampled, ...

Text from outside never becomes a control token: a tool that prints the end token must not end a turn.
"""

import asyncio
import json
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple, Protocol, Self

from titan_rl.ext.agents.adapters import Conversation
from titan_rl.ext.agents.episodes import Observation, Reply, messages_from, parts_of
from titan_rl.ext.agents.tools import Schema, ToolCall, shows_images
from titan_rl.text.answers import MalformedCall
from titan_rl.text.chat import ChatRenderer
from titan_rl.text.template import Message
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.sessions import Opening
from titan_rl.wire.types import Finish, ImagePlace, Prompt


class Delta(NamedTuple):
    """A context, as a change to the prompt's tokens, or to the tokens up to the end of the last turn."""

    kept: int  # leading tokens that stay; fewer than there are: a new branch
    new: list[int]
    images: tuple[ImagePlace, ...] = ()  # in `new`; their places count from the context's first token


class ReadsImages(Protocol):
    """Reads the images of observations (ext/vision/turn_images.py)."""

    id: int  # the token that stands for an image

    def named(self, messages: Sequence[Message]) -> list[Message]:
        """Keep the images of messages, and return the messages with their names. Raise ValueError for a bad image."""
        ...

    def expanded(self, tokens: Sequence[int], names: Sequence[str]) -> tuple[list[int], tuple[ImagePlace, ...]]:
        """Return the tokens as the model reads them, and where each image begins. Raise ValueError if `tokens` have
        another number of images."""
        ...


class TextAndImages:
    """What a renderer sees of observations."""

    def __init__(self, images: ReadsImages | None) -> None:
        """`images`: None if the model reads none."""
        self._images = images

    def reading(self, images: ReadsImages) -> Self:
        """Return this renderer with another reader of images."""
        made = copy(self)
        made._images = images
        return made

    async def named(self, observation: Observation) -> Observation:
        """Return an observation with the names of its images in place of the images."""
        if not observation or isinstance(observation, str):
            return observation
        messages = messages_from(observation)
        if not any(shows_images(message.get("content")) for message in messages):
            return observation
        if self._images is None:
            raise ValueError('model.vision: expected "frozen" for an observation with an image, found "none"')
        named = await asyncio.to_thread(self._images.named, messages)
        return Conversation(named) if isinstance(observation, Conversation) else named

    def reads_image(self, tokens: Sequence[int]) -> bool:
        """Return True if one of the tokens stands for an image."""
        return self._images is not None and self._images.id in tokens

    def delta(self, kept: int, new: list[int], read: Sequence[Message]) -> Delta:
        """Return a context whose new tokens have one token for each image of the messages that they read."""
        names = [part["image"] for message in read for part in parts_of(message) if part["type"] == "image"]
        if self._images is None or not names:
            return Delta(kept, new)
        expanded, places = self._images.expanded(new, names)
        return Delta(kept, expanded, tuple(ImagePlace(name, kept + begin) for name, begin in places))


class PlainText(TextAndImages):
    """A conversation without a chat template: an observation's text follows the sampled text directly."""

    def __init__(self, tokenizer: TextTokenizer, ends: Sequence[int] = (), images: ReadsImages | None = None) -> None:
        """`ends`: the tokens that end a turn, if they are not the tokenizer's."""
        super().__init__(images)
        self.tokenizer, self.ends = tokenizer, frozenset(ends or tokenizer.eos_ids)
        self.chat: ChatRenderer | None = None

    def open(self, prompt: Prompt, observation: Observation, tools: Sequence[Schema]) -> Delta:
        """Return the first context, relative to the prompt's tokens."""
        return self.delta(len(prompt.tokens), self._read(observation), messages_from(observation))

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], observation: Observation, tools: Sequence[Schema]
    ) -> Delta:
        """Return the context after `tokens`, which end with a sampled turn. `messages` is the conversation so far."""
        end = [] if tokens and tokens[-1] in self.ends else [self.tokenizer.eos]  # the turn was cut off
        return self.delta(len(tokens), end + self._read(observation), messages_from(observation))

    def _read(self, observation: Observation) -> list[int]:
        """Return the tokens of an observation, with one for each image."""
        parts = [part for message in messages_from(observation) for part in parts_of(message)]
        tokens = list[int]()
        for shown, run in groupby(parts, lambda part: part["type"] == "image"):
            if shown and self._images is not None:  # else `named` has raised
                tokens += [self._images.id for _ in run]
            else:
                tokens += self.tokenizer.encode_outside("".join(part["text"] for part in run))
        return tokens

    def reply(self, tokens: Sequence[int], finish: Finish, tools: Sequence[Schema]) -> Reply:
        ended = bool(tokens) and tokens[-1] in self.ends
        text = self.tokenizer.decode(tokens[:-1] if ended else tokens)
        return Reply(text, tokens, finish, message={"role": "assistant", "content": text})


class ChatText(TextAndImages):
    """A conversation by the chat template. Where the template cannot extend its own text, a branch begins."""

    def __init__(self, tokenizer: TextTokenizer, images: ReadsImages | None = None) -> None:
        super().__init__(images)
        self.tokenizer, self.chat, self.ends = tokenizer, tokenizer.chat, frozenset(tokenizer.chat.eos_ids)

    def open(self, prompt: Prompt, observation: Observation, tools: Sequence[Schema]) -> Delta:
        if not observation and not tools:
            return Delta(len(prompt.tokens), [])
        read = [*prompt.messages, *messages_from(observation)]
        return self.delta(0, self.chat.prompt(read, tools or None), read)

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], observation: Observation, tools: Sequence[Schema]
    ) -> Delta:
        added = messages_from(observation)
        new = self.chat.extend(tokens, added, tools or None)
        if new is None:
            read = [*messages, *added]
            return self.delta(0, self.chat.prompt(read, tools or None), read)
        return self.delta(len(tokens), new, added)

    def reply(self, tokens: Sequence[int], finish: Finish, tools: Sequence[Schema]) -> Reply:
        problem = ""
        try:
            message = self.chat.parse(tokens, tools or None)
        except MalformedCall as error:
            message, problem = error.message, str(error)
        calls = [
            ToolCall(call["function"]["name"], json.loads(call["function"]["arguments"]), call["id"])
            for call in message.get("tool_calls", ())
        ]
        return Reply(str(message["content"]), tokens, finish, calls, problem, message)


Renderer = PlainText | ChatText


def opened(prompt: Prompt, opening: Opening, renderer: Renderer) -> Prompt:
    """Return the prompt as a policy reads it in its first turn."""
    observation, tools = opening.observation, opening.tools
    if isinstance(observation, Conversation):
        prompt = without_text(prompt, renderer)
    kept, new, _ = renderer.open(prompt, observation, tools)
    messages = [*prompt.messages, *messages_from(observation)] if renderer.chat else ()
    return replace(prompt, tokens=[*prompt.tokens[:kept], *new], messages=messages)


def read_after(prompt: Prompt, opening: Opening, tokenizer: TextTokenizer) -> Prompt:
    """Return a demonstration's prompt as a policy reads it in its first turn."""
    return opened(prompt, opening, ChatText(tokenizer) if prompt.messages else PlainText(tokenizer))


def without_text(prompt: Prompt, renderer: Renderer) -> Prompt:
    """Return the prompt of a rollout whose first observation is the whole conversation."""
    return replace(prompt, tokens=renderer.tokenizer.opening, messages=(), images=())
