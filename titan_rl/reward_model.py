"""Who judges a group's completions: a rule, or a reward model on its mesh."""

import traceback
from collections.abc import Sequence

import numpy as np

from titan_rl.config import Config
from titan_rl.data import to_judge
from titan_rl.meshes.faults import RunError
from titan_rl.meshes.roles import FrozenMesh
from titan_rl.packing import pack, unpack
from titan_rl.rewards import Reward
from titan_rl.rollouts import Judge
from titan_rl.types import Completion, Prompt, Sample


def by_rule(reward: Reward) -> Judge:
    async def judge(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        try:
            return [reward(prompt, text) for text in texts]
        except Exception as error:
            raise RunError(
                f"the reward failed on prompt {prompt.id}: {type(error).__name__}: {error}", traceback.format_exc()
            ) from None

    return judge


def by_model(mesh: FrozenMesh, config: Config, pad: int) -> Judge:
    """One call a group: while a group is judged others are still being sampled, and a score depends on its own group
    alone, so the same run twice has the same rewards to the last bit."""

    async def judge(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[float]:
        samples = [to_judge([*prompt.tokens, *completion.tokens], pad) for completion in completions]
        batches = pack(
            samples,
            shards=mesh.dp,
            seq_len=config.training.seq_len,
            rows_per_microbatch=config.training.local_batch_size,
            pad_id=pad,
        )
        answers, _ = await mesh.scores(batches)
        return scores_of(samples, unpack(batches, answers, samples))

    return judge


def scores_of(samples: Sequence[Sample], values: Sequence[np.ndarray]) -> list[float]:
    """Each sequence's score: the value under its mask."""
    return [float(value[-1]) for _, value in zip(samples, values, strict=True)]


def accuracy(scores: Sequence[float]) -> float:
    """The share of (chosen, rejected) pairs whose chosen member scores higher."""
    return float(np.mean(np.asarray(scores[0::2]) > np.asarray(scores[1::2])))
