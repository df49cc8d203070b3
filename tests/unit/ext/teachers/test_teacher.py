"""A teacher's columns and metrics, through a learner."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.counting_meshes import Mesh, learner_of
from titan_rl.config.auto import on_device
from titan_rl.config.sections import AlgorithmSection, Config, TrainingSection
from titan_rl.ext.teachers.privileged import exchanged
from titan_rl.train.learner import Learner
from titan_rl.wire.reports import StepStats
from titan_rl.wire.types import Batch, Rows, Sample, entries


def reads(learns: Learner, privileged: Sequence[Sample | None]) -> None:
    """Let the teacher read these samples in place of the policy's."""
    teacher: Any = learns.teacher
    teacher._prompts = SimpleNamespace(samples=lambda groups, samples: privileged)


async def test_a_teachers_log_probs_of_the_answers_that_have_a_context(tmp_path: Path) -> None:
    """One answer has none, and the prompt of another is too long: both get their sampling log-probs, and no signal."""
    a = AlgorithmSection(advantage="teacher", teacher_weights="average", teacher_context=["answer"], normalize="none")
    config = on_device(Config(algorithm=a, training=TrainingSection(seq_len=8, local_batch_size=1)), "cpu")
    asked: list[tuple[int, str]] = []

    class Scores(Mesh):
        async def scores(self, batches: list[Batch], temperature: float, frozen_role: str, top: int) -> Any:
            rows = [rows for batch in batches for rows in batch.microbatches]
            asked.append((sum(int((each.sequences >= 0).sum()) for each in rows), frozen_role))
            return [[each.targets.astype("float32") for each in batch.microbatches] for batch in batches], [0]

        async def step(self, updates: Any) -> StepStats:
            return StepStats(0.0, 0.0, 0.0, 1, 1.0)

    learns, _ = learner_of(tmp_path, config, Scores(tmp_path))
    samples = [Sample([1, 2, 5, 6], [0, 0, 1, 1], {"behaviour": [0, 0, -0.5, -0.25]}, 2) for _ in range(3)]
    reads(learns, [exchanged(samples[0], [1, 2], [1, 3, 3, 2]), None, exchanged(samples[2], [1, 2], [1] * 8)])
    judged = await learns.judge(samples)
    assert asked == [(5, "average")]
    assert [list(s.columns["teacher"]) for s in judged] == [[0, 0, 5, 6], [0, 0, -0.5, -0.25], [0, 0, -0.5, -0.25]]
    await learns.accumulate([s.with_columns(advantage=[0.0] * 4) for s in judged])
    metrics = (await learns.update()).metrics
    assert metrics["distill/covered"] == metrics["distill/too_long"] == pytest.approx(1 / 3)
    assert metrics["distill/gain"] == pytest.approx((5.5 + 6.25) / 2)
    await learns.accumulate([s.with_columns(advantage=[0.0] * 4) for s in judged])
    assert "distill/covered" not in (await learns.update()).metrics


@pytest.mark.parametrize("context", [["answer"], []])
async def test_a_teachers_top_tokens_come_with_its_log_probs(tmp_path: Path, context: list[str]) -> None:
    """The rank of token t answers with t's log-prob -t / 8, then with the tokens t + 1 and t + 2. A sample without a
    context has unknown ones."""
    a = AlgorithmSection(
        advantage="teacher",
        teacher_weights="average" if context else "folder",
        teacher_context=context,
        normalize="none",
        distill_top_k=2,
    )
    config = on_device(Config(algorithm=a, training=TrainingSection(seq_len=16, local_batch_size=1)), "cpu")

    class Scores(Mesh):
        async def scores(self, batches: list[Batch], temperature: float, frozen_role: str, top: int) -> Any:
            def answered(rows: Rows) -> np.ndarray:
                ids = rows.targets[rows.mask > 0][:, None] + np.arange(1 + top)
                return entries(ids, -ids / 8)

            return [[answered(rows) for rows in batch.microbatches] for batch in batches], [0]

        async def step(self, updates: Any) -> StepStats:
            assert [rows.extras["top"]["id"].tolist() for batch in updates[0] for rows in batch.microbatches] == packed
            return StepStats(0.0, 0.0, 0.0, 1, 1.0)

    learns, _ = learner_of(tmp_path, config, Scores(tmp_path))
    samples = [
        Sample(t, [0] * 2 + [1] * (len(t) - 2), {"behaviour": np.full(len(t), -0.5)}, 2)
        for t in ([1, 2, 5], [1, 2, 7, 8, 9], [1, 2, 3])
    ]
    if context:
        reads(learns, [*(exchanged(s, [1, 2], [1, 3, 3, 2]) for s in samples[:2]), None])
    judged = await learns.judge(samples)
    last = ([0, 0, -0.5], [[-1, -1]]) if context else ([0, 0, -3 / 8], [[4, 5]])
    expected = [([0, 0, -5 / 8], [[6, 7]]), ([0, 0, -7 / 8, -1, -9 / 8], [[8, 9], [9, 10], [10, 11]]), last]
    for sample, (logprobs, ids) in zip(judged, expected, strict=True):
        assert list(sample.columns["teacher"]) == logprobs
        assert sample.extras["top"]["id"].tolist() == ids
    packed = [[row for at in (1, 0, 2) for row in expected[at][1]]]  # the longest sample is first in a row
    await learns.accumulate([s.with_columns(advantage=np.zeros(len(s.tokens))) for s in judged])
    metrics = (await learns.update()).metrics
    top = [row for _, rows in expected for row in rows if row[0] > 0]
    assert metrics["distill/teacher_mass"] == pytest.approx(np.exp(-np.array(top) / 8).sum(1).mean())
    assert ("distill/gain" in metrics) == bool(context)
