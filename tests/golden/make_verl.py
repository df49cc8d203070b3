"""Golden vectors out of verl's own functions.

    python3.11 -m venv peers && peers/bin/pip install torch==2.13.0 verl==0.9.1
    peers/bin/python tests/golden/make_verl.py

The policy cases go through `ppo_loss`, which calls policy loss, entropy and KL and puts them together, with the
correction's weights and masks from `rollout_corr_helper` before it. Nothing is replaced. Float64 throughout.
"""
# pyright: basic, reportMissingImports=false

import asyncio
import importlib.metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from vectors import LENGTHS, answers, case, rewards, write
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.trainer.config import AlgoConfig
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, DistillationLossConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

NO_DUAL_CLIP = 1e9  # verl cannot switch it off
GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 1])


def jagged(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(
        [row[:length] for row, length in zip(values, LENGTHS, strict=True)], layout=torch.jagged
    )


def with_prompt(values: torch.Tensor) -> torch.Tensor:
    """[tokens]: as the model gives it, one prompt token before each answer, each place holding the next token's."""
    ended = torch.cat([values, values.new_zeros(len(values), 1)], 1)
    return torch.cat([torch.cat([row[:length], row[-1:]]) for row, length in zip(ended, LENGTHS, strict=True)])


def batch(**fields: torch.Tensor) -> TensorDict:
    ones = torch.ones(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    nested = {key: jagged(values) for key, values in fields.items()}
    prompts = torch.nested.as_nested_tensor([torch.ones(1, dtype=torch.long) for _ in LENGTHS], layout=torch.jagged)
    data = TensorDict({"prompts": prompts, "responses": jagged(ones), **nested}, batch_size=len(LENGTHS))
    # The two denominators are then those of the tensors at hand.
    return tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=None)


def actor(loss_mode: str = "vanilla", **settings: Any) -> ActorConfig:
    chosen = {"clip_ratio_c": NO_DUAL_CLIP, **settings}
    return ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        **chosen,
    )


