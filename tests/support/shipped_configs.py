"""The shipped configs that are checked where a check takes long. The others are marked slow."""

from collections.abc import Iterable
from typing import Any

import pytest

from titan_rl.config.toml import find, load, policies_of

REPRESENTATIVES = (
    "calc_agent_llama",  # an agent, a chat template
    "dpo_llama",
    "grpo_llama3_8b_colocated",
    "grpo_qwen3_30b_a3b",  # experts, four hosts, a lag
    "grpo_smollm2_mixed",  # several data sets
    "hunt_llama",  # an environment of several turns
    "opd_llama",  # a teacher
    "policies_smollm2",  # two policies, adapters, a fetched model
    "ppo_reward_model_llama",  # a critic, a reference and a reward model
    "reward_model_llama",
    "sft_llama",
)  # they have every feature: tests/unit/config/test_toml.py


def slow_except(kept: Iterable[str], names: Iterable[str]) -> list[Any]:
    """Return the names as parameters of a test, which is slow for all but those kept."""
    kept = set(kept)
    return [pytest.param(name, marks=[] if name in kept else pytest.mark.slow) for name in names]


def features(name: str) -> set[str]:
    """Return the features of a shipped config that checks have branches for."""
    config = load(find(name))
    present = {
        "agent": config.task.agent,
        "turns": config.rollout_code,
        "data sets": len(config.task.datasets) > 1,
        "adapters": config.lora.rank,
        "policies": policies_of(find(name)),
        "experts": config.model.name == "qwen3_moe",
        "hosts": config.hosts.number > 1,
        "lag": config.rollout.max_staleness_steps,
        "fetched": config.model.hf_assets_path.startswith("fetch:"),
    }
    kinds = {config.algorithm.kind, config.placement.kind, config.task.template, *config.roles}
    return kinds | {feature for feature, found in present.items() if found}
