"""Chats through sessions: exactly the sampled tokens are trained on, with any messages to the policy."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chat_folders import CONTROL, chat_folder
from support.turn_drivers import Answering, player
from titan_rl.rollout.player import Play
from titan_rl.text.answers import MalformedCall
from titan_rl.text.template import ChatSettings, Message
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.sessions import Outcome, Session
from titan_rl.wire.types import Completion, Prompt, Request, Rollout, Sampling

ASKED: Message = {"role": "user", "content": "What is 3*4?"}
TOOLS = [{"type": "function", "function": {"name": "mul", "description": "Multiply.", "parameters": {}}}]


class AnyTokens(Answering):
    """Samples any ids, also ids that no text encodes to; three in four turns end with an end of a turn."""

    def __init__(self, text: TextTokenizer) -> None:
        super().__init__()
        self.text = text

    def completion(self, request: Request, seed: int) -> Completion:
        draw = random.Random(seed)
        stops = draw.random() < 0.75
        tokens = [draw.randrange(self.text.size) for _ in range(draw.randrange(1, 6))]
        tokens = [token for token in tokens if token not in self.text.eos_ids] + [
            draw.choice(self.text.eos_ids)
        ] * stops
        tokens = tokens or [0]
        self.said.append((list(request.tokens), tokens))
        return Completion(tokens, [-0.5] * len(tokens), [0] * len(tokens), "stop" if stops else "length")


class Chatting:
    """Sends the given messages, one a turn, as an environment does."""

    def __init__(self, text: TextTokenizer, messages: list[Message]) -> None:
        self.chat, self.messages, self.begun = text.chat, messages, 0

    async def drive(self, session: Session) -> Outcome:
        messages, tokens = [ASKED], list(session.prompt.tokens)
        for message in [*self.messages, None]:
            completion = await session.sample(tokens)
            tokens += completion.tokens
            try:
                messages.append(self.chat.parse(completion.tokens, TOOLS))
            except MalformedCall as error:
                messages.append(error.message)
            if message:
                messages.append(message)
                delta = self.chat.extend(tokens, [message], TOOLS)
                self.begun += delta is None
                tokens = self.chat.prompt(messages, TOOLS) if delta is None else tokens + delta
        return Outcome(reward=1.0)


def chatted(text: TextTokenizer, messages: list[Message], seed: int) -> tuple[Rollout, AnyTokens, Chatting]:
    engine, driver = AnyTokens(text), Chatting(text, messages)
    prompt = Prompt(0, "", text.chat.prompt([ASKED], TOOLS), "")
    play = Play(id="p", prompt=prompt, sampling=Sampling(8), seed=seed)
    return asyncio.run(player(driver, engine).play(play)), engine, driver


@pytest.mark.parametrize(
    ("name", "chat"),
    [*((name, {}) for name in CONTROL), ("qwen3", {"thinking": "template"})],
)
def test_what_is_trained_is_what_was_sampled(tmp_path: Path, name: str, chat: dict[str, Any]) -> None:
    settings = ChatSettings(kwargs={"date_string": "26 Jul 2024"}, **chat)
    text = TextTokenizer.load(chat_folder(tmp_path, name), settings)
    pieces = st.lists(st.sampled_from(["12", "\n ok", "é", *CONTROL[name], "</tool_call>"]), min_size=1, max_size=4)
    roles = st.sampled_from(["user", "tool"][: 1 if name == "gpt_oss" else 2])  # whose template wants calls before
    said = st.builds(
        lambda role, parts: {"role": role, "content": "".join(parts), "tool_call_id": "call00000"}, roles, pieces
    )

    @given(st.lists(said, max_size=5), st.integers(0, 2**20))
    def exact(messages: list[Message], seed: int) -> None:
        rollout, engine, driver = chatted(text, messages, seed)
        assert rollout.status == "completed", rollout.error
        trained = [
            token for branch in rollout.branches for token, bit in zip(branch.tokens, branch.mask, strict=True) if bit
        ]
        sampled = [(turn.index, turn.completion.tokens) for branch in rollout.branches for turn in branch.turns]
        assert trained == [token for _, tokens in sampled for token in tokens]
        assert [tokens for _, tokens in sorted(sampled)] == [tokens for _, tokens in engine.said]
        assert len(rollout.branches) <= 1 + driver.begun
        for (read, answer), each in zip(engine.said, sorted(sampled), strict=True):
            assert answer == each[1]
            assert any(branch.tokens[: len(read) + len(answer)] == read + answer for branch in rollout.branches)

    exact()


def test_a_template_that_strips_thinking_begins_branches(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "And 5*6?"}] * 2
    for thinking, branches in (("keep", 1), ("template", 3)):
        text = TextTokenizer.load(chat_folder(tmp_path, "qwen3"), ChatSettings(thinking=thinking))  # type: ignore[arg-type]
        assert len(chatted(text, messages, seed=3)[0].branches) == branches
