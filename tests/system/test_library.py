"""titan_rl as a library, on real meshes: a user's own loop, its own parts of the algorithm, and what it survives."""

from pathlib import Path
from typing import Any

LOOPS = Path(__file__).parents[2] / "docs" / "loops"
KEYS: dict[str, Any] = {
    "cold_start.steps": 0,
    "rollout.groups_per_step": 4,
    "eval.size": 8,
    "eval.interval": 0,
    "parallelism.data_parallel_shard_degree": 1,
}
