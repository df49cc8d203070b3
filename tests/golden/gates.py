"""The settings of the gates' golden cases as ours, for test_golden_gates.py and test_planted_bugs.py."""

from collections import Counter
from dataclasses import dataclass, replace

import torch

from golden.replay import Case, Columns, columns, placed, policy_terms, samples, summed, trl_advantages
from titan_rl.batch.packing import Aggregation
from titan_rl.kernels.policy_loss import policy_loss
from titan_rl.kernels.surrogate import Surrogate

GSPO = Surrogate(ratio="sequence")
WINDOW = Surrogate(clip="clip_cov", cov_share=0.6, cov_low=0.3, cov_high=1.5)


@dataclass(frozen=True)
class Ours:
    surrogate: Surrogate
    aggregation: Aggregation = "token_mean"
    whole: bool = False  # in one microbatch: the loss selects among its tokens


TRL = {
    "sapo": Ours(Surrogate(clip="sapo"), "sequence_mean"),
    "sapo_sharp": Ours(
        Surrogate(clip="sapo", sapo_tau_positive=2.0, sapo_tau_negative=3.5, kl_coef=0.05), "sequence_mean"
    ),
    "luspo": Ours(GSPO, "sequence_sum"),
    "luspo_clipped": Ours(replace(GSPO, clip_low=0.05, clip_high=0.08), "sequence_sum"),
    "vespo": Ours(Surrogate(clip="vespo")),
    "vespo_other": Ours(
        Surrogate(
            clip="vespo",
            vespo_k_positive=1.5,
            vespo_lambda_positive=1.0,
            vespo_k_negative=0.5,
            vespo_lambda_negative=0.8,
            kl_coef=0.1,
        )
    ),
    "top_entropy": Ours(Surrogate(top_entropy_share=0.3, kl_coef=0.1), whole=True),
    "top_entropy_clip_higher": Ours(Surrogate(top_entropy_share=0.55, clip_high=0.28), whole=True),
    "top_entropy_bonus": Ours(Surrogate(top_entropy_share=0.45, entropy_coef=0.02), whole=True),
}

VERL = {
    "sapo": Ours(Surrogate(clip="sapo"), "sequence_mean"),
    "sapo_sharp": Ours(Surrogate(clip="sapo", sapo_tau_positive=2.0, sapo_tau_negative=3.5), "sequence_mean"),
    "dppo_tv": Ours(Surrogate(clip="dppo_tv", clip_low=0.05, clip_high=0.08)),
    "dppo_tv_limited": Ours(Surrogate(clip="dppo_tv", clip_low=0.05, clip_high=0.08, dual_clip=1.5)),
    "dppo_tv_sequence_mean": Ours(Surrogate(clip="dppo_tv", clip_low=0.05, clip_high=0.08), "sequence_mean"),
    "dppo_kl": Ours(Surrogate(clip="dppo_kl", clip_low=0.02, clip_high=0.03)),
    "dppo_kl_limited": Ours(Surrogate(clip="dppo_kl", clip_low=0.05, clip_high=0.08, dual_clip=1.5)),
    "geo_mean": Ours(Surrogate(clip="gmpo", ratio="sequence", clip_low=0.05, clip_high=0.08), "sequence_mean"),
    "geo_mean_wide": Ours(Surrogate(clip="gmpo", ratio="sequence", clip_low=0.4, clip_high=0.4), "sequence_mean"),
    "clip_cov": Ours(WINDOW, whole=True),
    "clip_cov_narrow": Ours(replace(WINDOW, clip_low=0.05, clip_high=0.08), whole=True),
    "kl_cov": Ours(Surrogate(clip="kl_cov", cov_share=0.2, cov_kl_coef=1.0), whole=True),
    "kl_cov_one": Ours(Surrogate(clip="kl_cov", cov_share=2e-4, cov_kl_coef=0.3), whole=True),
    "kl_cov_sequence_mean": Ours(Surrogate(clip="kl_cov", cov_share=0.1, cov_kl_coef=0.7), "sequence_mean", whole=True),
}

PRIME = {
    "ipo": Ours(Surrogate(clip="prob_diff", clip_low=0.1, clip_high=0.1, ratio_penalty=1e-3)),
    "ipo_far": Ours(Surrogate(clip="prob_diff", clip_low=0.05, clip_high=0.05, ratio_penalty=0.2)),
    "default": Ours(Surrogate(clip="dppo_tv", clip_low=0.08, clip_high=0.1, ratio_penalty=0.05)),
}


def gate_loss(case: Case, ours: Ours) -> tuple[torch.Tensor, Counter[str], Columns]:
    """Compute the step's loss. Advantages come from rewards where the case has them."""
    inputs = case["inputs"]
    x = columns(inputs, trl_advantages(case) if "rewards" in inputs else inputs["advantage"])
    microbatches = placed(samples(inputs), ours.aggregation, whole=ours.whole)
    assert (len(microbatches) == 1) == ours.whole
    return *summed(microbatches, policy_terms(policy_loss, ours.surrogate, x)), x
