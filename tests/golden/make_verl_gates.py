"""Make golden vectors of gates with verl's own functions.

    peers/bin/python tests/golden/make_verl_gates.py

In make_verl.py's environment: `ppo_loss` with other losses. Float64 throughout.
"""
# pyright: basic, reportMissingImports=false

import importlib.metadata
from typing import Any

import torch
from make_verl import NO_DUAL_CLIP, batch, with_prompt
from vectors import answers, case, write
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

FRACTIONS = {"clipped": "actor/pg_clipfrac", "dual_clipped": "actor/pg_clipfrac_lower"}


def gate_case(
    name: str,
    *,
    seed: int,
    empty: bool = True,
    spread: float = 0.4,
    per_sequence: bool = False,
    loss: dict[str, Any],
    **settings: Any,
) -> dict[str, Any]:
    """`loss` has the keys of policy_loss. With `per_sequence` all tokens of an answer have one advantage."""
    x = answers(seed, empty=empty, spread=spread)
    if per_sequence:
        x["advantage"] = x["advantage"][:, :1] * (x["old"] != 0)
    logprob = x["logprob"].requires_grad_()
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=8,
        policy_loss=PolicyLossConfig(**loss),
        **{"clip_ratio_c": NO_DUAL_CLIP, **settings},
    )
    data = batch(
        response_mask=x["mask"], old_log_probs=x["old"], advantages=x["advantage"], ref_log_prob=x["reference"]
    )
    value, metrics = ppo_loss(config, {"log_probs": with_prompt(logprob), "entropy": None}, data)
    value.backward()
    outputs = {ours: torch.tensor(metrics[key].aggregate()) for ours, key in FRACTIONS.items() if key in metrics}
    names = ("mask", "length", "advantage", "logprob", "old", "behaviour", "reference", "entropy")
    return case(
        name,
        "ppo_loss",
        settings={**loss, **settings},
        inputs={key: x[key] for key in names},
        outputs={"loss": value, **outputs},
        leaves={"logprob": logprob},
    )


def gates() -> list[dict[str, Any]]:
    narrow: dict[str, Any] = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
    means: dict[str, Any] = {"loss_agg_mode": "seq-mean-token-mean"}
    tv, kl = {"loss_mode": "dppo_tv"}, {"loss_mode": "dppo_kl"}
    window: dict[str, Any] = {"clip_cov_lb": 0.3, "clip_cov_ub": 1.5}
    return [
        gate_case("sapo", seed=301, loss={"loss_mode": "sapo"}, tau_pos=1.0, tau_neg=1.05),
        gate_case("sapo_sharp", seed=302, loss={"loss_mode": "sapo"}, tau_pos=2.0, tau_neg=3.5),
        gate_case("dppo_tv", seed=303, loss=tv, **narrow),
        gate_case("dppo_tv_limited", seed=304, spread=0.8, loss=tv, **narrow, clip_ratio_c=1.5),
        gate_case("dppo_tv_sequence_mean", seed=305, loss=tv, **narrow, **means),
        gate_case("dppo_kl", seed=306, loss=kl, clip_ratio_low=0.02, clip_ratio_high=0.03),
        gate_case("dppo_kl_limited", seed=307, spread=0.8, loss=kl, **narrow, clip_ratio_c=1.5),
        gate_case("geo_mean", seed=308, empty=False, per_sequence=True, loss={"loss_mode": "geo_mean"}, **narrow),
        gate_case(
            "geo_mean_wide",
            seed=309,
            empty=False,
            per_sequence=True,
            loss={"loss_mode": "geo_mean"},
            clip_ratio_low=0.4,
            clip_ratio_high=0.4,
        ),
        # A share so large that verl selects all candidates: otherwise it draws some at random.
        gate_case("clip_cov", seed=310, loss={"loss_mode": "clip_cov", "clip_cov_ratio": 0.6, **window}),
        gate_case(
            "clip_cov_narrow", seed=311, loss={"loss_mode": "clip_cov", "clip_cov_ratio": 0.6, **window}, **narrow
        ),
        gate_case("kl_cov", seed=312, loss={"loss_mode": "kl_cov", "kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}),
        gate_case("kl_cov_one", seed=313, loss={"loss_mode": "kl_cov", "kl_cov_ratio": 2e-4, "ppo_kl_coef": 0.3}),
        gate_case(
            "kl_cov_sequence_mean",
            seed=314,
            loss={"loss_mode": "kl_cov", "kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7},
            **means,
        ),
    ]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    version, made_by = importlib.metadata.version("verl"), "tests/golden/make_verl_gates.py"
    write("verl_gates.json", peer="verl", version=version, made_by=made_by, cases=gates())
