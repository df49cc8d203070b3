"""A rollout's conversation as tokens. Sampled tokens are never tokenized again.

    prompt | observation, sampled, observation, sampled, ...

Text from outside never becomes a control token: a tool that prints the end token must not end a turn.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from titan_rl.ext.agents.adapters import Conversation
from titan_rl.ext.agents.episodes import Observation, Reply, messages_from, text_of
from titan_rl.ext.agents.tools import Schema, ToolCall
from titan_rl.text.answers import MalformedCall
from titan_rl.text.chat import ChatRenderer
from titan_rl.text.template import Message
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.sessions import Opening
from titan_rl.wire.types import Finish, Prompt


class Delta(NamedTuple):
    """A context, as a change to the prompt's tokens, or to the tokens up to the end of the last turn."""

    kept: int  # leading tokens that stay; fewer than there are: a new branch
    new: list[int]


class PlainText:
    """A conversation without a chat template: an observation's text follows the sampled text directly."""

    def __init__(self, tokenizer: TextTokenizer, ends: Sequence[int] = ()) -> None:
        """`ends`: the tokens that end a turn, if they are not the tokenizer's."""
        self.tokenizer, self.ends = tokenizer, frozenset(ends or tokenizer.eos_ids)
        self.chat: ChatRenderer | None = None

    def open(self, prompt: Prompt, observation: Observation, tools: Sequence[Schema]) -> Delta:
        """Return the first context, relative to the prompt's tokens."""
        return Delta(len(prompt.tokens), self.tokenizer.encode_outside(text_of(observation)))

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], observation: Observation, tools: Sequence[Schema]
    ) -> Delta:
        """Return the context after `tokens`, which end with a sampled turn. `messages` is the conversation so far."""
        end = [] if tokens and tokens[-1] in self.ends else [self.tokenizer.eos]  # the turn was cut off
        return Delta(len(tokens), end + self.tokenizer.encode_outside(text_of(observation)))

    def reply(self, tokens: Sequence[int], finish: Finish, tools: Sequence[Schema]) -> Reply:
        ended = bool(tokens) and tokens[-1] in self.ends
        text = self.tokenizer.decode(tokens[:-1] if ended else tokens)
        return Reply(text, tokens, finish, message={"role": "assistant", "content": text})


class ChatText:
    """A conversation by the chat template. Where the template cannot extend its own text, a branch begins."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer, self.chat, self.ends = tokenizer, tokenizer.chat, frozenset(tokenizer.chat.eos_ids)

    def open(self, prompt: Prompt, observation: Observation, tools: Sequence[Schema]) -> Delta:
        if not observation and not tools:
            return Delta(len(prompt.tokens), [])
        return Delta(0, self.chat.prompt([*prompt.messages, *messages_from(observation)], tools or None))

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], observation: Observation, tools: Sequence[Schema]
    ) -> Delta:
        added = messages_from(observation)
        new = self.chat.extend(tokens, added, tools or None)
        if new is None:
            return Delta(0, self.chat.prompt([*messages, *added], tools or None))
        return Delta(len(tokens), new)

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
    kept, new = renderer.open(prompt, observation, tools)
    messages = [*prompt.messages, *messages_from(observation)] if renderer.chat else ()
    return replace(prompt, tokens=[*prompt.tokens[:kept], *new], messages=messages)


def read_after(prompt: Prompt, opening: Opening, tokenizer: TextTokenizer) -> Prompt:
    """Return a demonstration's prompt as a policy reads it in its first turn."""
    return opened(prompt, opening, ChatText(tokenizer) if prompt.messages else PlainText(tokenizer))


def without_text(prompt: Prompt, renderer: Renderer) -> Prompt:
    """Return the prompt of a rollout whose first observation is the whole conversation."""
    return replace(prompt, tokens=renderer.tokenizer.opening, messages=())
