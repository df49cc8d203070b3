"""The batches that bench_step.py gives to every way. Standard library only: TRL's interpreter imports this too.

The lengths of answers are set, not sampled, so every way computes the same tokens. smollm2 has pretrained weights and
prompts as in grpo_smollm2; the other shapes have random weights.
"""

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titan_rl.ext.agents.episodes import Reply

SYSTEM_PROMPT = "Answer with just the number."
QUESTION = "Calculate {} + {}."
PROMPTS = 1000  # in a run's data; more than its steps need
TOOL_SAYS = "299114="


@dataclass(frozen=True, slots=True)
class Shape:
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    groups: int
    group_size: int
    shortest: int  # tokens of the shortest answer
    longest: int
    seq_len: int  # tokens of a packed row
    chunks: int  # padded batches of bare torch, sorted by length: one where all answers have the same
    lr: float
    warm_up: int  # steps that are not measured
    steps: int  # measured in each round
    read: int = 0  # tokens of a tool's answer, after which a second turn follows; 0: there is one turn
    second: int = 0  # tokens of the second turn
    prompt: int = 7  # tokens of a prompt: BOS and "47+38="
    pretrained: str = ""  # a model of titan_rl's catalog, whose prompts are chats; empty: random weights

    @property
    def samples(self) -> int:
        return self.groups * self.group_size

    @property
    def tokens(self) -> int:
        """Tokens of a step, prompts included once per sample. Equal in every step."""
        return self.samples * (self.prompt + self.read) + self.sampled

    @property
    def sampled(self) -> int:
        """Tokens that a step samples."""
        return self.samples * self.second + sum(self.lengths(0))

    def lengths(self, step: int) -> list[int]:
        """Return the length of each sample's first turn, group by group: evenly spaced, and shuffled for each step."""
        span = (self.longest - self.shortest) / max(1, self.samples - 1)
        lengths = [self.shortest + round(span * i) for i in range(self.samples)]
        random.Random(step).shuffle(lengths)
        return lengths


SHAPES = {
    "grpo_llama": Shape(
        dim=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=384,
        vocab_size=64,
        groups=16,
        group_size=16,
        shortest=4,  # three digits and EOS
        longest=4,
        seq_len=128,
        chunks=1,
        lr=8e-4,
        warm_up=2,
        steps=12,
    ),
    "20M": Shape(
        dim=384,
        n_layers=8,
        n_heads=6,
        n_kv_heads=6,
        hidden_dim=1536,
        vocab_size=4096,
        groups=4,
        group_size=4,
        shortest=20,
        longest=256,
        seq_len=512,
        chunks=4,
        lr=1e-4,
        warm_up=1,
        steps=2,
    ),
    "smollm2": Shape(
        dim=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        hidden_dim=1536,
        vocab_size=49152,
        groups=8,
        group_size=8,
        shortest=16,
        longest=16,
        seq_len=128,
        chunks=1,
        lr=1e-5,
        warm_up=1,
        steps=3,
        prompt=29,
        pretrained="smollm2",
    ),
}
SHAPES["calc"] = replace(SHAPES["grpo_llama"], shortest=8, longest=8, read=8, second=7)
"""A call such as "?347*862", the end token and the calculator's "299114=", the product and its end: as calc_llama."""


def chats() -> list[list[dict[str, str]]]:
    """Return prompts as chat messages. SmolLM2 reads every digit as one token, so numbers of two digits make prompts of
    one length."""
    draw = random.Random(0)
    questions = [QUESTION.format(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(PROMPTS)]
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return [[system, {"role": "user", "content": question}] for question in questions]


class Tool:
    """Answers the first turn as the calculator does, and ends after the second."""

    async def reset(self) -> None:
        self._turns = 0

    async def step(self, reply: "Reply") -> tuple[str, float, bool, dict[str, float]]:
        self._turns += 1
        done = self._turns == 2
        return "" if done else TOOL_SAYS, share_of_digits(reply.text) * done, done, {}


def share_of_digits(completion: str) -> float:
    """Reward some of the random answers, so that advantages differ."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))
