"""The trainer's half of exact mode, on models of TorchTitan's parts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.whole_model import whole_model
from titan_rl.actors.titan.model import DeviceRows, TitanModel, local
from titan_rl.actors.titan.objectives import Objectives
from titan_rl.actors.titan.reduction import Reduction, finish
from titan_rl.batch.packing import pack, unpack
from titan_rl.config.choices import Family
from titan_rl.config.sections import AlgorithmSection, Config, DebugSection, Dtype, RolloutSection, TrainingSection
from titan_rl.wire.model_families import FAMILIES
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.reports import Difference
from titan_rl.wire.types import Batch, Sample

CPU = torch.device("cpu")
TEMPERATURE = 0.7


def shape(family: Family) -> ModelShape:
    return ModelShape(
        family=family,
        vocab_size=61,
        dim=36,
        n_layers=2,
        n_heads=3,
        n_kv_heads=1,
        head_dim=12,
        hidden_dim=89,
        max_seq_len=256,
        rope_theta=10000.0,
        sliding_window=20 if family == "mistral" else 0,
        norm_eps=1e-5,
        tied=False,
    )


def model(family: Family, compute: Dtype = "float32", *, exact: bool = True) -> TitanModel:
    config = Config(
        training=TrainingSection(seq_len=200),
        debug=DebugSection(exact=exact),
        rollout=RolloutSection(temperature=TEMPERATURE),
        algorithm=AlgorithmSection(name="grpo"),
    )
    return whole_model(shape(family), config, compute=compute)


def samples() -> list[Sample]:
    """Return three prompts of four answers each, of very different lengths."""
    draw, found = np.random.default_rng(0), []
    for prompt in (7, 30, 150):
        start = draw.integers(3, 60, prompt)
        for answer in (1, 9, 17, 40):
            tokens = np.concatenate([start, draw.integers(3, 60, answer)])
            found.append(Sample(tokens, [0] * prompt + [1] * answer, {}, prompt))
    return found


def scores(on: TitanModel, given: list[Sample], *, rows: int = 1, share: bool = False) -> list[np.ndarray]:
    batches = pack(given, shards=1, seq_len=200, rows_per_microbatch=rows, pad_id=0, share=share)
    answers = [[on.score(each, temperature=TEMPERATURE) for each in batch.microbatches] for batch in batches]
    return [
        x[len(s.tokens) - int(np.sum(s.mask)) :] for x, s in zip(unpack(batches, answers, given), given, strict=True)
    ]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", [name for name, parts in FAMILIES.items() if not parts.experts])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_log_prob_has_the_same_bits_in_any_row(family: Family, compute: Dtype) -> None:
    on, given = model(family, compute), samples()
    alone = [scores(on, [each])[0] for each in given]
    for packed in (scores(on, given), scores(on, given, rows=3), scores(on, given, rows=2, share=True)):
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(packed, alone, strict=True))
    plain = scores(model(family, compute, exact=False), given)
    gap = np.abs(np.concatenate(plain) - np.concatenate(alone))
    assert 0 < gap.mean() < (1e-6 if compute == "float32" else 0.05)


def update(on: TitanModel, given: list[Sample]) -> tuple[Any, torch.Tensor]:
    """Return the step's statistics, and the gradient."""
    (batch,) = pack(given, shards=1, seq_len=200, rows_per_microbatch=2, pad_id=0, share=True)
    on.model.zero_grad()
    measured = []
    for rows in batch.microbatches:
        loss, found = Objectives(on, on.config).policy(DeviceRows.of(rows, CPU), batch)
        loss.backward()
        measured.append(found)
    reduction = Reduction.of(measured, Batch([], batch.tokens, batch.sequences), None)
    gradient = torch.cat([local(p.grad).flatten() for p in on.model.parameters() if p.grad is not None])
    return finish([reduction], lr=0.0, seconds=1.0, busy=1.0), gradient


def with_columns(on: TitanModel, given: list[Sample]) -> list[Sample]:
    """Return the samples as the generators gave them: half of each one's tokens are of older weights."""
    found = []
    for number, (sample, scored) in enumerate(zip(given, scores(on, given), strict=True)):
        old = len(sample.tokens) - len(scored) // 2 - 1  # an answer of one token has no old ones
        behaviour, current = np.zeros(len(sample.tokens), np.float32), np.full(len(sample.tokens), number)
        behaviour[-len(scored) :] = scored
        behaviour[: old - 1] -= 0.25
        current[: old - 1] = -1
        found.append(sample.with_columns(behaviour=behaviour, current=current, advantage=np.ones(len(behaviour))))
    return found


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_only_a_token_of_the_trained_version_that_differs_is_reported(family: Family) -> None:
    on, given = model(family), with_columns(model(family), samples())
    stats, gradient = update(on, given)
    assert stats.difference is None
    assert stats.metrics["exact/gap_max"] == 0
    assert 0 < stats.metrics["exact/compared"] < 1
    assert stats.metrics["logprob_gap/max"] > 0.2
    _, plain = update(model(family, exact=False), given)
    assert (gradient - plain).norm() < 1e-4 * plain.norm()

    behaviour = np.asarray(given[6].columns["behaviour"], np.float32).copy()
    was, behaviour[-2] = behaviour[-2], np.nextafter(behaviour[-2], np.float32(0))
    planted = [*given[:6], given[6].with_columns(behaviour=behaviour), *given[7:]]
    stats, _ = update(on, planted)
    place = len(given[6].tokens) - 2
    assert stats.difference == Difference(abs(was - behaviour[-2]), 6, place, float(was), float(behaviour[-2]))


def test_a_value_head_has_the_exact_body() -> None:
    valued = replace(shape("llama3"), head="value", tied=False)
    config = Config(training=TrainingSection(seq_len=200), debug=DebugSection(exact=True))
    on, given = whole_model(valued, config), samples()
    with torch.no_grad():
        on.model.lm_head.weight.fill_(0.1)
    alone = scores(on, given[3:4])[0]
    assert np.abs(alone).min() > 0
    np.testing.assert_allclose(scores(on, given)[3], alone, rtol=1e-5)
