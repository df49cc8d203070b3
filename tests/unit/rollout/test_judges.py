"""Who judges: a rule at once, or a reward model's values, read where a sequence ends."""

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.batch.packing import pack, unpack
from titan_rl.config.sections import Config
from titan_rl.rollout.judges import by_model, ranks_right, scores_of
from titan_rl.tasks.judging import by_rule
from titan_rl.tasks.prompts import to_judge
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Batch, Branch, Completion, Judgement, Prompt, Rollout, Turn

PAD = 99


async def test_a_rule_judges_each_text_by_its_own_prompt() -> None:
    judge = by_rule(lambda prompt, text, messages: float(text == prompt.answer))
    assert (await judge(Prompt(0, "", [1], "b"), [Rollout([], text, math.nan) for text in ("a", "b", "B")])) == [
        0.0,
        1.0,
        0.0,
    ]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=24), st.integers(1, 4), st.integers(31, 64), st.integers(1, 3))
def test_a_score_is_the_value_where_the_last_token_was_read(
    lengths: list[int], shards: int, seq_len: int, rows: int
) -> None:
    """Of a model whose value is the running sum of its document's tokens, the score is the sum of the sequence."""
    samples = [to_judge(list(range(1, n + 1)), PAD) for n in lengths]
    batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows, pad_id=PAD)
    answers = [
        [np.where(r.sequences >= 0, (r.positions + 1) * (r.positions + 2) / 2, -1) for r in batch.microbatches]
        for batch in batches
    ]
    assert scores_of(samples, unpack(batches, answers, samples)) == [n * (n + 1) / 2 for n in lengths]
    assert sum(int(r.mask.sum()) for batch in batches for r in batch.microbatches) == len(lengths)


def test_a_reward_model_reads_the_branch_of_the_last_turn() -> None:
    """A model whose value is the running sum of its document's tokens."""

    class Summing:
        dp = 1

        async def scores(self, batches: Sequence[Batch]) -> tuple[list[list[np.ndarray]], list[int]]:
            sums = [[np.cumsum(rows.tokens, axis=1) for rows in batch.microbatches] for batch in batches]
            return sums, []

    def turn(context: list[int], token: int, index: int) -> Turn:
        return Turn(context, Completion([token], [0.0], [0], "stop"), index=index)

    single = Rollout([Branch([turn([1, 2], 3, 0)])], "", math.nan)
    forked = Rollout([Branch([turn([1], 10, 0), turn([20], 30, 2)]), Branch([turn([1], 40, 1)])], "", math.nan)

    async def judged(*rollouts: Rollout) -> Sequence[float | Judgement]:
        return await by_model(Summing(), Config(), PAD, 8)(Prompt(0, "", [1, 2], ""), rollouts)

    assert asyncio.run(judged(single)) == [6.0]
    assert asyncio.run(judged(forked)) == [61.0]


@pytest.mark.parametrize(
    ("scores", "share"), [([2.0, 1.0], 1.0), ([1.0, 2.0], 0.0), ([1.0, 1.0], 0.0), ([2, 1, 0, 5, 3, -3, 0, 0], 0.5)]
)
def test_accuracy_is_the_share_of_pairs_whose_chosen_member_scores_higher(scores: list[float], share: float) -> None:
    right = ranks_right(scores)
    assert sum(right) / len(right) == share


def test_scores_that_are_not_finite_have_no_accuracy() -> None:
    with pytest.raises(RunError, match="1 of 4 evaluated scores are not finite"):
        ranks_right([1.0, 0.0, float("nan"), 2.0])
