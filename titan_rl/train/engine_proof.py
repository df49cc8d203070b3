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
from titan_rl.wire.parts import needed_part
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import IMAGES, Completion, Generates, ImagePlace, Request, Sample, Sampling

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Largest mean difference, by dtype. Sound engines: below 1e-5 in float32, 3e-3 to 3e-2 in 16 bits."""
QUANTIZED = {"none": 0.0, "int8": 0.2, "fp8": 0.5}
"""The same by generator.quantization."""
REMEDY = "If this is rounding, raise weight_sync.gap_tolerance."
PROMPT_TOKENS = 64  # at most
MOST_READ = 64  # rows among which the shortest prompt with images is looked for
SAMPLES, NEW_TOKENS = 4, 8  # per replica; per sample. Short, because a step of an engine has a fixed cost


class Continuation(NamedTuple):
    """Tokens that an engine sampled after a prompt."""

    prompt: list[int]
    completion: Completion
    images: tuple[ImagePlace, ...] = ()

    @property
    def sample(self) -> Sample:
        new = self.completion.tokens
        return Sample([*self.prompt, *new], [0] * len(self.prompt) + [1] * len(new), images=self.images)


def tolerance_of(config: Config) -> float:
    """Return the largest mean difference that rounding explains, by the coarsest numbers of both sides."""
    dtypes = config.generator.dtype, config.training.dtype, config.training.mixed_precision_param
    rounded = QUANTIZED[config.generator.quantization]
    return config.weight_sync.gap_tolerance or max(rounded, *(TOLERANCES[dtype] for dtype in dtypes))


async def sample_continuations(setup: Setup, generators: Generates, replicas: int) -> list[Continuation]:
    """Let every replica continue a prompt of the task. It begins with EOS, as no other prompt does, so that no other
    prompt finds it in the prefix cache: a resumed run must stay equal to one that was not interrupted. A prompt with
    images is whole, and a short one, if any of the first rows has some. Where only an environment shows images, a drawn
    one comes first."""
    config, task, tokenizer = setup.config, setup.task, setup.tokenizer
    room = min(config.generator.max_model_len or config.training.seq_len, config.training.seq_len)
    examples = [example for example in task.known[:MOST_READ] if example.images] or (task.train or task.heldout)[:1]
    first = min((task.prompt(e, 0, tokenizer) for e in examples), key=lambda prompt: len(prompt.tokens))
    if config.model.vision != "none" and config.rollout_code and not first.images:
        picture = needed_part("pictures of proofs", "model.vision")
        seen = await asyncio.to_thread(picture, first, setup.model_folder, setup.folder / IMAGES)
        if len(seen.tokens) + 1 + NEW_TOKENS <= room:
            first = seen
    most = len(first.tokens) + 1 if first.images else min(PROMPT_TOKENS, room - NEW_TOKENS)
    prompt = [tokenizer.eos, *first.tokens][: max(1, most)]
    images = tuple(ImagePlace(name, 1 + begin) for name, begin in first.images)
    temperature = config.rollout.temperature if config.algorithm.kind == "rl" else 1.0  # as in Learner.scores
    sampling = Sampling(max(1, min(NEW_TOKENS, room - len(prompt))), temperature)

    async def sample(replica: int) -> list[Continuation]:
        seeds = [derive(config.debug.seed, "engine proof", replica, k) % 2**31 for k in range(SAMPLES)]
        request = Request(f"engine-proof-{replica}", prompt, seeds, sampling, images=images)
        return [Continuation(prompt, completion, images) for completion in await generators.generate(request)]

    by_replica = await asyncio.gather(*map(sample, range(replicas)))
    return [continuation for continuations in by_replica for continuation in continuations]


def logprob_gap(continuations: Sequence[Continuation], scores: Sequence[np.ndarray], config: Config) -> float:
    """Return the mean difference of the log-probs. Raise RunError if it is more than rounding. If the trainers' own
    numbers are not finite, return 0: the evaluation or the first step reports that."""
    pairs = zip(continuations, scores, strict=True)
    trained = np.concatenate([score[len(continuation.prompt) :] for continuation, score in pairs])
    sampled = np.concatenate([continuation.completion.logprobs for continuation in continuations])
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
        f"(largest {gaps.max():.3g}), with generator.dtype = {config.generator.dtype}, "
        f"generator.quantization = {config.generator.quantization}, training.dtype = "
        f"{training.dtype}, training.mixed_precision_param = {training.mixed_precision_param}. Both hold the same "
        "bytes, so the engine packs, transposes or derives weights when it loads them, or computes another model. "
        f"Nothing was trained. {REMEDY}",
    )
