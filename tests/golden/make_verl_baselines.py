"""Make golden vectors with verl's advantage estimators of 2025 and 2026.

    peers/bin/python tests/golden/make_verl_baselines.py

make_verl.py describes the environment. Nothing is replaced. Float64, but GDPO's rewards, which verl makes float32.
"""
# pyright: basic, reportMissingImports=false

import importlib.metadata
from typing import Any

import numpy as np
import torch
from vectors import LENGTHS, answers, case, rewards, write
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 1])


def at_the_end(score: torch.Tensor, width: int) -> torch.Tensor:
    """Return [N, width]: each answer's reward at its last token."""
    placed = torch.zeros(len(LENGTHS), width)
    placed[range(len(LENGTHS)), [n - 1 for n in LENGTHS]] = score
    return placed


def outcome_case(name: str, estimator: str, *, seed: int, holes: bool = True, **keywords: Any) -> dict[str, Any]:
    """Reward the whole answer at its last token. Without `holes` no tool wrote a token."""
    x, score = answers(seed, empty=False), rewards(seed)
    mask = x["mask"] if holes else (x["old"] != 0).long()
    inputs = {"mask": mask, "length": x["length"], "rewards": score}
    tensors: dict[str, Any] = {"token_level_rewards": at_the_end(score, mask.shape[1]), "response_mask": mask}
    if estimator == "remax":
        inputs["greedy"] = tensors["reward_baselines"] = rewards(seed + 1000)
    else:
        tensors["index"] = GROUPS
    if estimator.endswith("optimal_token_baseline"):
        generator = torch.Generator().manual_seed(seed)
        square = x["old"].exp() ** 2
        rest = (1 - x["old"].exp()) ** 2 * torch.rand(square.shape, generator=generator)
        inputs |= {"old": x["old"], "squares": (square + rest) * (x["old"] != 0)}
        tensors |= {"old_log_probs": inputs["old"], "sum_pi_squared": inputs["squares"]}
    if estimator == "grpo_passk":
        keywords["config"] = keywords.pop("settings")
    compute = core_algos.get_adv_estimator_fn(estimator)
    advantages, _ = compute(**tensors, **keywords)
    settings = keywords.get("config", {})
    outputs = {"advantages": advantages * mask}
    return case(name, compute.__name__, settings=settings, inputs=inputs, outputs=outputs)


def gdpo_case(name: str, *, seed: int, weights: list[float]) -> dict[str, Any]:
    x = answers(seed, empty=False)
    parts = {f"reward_{k}": rewards(seed + 1000 * k) for k in range(len(weights))}
    inside = torch.arange(x["mask"].shape[1]) < x["length"][:, None]
    batch = {
        "prompts": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(len(LENGTHS), 1, dtype=torch.long), inside.long()], 1),
    }
    advantages, _ = core_algos.compute_gdpo_outcome_advantage(
        token_level_rewards=torch.zeros_like(x["reward"]),
        response_mask=x["mask"],
        index=GROUPS,
        config=AlgoConfig(gdpo_reward_keys=list(parts), gdpo_reward_weights=weights),
        non_tensor_batch={key: values.numpy() for key, values in parts.items()},
        batch=batch,
    )
    inputs = {"mask": x["mask"], "length": x["length"], **parts}
    settings = {"gdpo_reward_weights": weights}
    outputs = {"advantages": advantages}
    return case(name, "compute_gdpo_outcome_advantage", settings=settings, inputs=inputs, outputs=outputs)


def baselines() -> list[dict[str, Any]]:
    scaled, unscaled = {"norm_adv_by_std_in_grpo": True}, {"norm_adv_by_std_in_grpo": False}
    return [
        gdpo_case("gdpo", seed=171, weights=[1.0, 1.0]),
        gdpo_case("gdpo_weighted", seed=172, weights=[1.0, -0.3, 2.5]),
        outcome_case("passk", "grpo_passk", seed=173, settings=scaled),
        outcome_case("passk_unscaled", "grpo_passk", seed=174, settings=unscaled),
        outcome_case("opo", "opo", seed=175),
        outcome_case("opo_without_tools", "opo", seed=176, holes=False),
        outcome_case("remax", "remax", seed=177),
        outcome_case("otb", "optimal_token_baseline", seed=178, holes=False),
        outcome_case("otb_more", "optimal_token_baseline", seed=179, holes=False),
        outcome_case("otb_with_tools", "tir_optimal_token_baseline", seed=180),
        outcome_case("otb_with_tools_more", "tir_optimal_token_baseline", seed=181),
    ]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    version, script = importlib.metadata.version("verl"), "tests/golden/make_verl_baselines.py"
    write("verl_baselines.json", peer="verl", version=version, made_by=script, cases=baselines())
