"""Log-probs of generators against the trainers', before anything is trained."""

import asyncio
import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from titan_rl.config.auto import on_device
from titan_rl.config.sections import Config
from titan_rl.preflight.plan import Setup
from titan_rl.tasks.task import Task, load_task
from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.train.engine_proof import (
    NEW_TOKENS,
    SAMPLES,
    Continuation,
    logprob_gap,
    sample_continuations,
    tolerance_of,
)
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Completion, Request

PROMPT, SAMPLED = [2, 9, 10], [11, 12, 13, 2]
LOGPROBS = [-1.5, -0.25, -3.0, -0.5]


def config_of(**keys: Any) -> Config:
    """Return a config with these keys of its sections: training__dtype="bfloat16"."""
    config = on_device(Config(), "cpu")
    for key, value in keys.items():
        section, _, name = key.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def gap(trained: list[float], config: Config | None = None, sampled: list[float] = LOGPROBS) -> float:
    continuation = Continuation(PROMPT, Completion(SAMPLED, sampled, [0] * 4, "stop"))
    return logprob_gap([continuation], [np.array([0.0, 0.0, 0.0, *trained])], config or on_device(Config(), "cpu"))


def test_rounding_is_no_difference_and_more_ends_the_run_by_name() -> None:
    assert gap(LOGPROBS) == 0.0
    assert gap([p + 9e-4 for p in LOGPROBS]) == pytest.approx(9e-4)
    with pytest.raises(RunError, match=r"^the generators compute something else than the trainers") as raised:
        gap([p - 1.1e-3 for p in LOGPROBS])
    assert "Expected at most 0.001 over 4 tokens" in raised.value.details
    assert "found 0.0011" in raised.value.details
    assert raised.value.rank == "", "respawning would not help"


@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        ({}, 1e-3),
        ({"generator__dtype": "bfloat16"}, 0.1),
        ({"training__dtype": "bfloat16"}, 0.1),
        ({"training__mixed_precision_param": "bfloat16"}, 0.1),
        ({"training__mixed_precision_param": "bfloat16", "weight_sync__gap_tolerance": 0.02}, 0.02),
        ({"weight_sync__gap_tolerance": 1e6}, 1e6),
        ({"generator__quantization": "int8"}, 0.2),
        ({"generator__quantization": "fp8", "generator__dtype": "bfloat16"}, 0.5),
    ],
)
def test_the_tolerance_is_that_of_the_coarsest_dtype_unless_it_is_given(keys: dict[str, Any], tolerance: float) -> None:
    config = config_of(**keys)
    assert tolerance_of(config) == tolerance
    assert gap([p + tolerance / 2 for p in LOGPROBS], config) == pytest.approx(tolerance / 2)
    with pytest.raises(RunError, match="something else"):
        gap([p + tolerance * 1.1 for p in LOGPROBS], config)


def test_an_engine_without_finite_numbers_is_found_and_trainers_without_are_left_to_the_step() -> None:
    with pytest.raises(RunError, match="something else"):
        gap(LOGPROBS, sampled=[-1.0, math.nan, -1.0, -1.0])
    assert gap([-1.0, math.nan, -1.0, -1.0]) == 0.0


class Engines:
    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        return [Completion([7] * request.sampling.max_new_tokens, [-1.0], [0], "length") for _ in request.seeds]


@pytest.mark.parametrize(("algorithm", "temperature"), [("grpo", 0.7), ("sft", 1.0)])
def test_every_replica_continues_a_prompt_that_no_rollout_has(
    tmp_path: Any, algorithm: str, temperature: float
) -> None:
    characters.build(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    config = config_of(algorithm__name=algorithm, rollout__temperature=0.7, training__seq_len=16)
    task: Task = load_task(config.task, seed=0, eval_size=8)

    class Prepared:
        pass

    setup = Prepared()
    setup.__dict__.update(config=config, task=task, tokenizer=tokenizer)
    engines = Engines()
    continuations = asyncio.run(sample_continuations(cast(Setup, setup), engines, 3))
    assert len({request.id for request in engines.requests}) == len(engines.requests) == 3
    seeds = [seed for request in engines.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds) == 3 * SAMPLES == len(continuations)
    for request in engines.requests:
        assert request.tokens[0] == tokenizer.eos, "so it shares no prefix with a rollout"
        assert request.tokens[1:] == task.prompt(task.train[0], 0, tokenizer).tokens[: len(request.tokens) - 1]
        assert request.sampling.temperature == temperature
        assert len(request.tokens) + request.sampling.max_new_tokens <= 16
        assert request.sampling.max_new_tokens == NEW_TOKENS
    for continuation in continuations:
        prompt, sample = continuation.prompt, continuation.sample
        assert (list(sample.tokens), list(sample.mask)) == ([*prompt, *[7] * 8], [0] * len(prompt) + [1] * 8)