def policy_case(
    name: str,
    *,
    seed: int,
    empty: bool = True,
    spread: float = 0.3,
    far: bool = False,
    correction: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    x = answers(seed, empty=empty, spread=spread)
    if far:  # two tokens about which the policies do not agree at all
        x["old"][0, 1], x["old"][5, 1], x["logprob"][0, 1], x["logprob"][5, 1] = -27.0, -0.5, -0.5, -31.0
    logprob, entropy = x["logprob"].requires_grad_(), x["entropy"].requires_grad_()
    mask = x["mask"]
    fields: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    if correction is not None:
        weights, mask, _ = compute_rollout_correction_and_rejection_mask(
            x["old"], x["behaviour"], x["mask"], **correction
        )
        outputs["kept"] = mask
        if weights is not None:
            fields["rollout_is_weights"] = outputs["importance_ratio"] = weights.batch["rollout_is_weights"]
    data = batch(
        response_mask=mask,
        old_log_probs=x["old"],
        advantages=x["advantage"],
        ref_log_prob=x["reference"],
        **fields,
    )
    config = actor(**settings)
    loss, metrics = ppo_loss(config, {"log_probs": with_prompt(logprob), "entropy": with_prompt(entropy)}, data)
    loss.backward()
    for ours, theirs in (("clipped", "actor/pg_clipfrac"), ("dual_clipped", "actor/pg_clipfrac_lower")):
        outputs[ours] = torch.tensor(metrics[theirs].aggregate())
    names = ("mask", "length", "advantage", "logprob", "old", "behaviour", "reference", "entropy")
    leaves = {"logprob": logprob}
    if settings.get("entropy_coeff"):
        leaves["entropy"] = entropy
    return case(
        name,
        "ppo_loss" if correction is None else "compute_rollout_correction_and_rejection_mask, ppo_loss",
        settings={"clip_ratio_c": NO_DUAL_CLIP, **settings, **(correction or {})},
        inputs={key: x[key] for key in names},
        outputs={"loss": loss, **outputs},
        leaves=leaves,
    )


def policy() -> list[dict[str, Any]]:
    narrow: dict[str, Any] = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
    mean: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-mean"}
    summed: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-sum-norm"}
    return [
        policy_case("ppo_token_mean", seed=101),
        policy_case("ppo_clip_higher", seed=102, clip_ratio_high=0.28),
        policy_case("ppo_dual_clip", seed=103, spread=0.8, clip_ratio_c=1.5),
        policy_case("ppo_far_apart", seed=128, far=True, clip_ratio_c=3.0),
        policy_case("cispo_far_apart", seed=127, far=True, loss_mode="cispo"),
        policy_case("ppo_sequence_mean", seed=104, **mean),
        policy_case("ppo_sequence_sum", seed=105, **summed, loss_scale_factor=20),
        policy_case("gspo", seed=106, loss_mode="gspo", **mean),
        policy_case("gspo_clipped", seed=107, spread=0.5, loss_mode="gspo", **narrow, **mean),
        policy_case("gspo_token_mean", seed=108, spread=0.5, loss_mode="gspo", **narrow),
        policy_case("cispo", seed=109, spread=0.5, loss_mode="cispo"),
        policy_case(
            "cispo_high_only", seed=110, spread=0.5, loss_mode="cispo", clip_ratio_low=1.0, clip_ratio_high=1.0
        ),
        policy_case("kl_k1", seed=111, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k1"),
        policy_case("kl_k2", seed=112, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2"),
        policy_case("kl_k3", seed=113, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3"),
        policy_case("kl_k3_sequence_mean", seed=114, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", **mean),
        policy_case("entropy", seed=115, entropy_coeff=0.01),
        policy_case("entropy_sequence_mean", seed=116, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.05, **mean),
        policy_case("token_tis", seed=117, correction={"rollout_is": "token", "rollout_is_threshold": 1.2}),
        policy_case("sequence_tis", seed=35, correction={"rollout_is": "sequence", "rollout_is_threshold": 1.3}),
        policy_case("token_mask", seed=119, correction={"rollout_is": "token", "rollout_is_threshold": "0.75_1.3"}),
        policy_case("sequence_mask", seed=31, correction={"rollout_is": "sequence", "rollout_is_threshold": "0.6_1.5"}),
        policy_case(
            "cispo_token_tis",
            seed=121,
            loss_mode="cispo",
            correction={"rollout_is": "token", "rollout_is_threshold": 1.2},
        ),
        policy_case(
            "gspo_sequence_tis",
            seed=37,
            loss_mode="gspo",
            correction={"rollout_is": "sequence", "rollout_is_threshold": 1.3},
            **mean,
        ),
        policy_case(
            "token_rejection", seed=123, correction={"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.6"}
        ),
        policy_case(
            "geometric_rejection",
            seed=124,
            correction={"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"},
        ),
        policy_case(
            "geometric_rejection_token_tis",
            seed=125,
            correction={
                "rollout_is": "token",
                "rollout_is_threshold": 1.2,
                "rollout_rs": "seq_mean_k1",
                "rollout_rs_threshold": "0.9_1.1",
            },
        ),
    ]


def kl_case(name: str, *, seed: int, spread: float = 0.6) -> dict[str, Any]:
    estimator = name[:2]
    x = answers(seed, empty=False, spread=spread)
    logprob = x["logprob"].requires_grad_()
    kl = core_algos.kl_penalty(logprob, x["reference"], estimator)
    kl.sum().backward()
    return case(
        name,
        "kl_penalty",
        settings={"kl_penalty": estimator},
        inputs={"logprob": logprob, "reference": x["reference"]},
        outputs={"kl": kl},
        leaves={"logprob": logprob},
    )


def value_case(name: str, *, seed: int, clip: float, mode: str = "token-mean") -> dict[str, Any]:
    x = answers(seed, empty=True)
    value = x["value"].requires_grad_()
    loss, clipped = core_algos.compute_value_loss(value, x["return"], x["old_value"], x["mask"], clip, mode)
    loss.backward()
    return case(
        name,
        "compute_value_loss",
        settings={"cliprange_value": clip, "loss_agg_mode": mode},
        inputs={key: x[key] for key in ("mask", "length", "value", "old_value", "return")},
        outputs={"loss": loss, "clipped": clipped},
        leaves={"value": value},
    )


def distillation_case(name: str, *, seed: int) -> dict[str, Any]:
    """On the policy: the student's log-prob, its log-prob at the step's start, and the sampler's are one."""
    x = answers(seed, empty=True)
    logprob = x["logprob"].requires_grad_()
    data = batch(
        response_mask=x["mask"],
        old_log_probs=logprob.detach(),
        advantages=torch.zeros_like(logprob.detach()),
    )
    data["teacher_logprobs"] = torch.nested.as_nested_tensor(
        [torch.cat([row[:n], row.new_zeros(1)])[:, None] for row, n in zip(x["reference"], LENGTHS, strict=True)],
        layout=torch.jagged,
    )
    loss_config = DistillationLossConfig(
        loss_mode="k1", use_task_rewards=False, use_policy_gradient=True, loss_max_clamp=None
    )
    # The rest of a DistillationConfig describes where the teacher runs.
    config: Any = SimpleNamespace(distillation_loss=loss_config)
    loss, _ = distillation_ppo_loss(actor(), config, {"log_probs": with_prompt(logprob)}, data)
    loss.backward()
    return case(
        name,
        "distillation_ppo_loss",
        settings={"loss_mode": "k1", "use_policy_gradient": True},
        inputs={key: x[key] for key in ("mask", "length", "logprob", "reference")},
        outputs={"loss": loss},
        leaves={"logprob": logprob},
    )


def losses() -> list[dict[str, Any]]:
    return [
        kl_case("k1", seed=131),
        kl_case("k2", seed=132),
        kl_case("k3", seed=133),
        kl_case("k3_far_apart", seed=138, spread=2.0),
        value_case("value_clipped", seed=134, clip=0.2),
        value_case("value_barely_clipped", seed=135, clip=5.0),
        value_case("value_sequence_mean", seed=136, clip=0.5, mode="seq-mean-token-mean"),
        distillation_case("distillation", seed=137),
    ]


def outcome_case(name: str, estimator: str, *, seed: int, **settings: Any) -> dict[str, Any]:
    """A reward for the whole answer, at its last token."""
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
    """A reward at every token: what a KL penalty makes of it."""
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
    """What verl's step does between rewards and loss: the KL into the reward, then the advantages."""
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


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    version = importlib.metadata.version("verl")
    families = {"policy": policy, "losses": losses, "advantages": advantages, "experience": experience}
    for family, cases in families.items():
        write(f"verl_{family}.json", peer="verl", version=version, made_by="tests/golden/make_verl.py", cases=cases())
