"""Figures of README.md: what a GRPO run explores with TorchTitan's seeds, before and after the change.

    python docs/upstream/seed-per-rollout-turn/measure.py

A policy is one softmax over 64 tokens, and the reward is 1 for one of them. Tokens are drawn by vLLM's own sampler,
with one generator per request, as vLLM does for seeded requests.
"""

import hashlib
from collections.abc import Callable

import torch
from vllm.v1.sample.ops.topk_topp_sampler import random_sample

VOCAB, GROUP, GROUPS, STEPS, RATE = 64, 8, 16, 60, 4.0
BASE = 42


def shared(group: int, sibling: int) -> int:
    """Return the seed before the change."""
    return BASE + sibling


def derived(group: int, sibling: int) -> int:
    """Return the seed after it, for a rollout of one turn."""

    def derive(seed: int, *ids: int) -> int:
        return int.from_bytes(hashlib.sha256(repr((seed, *ids)).encode()).digest()[:8], "big") >> 1

    return derive(derive(BASE, group, sibling), 0)


def draw(logits: torch.Tensor, seeds: list[int]) -> torch.Tensor:
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}
    return random_sample(logits.softmax(-1).repeat(len(seeds), 1), generators)


def learns(goal: int, seed: Callable[[int, int], int]) -> bool:
    """Return whether the policy chooses the rewarded token in most draws at the end."""
    logits = torch.zeros(VOCAB)
    for step in range(STEPS):
        groups = range(step * GROUPS, (step + 1) * GROUPS)
        tokens = draw(logits, [seed(group, sibling) for group in groups for sibling in range(GROUP)])
        rewards = (tokens == goal).float().view(GROUPS, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        gradient = torch.zeros(VOCAB).index_add(0, tokens, advantages) - advantages.sum() * logits.softmax(-1)
        logits += RATE * gradient / len(tokens)
    return bool(logits.softmax(-1)[goal] > 0.5)


def error(seed: Callable[[int, int], int], spread: float) -> float:
    """Return the error of a step's mean reward, which is 1 for eight of the tokens. Each prompt has its logits, drawn
    from a normal distribution of the width `spread`."""
    errors = []
    noise = torch.Generator().manual_seed(0)
    for step in range(50):
        sampled, expected = [], []
        for group in range(step * GROUPS, (step + 1) * GROUPS):
            logits = spread * torch.randn(VOCAB, generator=noise)
            tokens = draw(logits, [seed(group, sibling) for sibling in range(GROUP)])
            sampled.append((tokens < 8).float().mean())
            expected.append(logits.softmax(-1)[:8].sum())
        errors.append(torch.stack(sampled).mean() - torch.stack(expected).mean())
    return float(torch.stack(errors).square().mean().sqrt())


def main() -> None:
    for name, seed in (("before", shared), ("after", derived)):
        tokens = draw(torch.zeros(VOCAB), [seed(group, sibling) for group in range(200) for sibling in range(GROUP)])
        print(f"{name}: {len(set(tokens.tolist()))} of {VOCAB} tokens in {len(tokens)} draws")
        print(f"{name}: {sum(learns(goal, seed) for goal in range(VOCAB))} of {VOCAB} goals learned")
        for spread in (0.0, 1.0, 2.0):
            print(f"{name}: error of a step's mean reward {error(seed, spread):.3f}, prompts differ by {spread}")


if __name__ == "__main__":
    main()
