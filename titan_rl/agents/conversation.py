"""A rollout's conversation as tokens. What was sampled is never tokenized again.

    prompt | observation, sampled, observation, sampled, ...

Text from outside is encoded without special tokens: a tool that prints the end token must not end a turn.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from titan_rl.agents.episodes import Observation, Reply, text_of
from titan_rl.agents.tools import Schema
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.types import Finish, Prompt


class Delta(NamedTuple):
    """A context, as a change to the tokens before: those of the prompt, or of the last turn with what was sampled."""

    kept: int  # leading tokens that stay; fewer than there are: a new branch
    new: list[int]


class Renderer(Protocol):
    """Turns observations into tokens, and sampled tokens into a reply."""

    def open(self, prompt: Prompt, observation: Observation, tools: Sequence[Schema]) -> Delta:
        """Return the first context, relative to the prompt's tokens."""
        ...

    def extend(self, tokens: Sequence[int], finish: Finish, observation: Observation) -> Delta:
        """Return the next context after `tokens`, whose last ones were sampled."""
        ...

    def reply(self, tokens: Sequence[int], finish: Finish) -> Reply: ...


class PlainText:
    """A conversation without a chat template: observations follow what was sampled as they are."""

    def __init__(self, tokenizer: TextTokenizer, ends: Sequence[int]) -> None:
        """`ends`: the tokens that end a turn."""
        self._tokenizer, self._ends = tokenizer, frozenset(ends)

    @classmethod
    def load(cls, folder: Path, ends: Sequence[int]) -> "PlainText":
        tokenizer = TextTokenizer.load(folder)
        tokenizer.tokenizer.encode_special_tokens = True
        return cls(tokenizer, ends or tokenizer.eos_ids)

    def open(self, prompt: Prompt, observation: Observation, tools: Sequence[Schema]) -> Delta:
        return Delta(len(prompt.tokens), self._tokenizer.encode(text_of(observation)))

    def extend(self, tokens: Sequence[int], finish: Finish, observation: Observation) -> Delta:
        end = [] if tokens and tokens[-1] in self._ends else [self._tokenizer.eos]  # of a turn that was cut off
        return Delta(len(tokens), end + self._tokenizer.encode(text_of(observation)))

    def reply(self, tokens: Sequence[int], finish: Finish) -> Reply:
        ended = bool(tokens) and tokens[-1] in self._ends
        text = self._tokenizer.decode(tokens[:-1] if ended else tokens)
        return Reply(text, tokens, finish, message={"role": "assistant", "content": text})
