"""GSPO on rollouts of several branches: a sequence is one branch, sampled in one context."""

import math

import numpy as np
import pytest
import torch

from titan_rl.batch.experience import samples_of, with_advantages
from titan_rl.batch.packing import UpTo, pack, unpack
from titan_rl.config.presets import preset
from titan_rl.kernels.policy_loss import Tokens, ratio_of
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Turn

BEHAVIOUR = -1.0
MOVED = {1: 0.2, 2: -0.1, 3: 0.4, 4: 0.3, 5: 0.05}  # by token: what updates have changed its log-prob by since


def turn(index: int, read: list[int], *said: int) -> Turn:
    return Turn(read, Completion([*said], [BEHAVIOUR] * len(said), [0] * len(said), "stop"), index=index)


def rollout(reward: float, *branches: Branch) -> Rollout:
    return Rollout([*branches], "", reward)


@pytest.mark.parametrize(("shards", "rows"), [(1, 4), (1, 1), (2, 1)])
def test_each_branch_has_the_ratio_of_its_own_tokens_in_all_of_its_turns(shards: int, rows: int) -> None:
    """On any mesh: branches of one rollout may be in different microbatches and on different ranks."""
    forked = rollout(1.0, Branch([turn(0, [9, 9], 1, 2), turn(2, [8], 3)]), Branch([turn(1, [9, 9, 7], 4)]))
    other = rollout(0.0, Branch([turn(0, [9, 9], 5, 5)]))
    algorithm = preset("gspo")
    groups = [Group(Prompt(0, "", [9, 9], ""), [forked, other])]
    _, samples = with_advantages(groups, samples_of(groups, algorithm), algorithm)
    assert [s.sequence for s in samples] == [0, 0, 1]
    batches = pack(samples, shards=shards, seq_len=16, rows_per_microbatch=UpTo(rows), pad_id=0)
    answers: list[list[np.ndarray]] = []
    for batch in batches:
        answers.append([])
        for part in batch.microbatches:
            behaviour = torch.from_numpy(part.columns["behaviour"])
            moved = torch.tensor([[MOVED.get(int(target), 5.0) for target in row] for row in part.targets])
            tokens = Tokens(
                behaviour=behaviour,
                advantage=torch.from_numpy(part.columns["advantage"]),
                mask=torch.from_numpy(part.mask),
                weight=torch.from_numpy(part.weights),
                sequence=torch.from_numpy(part.sequences),
                sequences=len(part.samples),
            )
            answers[-1].append(
                ratio_of(behaviour + moved, behaviour, tokens.mask > 0, tokens, "sequence").exp().numpy()
            )
    first, second, third = (
        found[np.asarray(sample.mask) > 0]
        for found, sample in zip(unpack(batches, answers, samples), samples, strict=True)
    )
    assert first == pytest.approx([math.exp((0.2 - 0.1 + 0.4) / 3)] * 3)
    assert second == pytest.approx([math.exp(0.3)]), "the branch's ratio, not the rollout's"
    assert third == pytest.approx([math.exp(0.05)] * 2)
    advantages = [np.asarray(s.columns["advantage"])[np.asarray(s.mask) > 0] for s in samples]
    assert len({*advantages[0], *advantages[1]}) == 1, "but one advantage"
