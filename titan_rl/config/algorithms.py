"""Declares the algorithms: for each name, the keys of [algorithm] that differ from "grpo", which has the defaults.

The values of algorithm.name follow from this table. To add an algorithm made of existing methods (methods.py), add its
entry. A file's own keys override an entry, so algorithms can be changed and mixed freely.

An entry means the same at every staleness: its ratio is against the log-probs of sampling (proximal = "generator"), as
PPO defines it, so that its clip limits what all updates since sampling have changed. With one update per step a
ratio against the trainer's log-probs before the step would be 1 on every token, and no clip could act. Other keys are
needed by opd with a lag, by gspo and luspo in 16 bits, and by all where the engines' weights are quantized: see
`resolve` in presets.py.
"""

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["rl", "supervised", "preference", "reward"]

SELF_DISTILLED: dict[str, Any] = {
    "advantage": "teacher",
    "normalize": "none",
    "clip": "cispo",
    "clip_low": 1.0,
    "clip_high": 1.0,
    "aggregation": "sequence_mean",
}
"""The teacher is the policy with another prompt. A stale token's weight is its ratio, at most 2, as in TRL."""

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024: baseline is the group's mean, scale its standard deviation. Token mean is the default of
    # TRL and verl; the paper aggregates by "sequence_mean".
    "grpo": {},
    # Liu et al. 2025: divide neither by the standard deviation nor by a sequence's own length.
    "dr_grpo": {"normalize": "none", "aggregation": "sequence_sum"},
    # Ahmadian et al. 2024: baseline is the mean of the other samples; the KL, if any, is in the reward. The paper has
    # no lag and needs no clip; here PPO's clip limits stale tokens.
    "rloo": {"advantage": "leave_one_out", "normalize": "none", "kl_in": "reward", "kl": "k1"},
    # Hu 2025: the only baseline is the step's mean; KL in the reward.
    "reinforce_pp": {"advantage": "return", "normalize": "batch", "kl_in": "reward", "kl": "k1"},
    # The same paper's variant for groups: subtract the group's mean, then whiten over the step.
    "reinforce_pp_baseline": {"advantage": "group", "normalize": "batch", "kl": "k2"},
    # Schulman et al. 2017, as used in RLHF: a critic, GAE, KL in the reward. The paper's old policy is the one that
    # sampled.
    "ppo": {"advantage": "gae", "normalize": "batch", "kl_in": "reward", "kl": "k1"},
    # Yu et al. 2025: clip-higher, token mean, dynamic sampling, overlong filtering. Soft punishment: overlong_buffer.
    # Clip-higher leaves stale tokens that became likelier their gradient up to 1.28, not 1.2.
    "dapo": {"clip_high": 0.28, "dynamic_sampling": True, "overlong_filter": True},
    # Zheng et al. 2025: one ratio per sequence, with the paper's clip. All stale tokens of an answer share one weight.
    "gspo": {"ratio": "sequence", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax 2025: a clipped weight in front of the log-prob, without a lower bound, at most 5. With a lag it is the
    # truncated importance weight that corrects stale tokens.
    "cispo": {"clip": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    # Liu et al. 2026: each reward is normalized within its group by itself, their weighted sum over the step.
    "gdpo": {"advantage": "per_reward", "normalize": "batch"},
    # Tang et al. 2025: what a sample adds to the best of its group, or of pass_k samples (Walder and Karkhanis 2025).
    "pass_at_k": {"advantage": "pass_at_k"},
    # Tajwar et al. 2026: divide by the group's mean, so that a group counts as the gradient of its log pass rate.
    "maxrl": {"normalize": "mean"},
    # Hao et al. 2025: the group's mean is weighted by length; exact on-policy training.
    "opo": {"advantage": "length_weighted", "normalize": "none"},
    # Li et al. 2023: baseline is the reward of the greedy answer to the prompt; KL in the reward.
    "remax": {"advantage": "greedy", "normalize": "none", "kl_in": "reward", "kl": "k1"},
    # verl's optimal token baseline: each token's return against the group's, weighted by the gradient's norm so far.
    "otb": {"advantage": "optimal_token", "normalize": "none"},
    # On-policy distillation: a token's advantage is teacher log-prob - sampling log-prob.
    "opd": {"advantage": "teacher", "normalize": "none", "clip": "none"},
    # Hübotter et al. 2026: the policy's average reads another answer of the group that is right, or the feedback.
    "sdpo": {**SELF_DISTILLED, "teacher_weights": "average", "teacher_context": ["sibling", "feedback"]},
    # Shenfeld et al. 2026: the policy's average reads a demonstration, here of the row or its answer.
    "sdft": {**SELF_DISTILLED, "teacher_weights": "average", "teacher_context": ["demonstration", "answer"]},
    # Zhao et al. 2026: the policy at the start of RL reads the reference answer.
    "opsd": {**SELF_DISTILLED, "teacher_weights": "reference", "teacher_context": ["answer"]},
    # Gao et al. 2025 (SAPO): a soft gate in place of the clip.
    "sapo": {"clip": "sapo", "aggregation": "sequence_mean"},
    # Qi et al. 2026 (DPPO): the trust region is one of probabilities. "dppo_kl" has 0.05 for both bounds.
    "dppo": {"clip": "dppo_tv", "clip_low": 0.15, "clip_high": 0.15, "dual_clip": 20.0},
    # prime-rl's loss "ipo": both directions are masked, and a penalty holds all tokens.
    "prob_diff": {"clip": "prob_diff", "clip_low": 0.1, "clip_high": 0.1, "ratio_penalty": 1e-3},
    # Zhao et al. 2025 (GMPO): the geometric mean of clipped token ratios, in a wide clip.
    "gmpo": {"ratio": "sequence", "clip": "gmpo", "aggregation": "sequence_mean", "clip_low": 0.4, "clip_high": 0.4},
    # LUSPO (arXiv 2602.05261): gspo whose sequences count by their length.
    "luspo": {
        "ratio": "sequence",
        "aggregation": "sequence_sum",
        "length_constant": 1,
        "clip_low": 2e-3,
        "clip_high": 2.5e-3,
    },
    # Shen et al. 2026 (VESPO): a smooth weight of a whole sequence's ratio.
    "vespo": {"clip": "vespo"},
    # Cui et al. 2025: hold back the few tokens that would lower the entropy most.
    "clip_cov": {"clip": "clip_cov"},
    "kl_cov": {"clip": "kl_cov"},
    # Zheng et al. 2025 (M2PO): no clip; tokens are dropped until the second moment of the log-ratios is small.
    "m2po": {"clip": "none", "rejection": "second_moment"},
    # Guo et al. 2024: DPO on the best and the worst answer of each group.
    "online_dpo": {"pair_loss": "dpo", "normalize": "none"},
    # Supervised and preference training use only global_batch_size and the keys from beta on.
    "sft": {},
    "dpo": {},
    "ipo": {},
    # Meng et al. 2024: mean log-probs, a margin and no reference, with the authors' values for Llama 3 8B (base). They
    # advise to start from this margin, half of beta. TRL's defaults are DPO's beta, 0.1, and a margin of 0.5.
    "simpo": {"beta": 2.0},
    # Hong et al. 2024: supervised on the chosen answer, and an odds ratio against the rejected one; no reference.
    "orpo": {},
    # Ethayarajh et al. 2024: each answer by itself is desirable or not.
    "kto": {},
    "reward_model": {},
}

KINDS: Mapping[str, Kind] = {
    "sft": "supervised",
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo", "kto"), "preference"),
    "reward_model": "reward",
}
"""The algorithms that learn from a data set. All others learn from rollouts."""


def kind_of(name: str) -> Kind:
    """Return the data that an algorithm's step trains on: rollouts, examples, pairs for a policy, or pairs for a reward
    model."""
    return KINDS.get(name, "rl")
