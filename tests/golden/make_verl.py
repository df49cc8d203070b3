"""Make golden vectors with verl's own functions.

    python3.11 -m venv peers && peers/bin/pip install torch==2.13.0 verl==0.9.1
    peers/bin/python tests/golden/make_verl.py

The policy cases call `ppo_loss`, which combines policy loss, entropy and KL, with weights and masks made by
`rollout_corr_helper` before it. Advantages are in verl_estimators.py. Nothing is replaced. Float64 throughout.
"""
# pyright: basic, reportMissingImports=false

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from vectors import LENGTHS, answers, case, write
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, DistillationLossConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl_estimators import advantages, experience

NO_DUAL_CLIP = 1e9  # verl cannot switch it off


def jagged(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(
        [row[:length] for row, length in zip(values, LENGTHS, strict=True)], layout=torch.jagged
    )


def with_prompt(values: torch.Tensor) -> torch.Tensor:
    """Return [tokens] as the model does: one prompt token before each answer, each place holding the next token's."""
    ended = torch.cat([values, values.new_zeros(len(values), 1)], 1)
    return torch.cat([torch.cat([row[:length], row[-1:]]) for row, length in zip(ended, LENGTHS, strict=True)])


def batch(**fields: torch.Tensor) -> TensorDict:
    ones = torch.ones(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    nested = {key: jagged(values) for key, values in fields.items()}
    prompts = torch.nested.as_nested_tensor([torch.ones(1, dtype=torch.long) for _ in LENGTHS], layout=torch.jagged)
    data = TensorDict({"prompts": prompts, "responses": jagged(ones), **nested}, batch_size=len(LENGTHS))
    # None: both denominators are counted from these tensors.
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
    if far:  # two tokens about which the policies disagree strongly
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


def surrogate_cases() -> list[dict[str, Any]]:
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
    ]


def correction_cases() -> list[dict[str, Any]]:
    return [
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
            loss_agg_mode="seq-mean-token-mean",
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
    """On-policy: the student's log-prob, its log-prob at the step's start and the sampler's are equal."""
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
    # The other keys of a DistillationConfig describe where the teacher runs.
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


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    version = importlib.metadata.version("verl")
    families = {
        "policy": lambda: surrogate_cases() + correction_cases(),
        "losses": losses,
        "advantages": advantages,
        "experience": experience,
    }
    for family, cases in families.items():
        write(f"verl_{family}.json", peer="verl", version=version, made_by="tests/golden/make_verl.py", cases=cases())
