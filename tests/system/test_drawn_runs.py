"""Features that meet in a run by a draw: it finishes, its audit is clean, and it resumes without another bit."""

import math
from pathlib import Path
from typing import Any

import pytest

from support.drawn_runs import drawn
from support.running import Run, Runs
from titan_rl.tools.inspect.audit_rules import audit

COMPUTED = ("loss", "reward", "grad_norm", "entropy", "kl", "logprob_gap", "eval")


def computed(run: Run) -> list[dict[str, Any]]:
    """Return what the run computed, step by step and policy by policy, without seconds."""
    found = []
    for path in sorted(run.folder.rglob("metrics.jsonl")):
        for line in run.written(str(path.relative_to(run.folder))):
            numbers = {key: value for key, value in line.items() if key.startswith(COMPUTED) and "second" not in key}
            if line["kind"] != "startup":
                found.append({"kind": line["kind"], "step": line["step"], **numbers})
    return found


def repeats(config: str, keys: dict[str, Any]) -> bool:
    """Return True if the same run is the same to the last bit: nothing in it depends on what ends first."""
    timed = ("rollout.max_staleness_steps", "training.stream_groups", "generator.replicas")
    return config != "calc_agent_llama" and not any(key in keys for key in timed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 16))])
def test_drawn_features_fit_each_other(seed: int, runs: Runs, tmp_path: Path) -> None:
    config, keys = drawn(seed, tmp_path / "none")
    print(config, *(f"--{key}={value}" for key, value in keys.items()))  # pytest shows it if the test fails
    straight = runs.finish(tmp_path / "straight", config, small=False, **keys)
    runs.finish(tmp_path / "resumed", config, small=False, **{**keys, "training.steps": 2})
    resumed = runs.finish(tmp_path / "resumed", config, small=False, **keys)
    for run in (straight, resumed):
        for ledger in run.folder.rglob("ledger.jsonl"):
            problems, _ = audit(ledger.parent)
            assert not problems
    found = computed(straight)
    assert all(math.isfinite(value) for line in found for value in line.values() if isinstance(value, float))
    if repeats(config, keys):
        assert computed(resumed) == found
