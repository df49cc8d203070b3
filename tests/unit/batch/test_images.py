"""Images stay with their documents: in rows, in the prompts that samples share, and in the samples of rollouts."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from support.packed_rows import PAD, microbatches
from titan_rl.batch.experience import samples_of
from titan_rl.batch.packing import pack
from titan_rl.config.sections import AlgorithmSection
from titan_rl.wire.types import Batch, Branch, Completion, Group, ImagePlace, Prompt, Rollout, Sample, Turn

IMAGE = 50  # the placeholder's id
Case = tuple[list[Sample], int, int]  # samples, shards, rows per microbatch


def drawn(seed: int) -> Case:
    """Return groups of samples, some of whose prompts have equal tokens and different images. Some have a second turn,
    which an image may begin, and some sampled the run of placeholders that an image has."""
    rng = np.random.default_rng(seed)
    samples = list[Sample]()
    for group in range(rng.integers(1, 7)):
        count = int(rng.integers(0, 3))
        names = [f"{group}{k}" * 32 for k in range(count)] if rng.random() < 0.8 else ["a" * 64] * count
        prompt = [1, *[IMAGE, IMAGE, 2] * count, *[3] * int(rng.integers(1, 3))]
        images = tuple(ImagePlace(name, 1 + 3 * k) for k, name in enumerate(names))
        for _ in range(rng.integers(1, 5)):
            tokens, mask, seen = [*prompt], [0] * len(prompt), images
            for turn in range(rng.integers(1, 3)):
                if turn and rng.random() < 0.7:
                    seen = (*seen, ImagePlace(str(rng.integers(2)) * 64, len(tokens)))
                    tokens += [IMAGE, IMAGE]
                    mask += [0, 0]
                answer = rng.choice([4, 5, IMAGE], rng.integers(1, 4)).tolist()
                tokens += answer
                mask += [1] * len(answer)
            sample = Sample(tokens, mask, {}, len(prompt), images=seen)
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
            for name, begin in rows.images[row] if rows.images else ():
                assert tokens[begin : begin + 2].tolist() == [IMAGE, IMAGE]
                assert not {row * length + begin, row * length + begin + 1} & images.keys()
                images |= dict.fromkeys((row * length + begin, row * length + begin + 1), name)
        seen = {
            place: [images[at] for at in [*range(prefix, prefix + size), *range(begin, place + 1)] if at in images]
            for begin, length, prefix, size in rows.segments.tolist()
            for place in range(begin, begin + length)
        }
        for target in np.flatnonzero(rows.mask).tolist():
            owner = int(rows.samples[rows.sequences.ravel()[target]])
            place = int(rows.places.ravel()[target])
            position = int(rows.positions.ravel()[place])
            read = [name for name, begin in samples[owner].images if begin <= position]
            assert seen[place] == np.repeat(read, 2).tolist()
            trained[owner] += 1
    assert trained == {i: sum(sample.mask) for i, sample in enumerate(samples)}


def test_prompts_of_equal_tokens_and_different_images_share_nothing() -> None:
    images = (ImagePlace("a" * 64, 0),)
    one = Sample([*[IMAGE] * 20, 4, 5], [*[0] * 20, 1, 1], {"behaviour": [0.0] * 22}, 20, images=images)
    other = replace(one, images=(ImagePlace("b" * 64, 0),))
    for samples, computed in (([one] * 4, 1), ([one, other] * 2, 2)):
        (batch,) = packed((samples, 1, 1), share=True)
        (rows,) = batch.microbatches
        assert sum(map(len, rows.images)) == computed


def test_answers_of_equal_tokens_and_different_images_share_their_prompt_only() -> None:
    tokens, mask = [1] * 20 + [4, IMAGE, IMAGE, 5], [0] * 20 + [1, 0, 0, 1]
    one, other = (
        Sample(tokens, mask, {"behaviour": [0.0] * 24}, 20, images=(ImagePlace(name * 64, 21),)) for name in "ab"
    )
    for samples, computed, places in (([one] * 4, 1, 23), ([one, other] * 2, 2, 26)):
        (batch,) = packed((samples, 1, 1), share=True)
        (rows,) = batch.microbatches
        assert sum(map(len, rows.images)) == computed
        assert (rows.tokens != PAD).sum() == places


def test_rows_without_images_carry_none() -> None:
    samples = [replace(sample, images=()) for sample in drawn(0)[0]]
    assert all(not rows.images for rows in microbatches(packed((samples, 1, 1), share=True)))


def test_rollouts_pass_the_images_of_their_prompt_on() -> None:
    first, second = ImagePlace("a" * 64, 1), ImagePlace("b" * 64, 3)
    prompt = Prompt(0, "?", [1, IMAGE], "", images=(first,))
    answer = Completion([4], [0.0], [0], "stop")
    seen = Turn(prompt.tokens, answer, images=prompt.images)
    again = Turn([IMAGE], answer, index=1, images=(second,))
    rollouts = [Rollout([Branch([seen])], "", 0.0), Rollout([Branch([seen, again])], "", 1.0)]
    blind = Rollout([Branch([Turn([1, 3], answer)])], "", 0.0)
    groups = [Group(prompt, rollouts), Group(replace(prompt, id=1, images=()), [blind])]
    samples = samples_of(groups, AlgorithmSection())
    assert [sample.images for sample in samples] == [(first,), (first, second), ()]
    assert [np.asarray(sample.mask).tolist() for sample in samples] == [[0, 0, 1], [0, 0, 1, 0, 1], [0, 0, 1]]
    assert [np.asarray(sample.columns["image"]).tolist() for sample in samples] == [[1] * 3, [1] * 5, [0] * 3]
