"""What both loops of bench_peer.py compute: model, batch, prompts and reward. Standard library only.

Prompts are sums of two numbers with two digits, one token per character. Weights are random, so that no answer is right
and the reward counts digits: advantages differ, and every sample is trained on.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.step_shapes import SHAPES as MODELS
from bench.step_shapes import Shape, share_of_digits

reward = share_of_digits
"""The reward of both loops: the share of an answer's characters that are digits."""
LR = 1e-6
"""Keeps the weights random: once a policy repeats itself, titan_rl computes its equal answers once."""


@dataclass(frozen=True, slots=True)
class PeerShape:
    model: Shape  # its sizes only; the batch is below
    tied: bool  # one weight for the embedding and the head
    groups: int
    group_size: int
    new_tokens: int
    question: str
    threads: int  # in each process that computes
    warm_up: int  # steps that the median leaves out
    steps: int  # in a timed run, warm-up included

    @property
    def samples(self) -> int:
        return self.groups * self.group_size

    @property
    def prompt(self) -> int:
        """Tokens of a prompt: BOS and one per character."""
        return 1 + len(self.question.format(10, 10))

    @property
    def row(self) -> int:
        """Tokens of the row that holds a whole step, if every answer has its full length."""
        return self.samples * (self.prompt + self.new_tokens - 1)

    def questions(self, seed: int) -> Iterator[str]:
        draw = random.Random(seed)
        while True:
            yield self.question.format(draw.randrange(10, 100), draw.randrange(10, 100))


SHAPES = {
    "toy": PeerShape(  # 0.8M parameters
        model=MODELS["grpo_llama"],
        tied=False,
        groups=32,
        group_size=4,
        new_tokens=8,
        question="{}+{}=",
        threads=1,
        warm_up=4,
        steps=30,
    ),
    "smollm2": PeerShape(  # the shape of SmolLM2-135M, with the prompts' length and the batch of grpo_smollm2
        model=MODELS["smollm2"],
        tied=True,
        groups=8,
        group_size=8,
        new_tokens=16,
        question="in digits, {} plus {} is ..=",
        threads=2,
        warm_up=1,
        steps=3,
    ),
}
