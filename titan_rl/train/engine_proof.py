"""Proves, when an attempt begins, that the engines compute what the trainers do.

    prompt ── every replica ──> sampled tokens, their log-probs ──┐
                                └── trainers' scores ─────────────┴── mean difference <= tolerance

Checksums compare bytes. An engine that packs, transposes or derives its weights when it loads them can hold the right
bytes and still compute something else, which every sample would then suffer from.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from titan_rl.config.sections import Config
from titan_rl.preflight.plan import Setup
from titan_rl.wire.errors import RunError
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Completion, Generates, Request, Sample, Sampling

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Largest mean difference, by dtype. Sound engines: below 1e-5 in float32, 3e-3 to 3e-2 in 16 bits."""
REMEDY = "If this is rounding, raise weight_sync.gap_tolerance."
MOST_READ = 64  # tokens of the prompt
SAMPLES, SAMPLED = 4, 8  # of each replica; tokens of each. Short, because a step of an engine has a fixed cost


class Continuation(NamedTuple):
    """What an engine sampled."""

    read: list[int]
    completion: Completion

    @property
    def sample(self) -> Sample:
        said = self.completion.tokens
        return Sample([*self.read, *said], [0] * len(self.read) + [1] * len(said))


def tolerance_of(config: Config) -> float:
    """Return the largest mean difference that is rounding, by the coarsest dtype of both sides."""
    dtypes = config.generator.dtype, config.training.dtype, config.training.mixed_precision_param
    return config.weight_sync.gap_tolerance or max(TOLERANCES[dtype] for dtype in dtypes)


async def continuations(setup: Setup, generators: Generates, replicas: int) -> list[Continuation]:
    """Let every replica continue a prompt of the task. It begins with EOS, as no other prompt does, so that what it
    leaves in the prefix cache is read by no other: a resumed run must stay equal to one that was not interrupted."""
    config, task, tokenizer = setup.config, setup.task, setup.tokenizer
    room = min(config.generator.max_model_len or config.training.seq_len, config.training.seq_len)
    prompt = task.prompt((task.train or task.heldout)[0], 0, tokenizer).tokens
    read = [tokenizer.eos, *prompt][: max(1, min(MOST_READ, room - SAMPLED))]
    temperature = config.rollout.temperature if config.algorithm.kind == "rl" else 1.0  # as in Learner.scores
    sampling = Sampling(max(1, min(SAMPLED, room - len(read))), temperature)

    async def asked(replica: int) -> list[Continuation]:
        seeds = [derive(config.debug.seed, "engine proof", replica, k) % 2**31 for k in range(SAMPLES)]
        found = await generators.generate(Request(f"engine-proof-{replica}", read, seeds, sampling))
        return [Continuation(read, completion) for completion in found]

    return [each for found in await asyncio.gather(*map(asked, range(replicas))) for each in found]


def gap_of(found: Sequence[Continuation], scores: Sequence[np.ndarray], config: Config) -> float:
    """Return the mean difference of the log-probs. Raise RunError if it is more than rounding. Trainers whose own
    numbers are not finite are another matter: the evaluation or the first step reports it."""
    trained = np.concatenate([score[len(each.read) :] for each, score in zip(found, scores, strict=True)])
    sampled = np.concatenate([each.completion.logprobs for each in found])
    if not np.isfinite(trained).all():
        return 0.0
    gaps, tolerance = np.abs(trained - sampled), tolerance_of(config)
    gap = float(gaps.mean())
    if gap <= tolerance:
        return gap
    training = config.training
    raise RunError(
        f"the generators compute something else than the trainers: their log-probs differ by {gap:.2g} on average",
        f"Expected at most {tolerance:g} over {len(gaps)} tokens sampled after the first weight sync, found {gap:.3g} "
        f"(largest {gaps.max():.3g}), with generator.dtype = {config.generator.dtype}, training.dtype = "
        f"{training.dtype}, training.mixed_precision_param = {training.mixed_precision_param}. Both hold the same "
        "bytes, so the engine packs, transposes or derives weights when it loads them, or computes another model. "
        f"Nothing was trained. {REMEDY}",
    )
