"""Judges a group's rollouts by a reward model on its mesh. Reward functions: tasks/judging.py."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from titan_rl.batch.packing import UpTo, pack, unpack
from titan_rl.config.sections import Config
from titan_rl.tasks.prompts import to_judge
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Batch, Judge, Prompt, Rollout, Sample


class Scores(Protocol):
    """The part of a reward model's mesh that a judge needs."""

    @property
    def dp(self) -> int: ...

    async def scores(self, batches: Sequence[Batch]) -> tuple[list[list[np.ndarray]], list[int]]: ...


def by_model(mesh: Scores, config: Config, pad: int, rows: int | UpTo) -> Judge:
    """Judge by a reward model, one call per group, so that other groups are sampled meanwhile. A score depends only on
    its own group: repeating a run gives the same rewards to the last bit. `rows`: of a microbatch."""

    async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[float]:
        # A rollout is judged by the branch with its last turn.
        branches = [max(r.branches, key=lambda branch: branch.turns[-1].index) for r in rollouts]
        samples = [to_judge(branch.tokens, pad, len(branch.turns[0].context)) for branch in branches]
        batches = pack(
            samples,
            shards=mesh.dp,
            seq_len=config.training.seq_len,
            rows_per_microbatch=rows,
            pad_id=pad,
            share=True,
        )
        answers, _ = await mesh.scores(batches)
        return scores_of(samples, unpack(batches, answers, samples))

    return judge


def scores_of(samples: Sequence[Sample], values: Sequence[np.ndarray]) -> list[float]:
    """Return each sequence's score: the value under its mask."""
    return [float(value[-1]) for _, value in zip(samples, values, strict=True)]


def ranks_right(scores: Sequence[float]) -> list[bool]:
    """Return of each (chosen, rejected) pair whether its chosen member scores higher."""
    if bad := sum(not math.isfinite(score) for score in scores):
        raise RunError(f"{bad} of {len(scores)} evaluated scores are not finite: the weights are ruined")
    return [chosen > rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True)]
