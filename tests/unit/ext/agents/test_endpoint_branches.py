"""Agents that continue, branch, edit, ask again and compact at random: the sampled tokens are trained."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.agent_rollouts import USER, AgentRollout, chatting
from support.played import LIMITS
from titan_rl.ext.agents.agent_session import Wish
from titan_rl.ext.agents.conversation import ChatText
from titan_rl.ext.agents.message_tree import readable
from titan_rl.text.answers import CallFormat
from titan_rl.text.template import ChatSettings, Thinking

TOOLS = [{"type": "function", "function": {"name": "mul", "description": "", "parameters": {"type": "object"}}}]
MOVES = st.lists(st.sampled_from(("continue", "branch", "compact", "edit", "again", "two at once")), max_size=14)
WRITTEN: dict[CallFormat, tuple[str, str, tuple[str, ...]]] = {
    "hermes": (
        "<think>\nhm\n</think>\n\n",
        '<tool_call>\n{"name": "mul", "arguments": {"b": N,  "a": 2}}\n</tool_call>',
        (),
    ),
    "glm": (
        "<think>hm</think>",
        "<tool_call>mul<arg_key>b</arg_key><arg_value>N</arg_value></tool_call>",
        ("<|user|>", "<|observation|>"),
    ),
    "gemma": (
        "<|channel>thought\nhm\n<channel|>",
        "<|tool_call>call:mul{b:N,a:2}<tool_call|>",
        ("<turn|>", "<|tool_response>"),
    ),
    "harmony": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant",
        '<|channel|>commentary to=functions.mul <|constrain|>json<|message|>{"b": N}',
        ("<|call|>", "<|return|>"),
    ),
}
"""A thought, a call, and ends of a turn."""
Messages = list[dict[str, Any]]


Renderers = Callable[[str, Thinking], ChatText]


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> Renderers:
    @cache
    def made(template: str, thinking: Thinking) -> ChatText:
        return chatting(tmp_path_factory.mktemp(template), template, ChatSettings(thinking=thinking))

    return made


class Wanderer:
    """An agent, and a policy of random tokens, often with thinking, a call, or no end."""

    def __init__(self, seed: int, text: ChatText) -> None:
        self._draw, self._text = random.Random(seed), text
        self.rollout = AgentRollout(text, self._said, replace(LIMITS, max_turns=99))
        self._talks: list[Messages] = [[USER]]

    def _said(self, context: list[int]) -> list[int]:
        draw, encode = self._draw, self._text.tokenizer.encode
        said = [draw.randrange(600) for _ in range(draw.randrange(1, 9))]
        thought, call, ends = WRITTEN.get(self._text.chat.call_format, WRITTEN["hermes"])
        if draw.random() < 0.3:
            said = encode(thought) + said
        if draw.random() < 0.4:
            said += encode(call.replace("N", str(draw.randrange(9))))
        end = self._text.tokenizer.encode(draw.choice(ends))[0] if ends else self._text.tokenizer.eos
        return [*said, end] if draw.random() < 0.85 else said

    async def move(self, kind: str) -> None:
        talk = self._draw.choice(self._talks)
        asked = [self._answered(talk) for _ in range(1 + (kind == "two at once"))]
        for longer in await asyncio.gather(*asked):
            if kind == "continue" and talk in self._talks:
                self._talks.remove(talk)
            if kind in ("continue", "branch", "two at once"):
                self._talks.append(longer)
            elif kind == "compact":
                self._talks.append([{"role": "user", "content": "summary"}, {"role": "user", "content": "go"}])
            elif kind == "edit" and talk[-1]["role"] == "user":
                self._talks.append([*talk[:-1], {"role": "user", "content": f"edit {self._draw.randrange(3)}"}])

    async def _answered(self, talk: Messages) -> Messages:
        """Ask, and return the conversation as a client keeps it, with the client's next message."""
        said = await self.rollout.session.chat(readable(json.loads(json.dumps(talk))), TOOLS, Wish())
        kept = {k: v for k, v in said.message.items() if k != "reasoning_content" or self._draw.random() < 0.5}
        for call in kept.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "7"} for c in kept.get("tool_calls", ())]
        return [*talk, kept, *(results or [{"role": "user", "content": self._draw.choice("abc")}])]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    moves=MOVES,
    template=st.sampled_from(("hermes", "qwen3", "phi3", "glm", "gemma4", "gpt_oss")),
    thinking=st.sampled_from(("keep", "template")),
)
def test_every_sampled_token_is_trained_once_after_what_was_read(
    renderers: Renderers, seed: int, moves: Sequence[str], template: str, thinking: Thinking
) -> None:
    wanderer = Wanderer(seed, renderers(template, thinking))

    async def walk() -> None:
        for kind in moves:
            await wanderer.move(kind)

    asyncio.run(walk())
    wanderer.rollout.check()


async def test_a_conversation_that_only_continues_is_one_branch_and_renders_only_what_is_new(
    renderers: Renderers,
) -> None:
    wanderer = Wanderer(3, renderers("hermes", "keep"))

    for _ in range(12):
        await wanderer.move("continue")
    wanderer.rollout.check()
    (branch,) = wanderer.rollout.recorded.branches()
    assert all(len(turn.context) < 40 for turn in branch.turns[1:])
