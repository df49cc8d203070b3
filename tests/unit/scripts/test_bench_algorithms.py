"""scripts/bench_algorithms.py: what its figures depend on. The runs themselves are made by hand."""

import pytest
from bench_algorithms import configs_of, mean_curve, plot, summary

from titan_rl.config.toml import ConfigError


def row(algorithm: str, seed: int, curve: str, seconds: str) -> dict[str, str]:
    scores = [point.partition(":")[2] for point in curve.split()]
    ends = {"start": scores[0], "final": scores[-1], "curve": curve, "seconds": seconds, "step_s": "0.5"}
    return {"config": "task", "algorithm": algorithm, "seed": str(seed), "steps": "10", **ends}


ROWS = [
    row("grpo", 0, "0:0.1 10:0.5", "0:10.0 10:20.0"),
    row("grpo", 1, "0:0.1 10:0.7", "0:12.0 10:22.0"),
    row("gspo", 0, "0:0.1 10:0.9", "0:10.0 10:30.0"),
]


def test_an_algorithm_runs_with_its_own_preset_and_every_other_key_of_the_config() -> None:
    configs = configs_of("grpo_llama", ["grpo", "gspo", "ppo"], [("training.steps", "7")], minibatches=4)
    assert [config.algorithm.ratio for config in configs.values()] == ["token", "sequence", "token"]
    assert [config.critic.lr for config in configs.values()] == [0, 0, 8e-4]
    assert configs["grpo"].algorithm.clip_high == 0.2  # grpo_llama.toml sets 0.28
    assert {(config.training.steps, config.algorithm.minibatches) for config in configs.values()} == {(7, 4)}


def test_a_key_of_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--algorithm\.beta"):
        configs_of("grpo_llama", ["grpo"], [("algorithm.beta", "0.2")], minibatches=1)


def test_the_summary_begins_with_the_highest_mean_at_the_end() -> None:
    first, second = summary(ROWS)
    assert first.startswith("gspo: 1 runs, start 0.100 (0.100 to 0.100), end 0.900 (0.900 to 0.900)")
    assert "end 0.600 (0.500 to 0.700), highest 0.600" in second


def test_a_curve_is_the_mean_over_seeds_by_step_and_by_mean_seconds() -> None:
    assert mean_curve(ROWS[:2], "step") == pytest.approx({0: 0.1, 10: 0.6})
    assert list(mean_curve(ROWS[:2], "seconds")) == [11, 21]
    assert plot(ROWS, "seconds").count("<polyline") == 2
