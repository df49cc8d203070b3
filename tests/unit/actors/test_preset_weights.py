"""What a preset multiplies the score function of a stale token with, in the trainer's own objective."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_rl.actors.titan.objectives import Objectives
from titan_rl.config.algorithms import PRESETS
from titan_rl.config.presets import algorithm_of
from titan_rl.config.sections import (
    AlgorithmSection,
    Config,
    GeneratorSection,
    RolloutSection,
    TrainingSection,
)
from titan_rl.wire.types import Batch

ANSWERS, TOKENS = 512, 64
SHAPE = ANSWERS, TOKENS
FLOAT32, BFLOAT16 = Config(), Config(training=TrainingSection(mixed_precision_param="bfloat16"))
CLIPPED = {"dapo": (0.8, 1.28)}  # others: 0.8 and 1.2
RL = [name for name in PRESETS if AlgorithmSection(name=name).kind == "rl"]  # type: ignore[arg-type]
PPO_CLIP = [name for name in RL if PRESETS[name].keys().isdisjoint(("clip", "ratio", "pair_loss"))]
GATES = ["sapo", "dppo", "prob_diff", "gmpo", "luspo", "vespo", "kl_cov", "m2po"]  # clip_cov drops tokens at any ratio


def preset(name: str, lag: int, dtypes: Config = FLOAT32, **own: Any) -> AlgorithmSection:
    """Return the preset in a run with that lag and the dtypes of another config."""
    config = Config(
        rollout=RolloutSection(max_staleness_steps=lag), training=dtypes.training, generator=dtypes.generator
    )
    return algorithm_of({"name": name, **own}, config)


def normal(*shape: int, scale: float, seed: int) -> torch.Tensor:
    return scale * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weights(algorithm: AlgorithmSection, moved: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """Return the gradient of one update's objective by each token's log-prob, divided by the gradient at a ratio of 1.
    `moved`: current - sampling log-prob."""
    behaviour = -0.5 - torch.rand(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    logprob = (behaviour + moved).requires_grad_()
    model: Any = SimpleNamespace(logprobs=lambda *_, **__: (logprob, torch.zeros(SHAPE, dtype=torch.float64)))
    one = torch.ones(SHAPE, dtype=torch.float64)
    sequences = torch.arange(ANSWERS)[:, None].expand(SHAPE)
    columns = {"behaviour": behaviour, "advantage": advantage}
    rows: Any = SimpleNamespace(columns=columns, mask=one, weights=one, sequences=sequences, count=ANSWERS)
    batch = Batch([], 1, 1)  # only objectives of pairs read its numbers
    loss, _ = Objectives(model, Config(algorithm=algorithm)).policy(rows, batch)
    (gradient,) = torch.autograd.grad(loss, logprob)
    return -gradient / advantage


def clipped(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return PPO's weights: a ratio that has moved beyond the clip in its advantage's direction loses its gradient."""
    beyond = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    return torch.where(beyond, 0.0, ratio)


ADVANTAGE = normal(ANSWERS, 1, scale=1.0, seed=1).expand(SHAPE)
FAR = normal(*SHAPE, scale=1.0, seed=2)  # log-ratios of a policy that has moved a lot


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("name", PPO_CLIP)
def test_a_clip_is_the_presets_at_every_lag(name: str, lag: int) -> None:
    low, high = CLIPPED.get(name, (0.8, 1.2))
    found = weights(preset(name, lag), FAR, ADVANTAGE)
    assert_equal(found, clipped(FAR.exp(), ADVANTAGE, low, high))
    assert 0.3 < (found == 0).double().mean() < 0.5, "many are clipped, and many are not"


@pytest.mark.parametrize("name", GATES)
def test_a_gate_is_open_on_policy_and_the_same_at_every_lag(name: str) -> None:
    assert_equal(weights(preset(name, 0), torch.zeros_like(FAR), ADVANTAGE), torch.ones_like(FAR))
    found = weights(preset(name, 0), FAR, ADVANTAGE)
    if name != "kl_cov":  # without a lag its ratio is against the trainer
        assert_equal(weights(preset(name, 4), FAR, ADVANTAGE), found)
    assert not torch.allclose(found, FAR.exp()), "it acts on a policy that has moved"


@pytest.mark.parametrize("lag", [0, 4])
def test_cispo_caps_a_weight_at_5_at_every_lag(lag: int) -> None:
    found = weights(preset("cispo", lag), FAR, ADVANTAGE)
    assert_equal(found, FAR.exp().clamp(max=5))
    assert found.max() == pytest.approx(5)


@pytest.mark.parametrize("lag", [0, 4])
def test_gspo_weighs_and_clips_whole_answers_at_every_lag(lag: int) -> None:
    moved = normal(*SHAPE, scale=4e-3, seed=3)  # their mean over an answer moves about as far as the clip is wide
    ratio = moved.mean(1, keepdim=True).exp().expand(SHAPE)
    found = weights(preset("gspo", lag), moved, ADVANTAGE)
    assert_equal(found, clipped(ratio, ADVANTAGE, 1 - 3e-4, 1 + 4e-4))
    assert 0.1 < (found == 0).double().mean() < 0.4


def test_opd_has_a_truncated_weight_with_a_lag() -> None:
    """It has no clip, so nothing else would limit the weight of a token that became much likelier."""
    assert_equal(weights(preset("opd", 0), FAR, ADVANTAGE), FAR.exp())
    assert_equal(weights(preset("opd", 4), FAR, ADVANTAGE), FAR.exp().clamp(max=2))
    assert_equal(weights(preset("opd", 4, proximal="generator"), FAR, ADVANTAGE), FAR.exp())


SIXTEEN_BITS = {
    "trainer": BFLOAT16,
    "generator": Config(generator=GeneratorSection(dtype="bfloat16")),
    "both": Config(training=BFLOAT16.training, generator=GeneratorSection(dtype="bfloat16")),
}


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("dtypes", SIXTEEN_BITS.values(), ids=SIXTEEN_BITS)
def test_gspo_in_16_bits_loses_no_answer_to_rounding(dtypes: Config, lag: int) -> None:
    """Engine and trainer differ by 1e-2 per token on average, and no policy has moved."""
    rounding = normal(*SHAPE, scale=1e-2 * math.sqrt(math.pi / 2), seed=4)
    assert rounding.abs().mean() == pytest.approx(1e-2, rel=0.01)
    found = weights(preset("gspo", lag, dtypes), rounding, ADVANTAGE)
    assert (found != 0).all()
    assert_equal(found, (found[:, :1]).expand(SHAPE))  # an answer has one weight
    assert_equal(found, rounding.mean(1, keepdim=True).exp().expand(SHAPE) if lag else torch.ones_like(found))
    lost = weights(preset("gspo", lag, FLOAT32), rounding, ADVANTAGE) == 0
    assert lost.double().mean() > 0.3, "the paper's clip is narrower than the rounding"


def test_gspo_in_16_bits_with_a_lag_clips_answers_that_have_moved() -> None:
    moved = normal(*SHAPE, scale=0.2, seed=5)
    ratio = moved.mean(1, keepdim=True).exp().expand(SHAPE)
    found = weights(preset("gspo", 4, BFLOAT16), moved, ADVANTAGE)
    assert_equal(found, clipped(ratio, ADVANTAGE, 1 - 0.015, 1 + 0.02))
    assert 0.1 < (found == 0).double().mean() < 0.4
