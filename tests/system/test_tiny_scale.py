"""A cluster's config runs here at tiny scale: the same roles, meshes, algorithm and hosts."""

from pathlib import Path

import pytest

from support.running import Runs
from support.slow_cases import slow_except


@pytest.mark.parametrize(
    ("config", "hosts", "roles"),
    slow_except(
        [
            ("grpo_llama3_70b", 2, {"trainer": 4, "generator": 4}),
            ("grpo_qwen3_30b_a3b", 2, {"trainer": 2, "generator": 4}),
        ],
        1,
    ),
)
def test_a_step_of_a_shipped_config_runs_at_tiny_scale(
    runs: Runs, tmp_path: Path, config: str, hosts: int, roles: dict[str, int]
) -> None:
    keys = {
        "scale": "tiny",
        "training__steps": 1,
        "eval__size": 0,
        "cold_start__stop_at": 0,
        "checkpoint__enable": False,
    }
    run = runs.start(tmp_path / "run", config, small=False, **keys)
    out = run.finish()
    assert run.code == 0, out
    assert "--scale tiny changes" in out
    assert [line["step"] for line in run.lines("metrics.jsonl")] == [1]
    assert len(list((run.folder / "hosts").glob("*.log"))) == hosts
    lanes = (run.folder / "timeline.json").read_text()
    for role, ranks in roles.items():
        assert len({name for name in lanes.split('"') if name.startswith(role) and name.endswith("]")}) == ranks, role
