"""Real runs that do not learn, each for a planted reason: the run warns, and titan_rl why names it."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.running import Runs
from titan_rl.tools.why import main

SHORT: dict[str, Any] = {  # a cold start of 2 seconds after which some digits are right
    "cold_start__steps": 60,
    "cold_start__lr": 3e-3,
    "rollout__groups_per_step": 16,
    "rollout__group_size": 8,
    "algorithm__kl_coef": 0.0,
    "eval__interval": 100,
    "parallelism__data_parallel_shard_degree": 1,
}


@pytest.mark.parametrize(
    ("keys", "rule", "key", "warning"),
    [
        (
            {"task__reward": "dense_reward:places", "optimizer__lr": 0.3, "lr_scheduler__warmup_steps": 3},
            "collapse",
            "optimizer.lr",
            "optimizer.lr = 0.3 is the first suspect",
        ),
        (
            {"task__reward": "dense_reward:constant", "task__eval_reward": "dense_reward:places"},
            "constant_reward",
            "task.reward",
            "the reward is 0.500 for all of 384 answers",
        ),
    ],
)
def test_a_planted_cause_is_a_warning_and_the_first_cause(
    runs: Runs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    keys: dict[str, Any],
    rule: str,
    key: str,
    warning: str,
) -> None:
    run = runs.start(tmp_path / "run", training__steps=5, **SHORT, **keys)
    out = run.finish()
    assert run.code == 0, out
    assert [line for line in out.splitlines() if line.startswith("  warning  step ") and warning in line], out
    assert f"python-mtitan_rlwhy{run.folder}" in "".join(out.split()), "it may be wrapped"
    assert main([str(run.folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cause"] == rule
    assert report["findings"][0]["change"][0]["key"] == key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "rule", "key"),
    [
        ({"algorithm__kl_coef": 20}, "tight_anchor", "algorithm.kl_coef"),
        ({"algorithm__entropy_coef": 1.0}, "entropy_bonus", "algorithm.entropy_coef"),
        ({"rollout__temperature": 0.1}, "cold_sampling", "rollout.temperature"),
    ],
)
def test_a_key_of_the_config_is_the_first_cause(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], rule: str, key: str
) -> None:
    """A third of the problems are solved when RL begins, so that rewards differ."""
    run = runs.start(
        tmp_path / "run",
        small=False,
        training__steps=45,
        parallelism__data_parallel_shard_degree=1,
        rollout__groups_per_step=32,
        rollout__group_size=8,
        cold_start__stop_at=0.35,
        eval__interval=15,
        eval__size=128,
        hosts__threads=1,
        lr_scheduler__decay_ratio=0.0,
        **keys,
    )
    out = run.finish(timeout=900)  # the cold run ends by itself, without a learning signal
    assert any(key in line for line in out.splitlines() if line.startswith("  warning  step ")), out
    assert main([str(run.folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cause"] == rule
    assert report["findings"][0]["change"][0]["key"] == key
