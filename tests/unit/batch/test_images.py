"""Images stay with their documents: in rows, in the prompts that samples share, and in the samples of rollouts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from support.packed_rows import PAD, microbatches
from titan_rl.batch.experience import samples_of
from titan_rl.batch.packing import pack
from titan_rl.config.sections import AlgorithmSection
from titan_rl.wire.types import Batch, Branch, Completion, Group, Prompt, Rollout, Sample, Turn

IMAGE = 50  # the placeholder's id
Case = tuple[list[Sample], int, int]  # samples, shards, rows per microbatch


def drawn(seed: int) -> Case:
    """Return groups of samples, some of whose prompts have equal tokens and different images."""
    rng = np.random.default_rng(seed)
    samples = list[Sample]()
    for group in range(rng.integers(1, 7)):
        count = int(rng.integers(0, 3))
        images = tuple(f"{group}{k}" * 32 for k in range(count)) if rng.random() < 0.8 else ("a" * 64,) * count
        prompt = [1, *[IMAGE, IMAGE, 2] * count, *[3] * int(rng.integers(1, 3))]
        for _ in range(rng.integers(1, 5)):
            answer = rng.integers(4, 6, rng.integers(1, 4)).tolist()
            mask = [0] * len(prompt) + [1] * len(answer)
            sample = Sample([*prompt, *answer], mask, {}, len(prompt), images=images)
            samples.append(sample.with_columns(behaviour=[0.0] * len(mask)))
    return samples, int(rng.integers(1, 3)), int(rng.integers(1, 4))


def packed(case: Case, share: bool) -> list[Batch]:
    samples, shards, rows = case
    return pack(samples, shards=shards, seq_len=48, rows_per_microbatch=rows, pad_id=PAD, share=share)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_each_target_is_predicted_after_its_own_images(seed: int, share: bool) -> None:
    case = drawn(seed)
    samples, trained = case[0], Counter[int]()
    for rows in microbatches(packed(case, share)):
        images: dict[int, str] = {}  # place of a placeholder -> its image
        length = rows.tokens.shape[1]
        for row, tokens in enumerate(rows.tokens):
            places = [row * length + int(at) for at in np.flatnonzero(tokens == IMAGE)]
            given = rows.images[row] if rows.images else ()
            assert len(places) == 2 * len(given), "two placeholders for each image"
            images |= zip(places, np.repeat(given, 2).tolist(), strict=True)
        seen = {
            place: [images[at] for at in [*range(prefix, prefix + size), *range(begin, place + 1)] if at in images]
            for begin, length, prefix, size in rows.segments.tolist()
            for place in range(begin, begin + length)
        }
        for target in np.flatnonzero(rows.mask).tolist():
            owner = int(rows.samples[rows.sequences.ravel()[target]])
            found = seen[int(rows.places.ravel()[target])]
            assert found == np.repeat(samples[owner].images, 2).tolist()
            trained[owner] += 1
    assert trained == {i: sum(sample.mask) for i, sample in enumerate(samples)}


def test_prompts_of_equal_tokens_and_different_images_share_nothing() -> None:
    one = Sample([*[IMAGE] * 20, 4, 5], [*[0] * 20, 1, 1], {"behaviour": [0.0] * 22}, 20, images=("a" * 64,))
    other = replace(one, images=("b" * 64,))
    for samples, computed in (([one] * 4, 1), ([one, other] * 2, 2)):
        (batch,) = packed((samples, 1, 1), share=True)
        (rows,) = batch.microbatches
        assert sum(row.count("a" * 64) + row.count("b" * 64) for row in rows.images) == computed


def test_rows_without_images_carry_none() -> None:
    samples = [replace(sample, images=()) for sample in drawn(0)[0]]
    assert all(not rows.images for rows in microbatches(packed((samples, 1, 1), share=True)))


def test_rollouts_pass_the_images_of_their_prompt_on() -> None:
    prompt = Prompt(0, "?", [1, IMAGE], "", images=("a" * 64,))
    answers = [Completion([4], [0.0], [0], "stop"), Completion([5], [0.0], [0], "stop")]
    rollouts = [Rollout([Branch([Turn(prompt.tokens, each)])], "", float(k)) for k, each in enumerate(answers)]
    samples = samples_of(
        [Group(prompt, rollouts), Group(replace(prompt, id=1, images=()), rollouts)], AlgorithmSection()
    )
    assert [sample.images for sample in samples] == [("a" * 64,)] * 2 + [()] * 2
