"""A user's parts: a task of squares, whose digits are written in reverse, a filter, an advantage and a loss."""

import random
from typing import Any

import numpy as np
import torch

from titan_rl import Group

Rows = list[dict[str, Any]]


def squares(seed: int, eval_size: int) -> tuple[Rows, Rows]:
    numbers = random.Random(seed).sample(range(100), 100)
    rows = [{"question": f"{n:02d}*{n:02d}=", "answer": f"{n * n:04d}"[::-1]} for n in numbers]
    return rows[eval_size:], rows[:eval_size]


def kept(group: Group) -> bool:
    return group.prompt.id % 5 > 1


def over_mean(rewards: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return [np.full(n, advantage) for n, advantage in zip(lengths, rewards - rewards.mean(), strict=True)]


def soft_clip(logprob: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor) -> Any:
    log_ratio = logprob - behaviour
    return -advantage * log_ratio.exp() + log_ratio.square(), {"moved": log_ratio.abs()}
