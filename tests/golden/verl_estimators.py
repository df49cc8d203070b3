"""Golden vectors of verl's advantage estimators and rewards, for make_verl.py."""
# pyright: basic, reportMissingImports=false

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from vectors import LENGTHS, answers, case, rewards
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage

GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 1])


def outcome_case(name: str, estimator: str, *, seed: int, **settings: Any) -> dict[str, Any]:
    """Reward the whole answer at its last token."""
    x, score = answers(seed, empty=False), rewards(seed)
    token_rewards = torch.zeros_like(x["reward"])
    token_rewards[range(len(LENGTHS)), [n - 1 for n in LENGTHS]] = score
    keywords = {"index": GROUPS} if estimator != "reinforce_plus_plus" else {}
    if estimator.startswith("reinforce"):
        keywords["config"] = AlgoConfig(gamma=settings.get("gamma", 1.0))
    else:
        keywords.update(settings)
    compute = core_algos.get_adv_estimator_fn(estimator)
    advantages, returns = compute(token_level_rewards=token_rewards, response_mask=x["mask"], **keywords)
    return case(
        name,
        compute.__name__,
        settings=settings,
        inputs={"mask": x["mask"], "length": x["length"], "rewards": score, "group": torch.from_numpy(GROUPS)},
        outputs={"advantages": advantages * x["mask"], "returns": returns * x["mask"]},
    )


def token_case(name: str, *, seed: int, gamma: float, lam: float | None = None) -> dict[str, Any]:
    """Reward every token, as a KL penalty does."""
    x = answers(seed, empty=True)
    keywords = {"token_level_rewards": x["reward"], "response_mask": x["mask"]}
    if lam is None:
        compute = core_algos.compute_reinforce_plus_plus_outcome_advantage
        advantages, returns = compute(**keywords, config=AlgoConfig(gamma=gamma))
    else:
        compute = core_algos.compute_gae_advantage_return
        advantages, returns = compute(**keywords, values=x["old_value"], gamma=gamma, lam=lam)
    return case(
        name,
        compute.__name__,
        settings={"gamma": gamma} | ({} if lam is None else {"lam": lam}),
        inputs={key: x[key] for key in ("mask", "length", "reward", "old_value")},
        outputs={"advantages": advantages * x["mask"], "returns": returns * x["mask"]},
    )


def experience_case(name: str, estimator: str, *, seed: int, kl: str = "", **settings: Any) -> dict[str, Any]:
    """Do what verl's step does between rewards and loss: charge the KL to the reward, then compute advantages."""
    x, score = answers(seed, empty=False), rewards(seed)
    scores = torch.zeros_like(x["reward"])
    scores[range(len(LENGTHS)), [n - 1 for n in LENGTHS]] = score
    tensors = {
        "response_mask": x["mask"],
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "old_log_probs": x["old"],
        "ref_log_prob": x["reference"],
        "values": x["old_value"],
    }
    data = DataProto.from_dict(tensors, {"uid": GROUPS.astype(object)})
    if kl:
        data, _ = apply_kl_penalty(data, core_algos.FixedKLController(settings["kl_coef"]), kl)
    gamma, lam = settings.get("gamma", 1.0), settings.get("lam", 1.0)
    config = AlgoConfig(gamma=gamma)
    data = compute_advantage(data, estimator, gamma, lam, norm_adv_by_std_in_grpo=False, config=config)
    inputs = {key: x[key] for key in ("mask", "length", "old", "reference", "old_value")}
    return case(
        name,
        "apply_kl_penalty, compute_advantage" if kl else "compute_advantage",
        settings={"adv_estimator": estimator, "kl_penalty": kl, **settings},
        inputs={**inputs, "rewards": score},
        outputs={key: data.batch[key] * x["mask"] for key in ("advantages", "returns")},
    )


def experience() -> list[dict[str, Any]]:
    plus = "reinforce_plus_plus"
    return [
        experience_case("grpo_without_std", "grpo", seed=161),
        experience_case("grpo_kl", "grpo", seed=162, kl="k1", kl_coef=0.1),
        experience_case("rloo_kl", "rloo", seed=163, kl="k1", kl_coef=0.1),
        experience_case("reinforce_pp", plus, seed=164),
        experience_case("reinforce_pp_kl", plus, seed=165, kl="k1", kl_coef=0.1, gamma=0.95),
        experience_case("reinforce_pp_baseline", f"{plus}_baseline", seed=166),
        experience_case("ppo", "gae", seed=167, lam=0.95),
        experience_case("ppo_kl_k1", "gae", seed=168, kl="k1", kl_coef=0.1, gamma=0.99, lam=0.95),
        experience_case("ppo_kl_k2", "gae", seed=169, kl="k2", kl_coef=0.1, lam=0.9),
        experience_case("ppo_kl_k3", "gae", seed=170, kl="k3", kl_coef=0.1, lam=0.9),
    ]


def overlong_case() -> dict[str, Any]:
    settings = {
        "max_resp_len": 20,
        "overlong_buffer_cfg": {"enable": True, "len": 6, "penalty_factor": 1.0, "log": False},
    }
    length = torch.arange(1, 25)

    async def punish() -> list[float]:
        manager = DAPORewardManager(
            OmegaConf.create({"reward": {"reward_kwargs": settings}}),
            SimpleNamespace(decode=lambda *_, **__: ""),
            lambda **_: 0.0,
        )
        out = []
        for n in length.tolist():
            tensors = {
                "responses": torch.ones(1, 24, dtype=torch.long),
                "attention_mask": (torch.arange(25) <= n)[None],
            }
            other = {"data_source": np.array([""], object), "reward_model": np.array([{"ground_truth": ""}], object)}
            out.append((await manager.run_single(DataProto.from_dict(tensors, other)))["reward_score"])
        return [float(reward) for reward in out]

    outputs = {"reward": torch.tensor(asyncio.run(punish()))}
    inputs = {"length": length}
    return case("overlong", "DAPORewardManager.run_single", settings=settings, inputs=inputs, outputs=outputs)


def advantages() -> list[dict[str, Any]]:
    return [
        outcome_case("group", "grpo", seed=141, norm_adv_by_std_in_grpo=True),
        outcome_case("group_unscaled", "grpo", seed=142, norm_adv_by_std_in_grpo=False),
        outcome_case("leave_one_out", "rloo", seed=143),
        outcome_case("reinforce_pp", "reinforce_plus_plus", seed=144, gamma=1.0),
        outcome_case("reinforce_pp_discounted", "reinforce_plus_plus", seed=145, gamma=0.9),
        token_case("reinforce_pp_token_rewards", seed=146, gamma=0.95),
        outcome_case("reinforce_pp_baseline", "reinforce_plus_plus_baseline", seed=147),
        token_case("gae", seed=148, gamma=1.0, lam=0.95),
        token_case("gae_discounted", seed=149, gamma=0.9, lam=0.8),
        token_case("gae_monte_carlo", seed=150, gamma=1.0, lam=1.0),
        overlong_case(),
    ]
