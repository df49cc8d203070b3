"""Presets of [algorithm]: for each name, the keys that differ from "grpo", whose values are the defaults.

A file's own keys override the preset, so presets can be changed and mixed freely.
"""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024: baseline is the group's mean, scale its standard deviation. Token mean is the default of
    # TRL and verl; the paper aggregates by "sequence_mean".
    "grpo": {},
    # Liu et al. 2025: divide neither by the standard deviation nor by a sequence's own length.
    "dr_grpo": {"normalize": "none", "aggregation": "sequence_sum"},
    # Ahmadian et al. 2024: baseline is the mean of the other samples; the KL, if any, is in the reward.
    "rloo": {"advantage": "leave_one_out", "normalize": "none", "kl_in": "reward", "kl": "k1"},
    # Hu 2025: the only baseline is the step's mean; KL in the reward.
    "reinforce_pp": {"advantage": "return", "normalize": "batch", "kl_in": "reward", "kl": "k1"},
    # The same paper's variant for groups: subtract the group's mean, then whiten over the step.
    "reinforce_pp_baseline": {"advantage": "group", "normalize": "batch", "kl": "k2"},
    # Schulman et al. 2017, as used in RLHF: a critic, GAE, KL in the reward.
    "ppo": {"advantage": "gae", "normalize": "batch", "kl_in": "reward", "kl": "k1"},
    # Yu et al. 2025: clip-higher, token mean, dynamic sampling, overlong filtering. Soft punishment: overlong_buffer.
    "dapo": {"clip_high": 0.28, "dynamic_sampling": True, "overlong_filter": True},
    # Zheng et al. 2025: one ratio per sequence, with the paper's clip.
    "gspo": {"ratio": "sequence", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax 2025: a clipped weight in front of the log-prob, without a lower bound, at most 5.
    "cispo": {"clip": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    # On-policy distillation: a token's advantage is teacher log-prob - sampling log-prob.
    "opd": {"advantage": "teacher", "normalize": "none", "clip": "none"},
    # Supervised and preference training use only global_batch_size, beta and label_smoothing.
    "sft": {},
    "dpo": {},
    "ipo": {},
    "reward_model": {},
}

ASYNCHRONOUS: dict[str, Any] = {"proximal": "trainer", "correction": "token_tis"}
"""Defaults for lag > 0: the ratio is against the policy before the step (decoupled PPO), and a truncated weight
corrects the difference between that policy and those that sampled."""


def resolve(own: dict[str, Any], *, lag: int) -> dict[str, Any]:
    """Return a file's own keys of [algorithm] over those of its preset. If lag > 0, also add ASYNCHRONOUS, unless the
    file sets proximal = "generator": a ratio against the sampling log-probs needs no further correction."""
    corrected = ASYNCHRONOUS if lag and own.get("proximal") != "generator" else {}
    return PRESETS[own.get("name", "grpo")] | corrected | own
