"""What each algorithm's name stands for: the keys of [algorithm] that differ from "grpo", which are the defaults.

A file's own keys go over these, so every preset is a starting point and any mixture of them is one too.
"""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024: siblings as baseline, over their spread. Token mean, as TRL and verl have it by default; the
    # paper's own aggregation is "sequence_mean".
    "grpo": {},
    # Liu et al. 2025: neither the spread nor a sequence's own length in a denominator.
    "dr_grpo": {"normalize": "none", "aggregation": "sequence_sum"},
    # Ahmadian et al. 2024: the others' mean as baseline; KL, where there is one, in the reward.
    "rloo": {"advantage": "leave_one_out", "normalize": "none", "kl_in": "reward", "kl": "k1"},
    # Hu 2025: no baseline but the whole step's mean; KL in the reward.
    "reinforce_pp": {"advantage": "return", "normalize": "batch", "kl_in": "reward", "kl": "k1"},
    # The same paper's variant for groups: siblings' mean first, then whitened over the step.
    "reinforce_pp_baseline": {"advantage": "group", "normalize": "batch", "kl": "k2"},
    # Schulman et al. 2017, as RLHF uses it: a critic, GAE, KL in the reward.
    "ppo": {"advantage": "gae", "normalize": "batch", "kl_in": "reward", "kl": "k1"},
    # Yu et al. 2025: clip-higher, token mean, dynamic sampling, overlong filtering. Soft punishment: overlong_buffer.
    "dapo": {"clip_high": 0.28, "dynamic_sampling": True, "overlong_filter": True},
    # Zheng et al. 2025: the ratio of whole sequences, with the paper's clip.
    "gspo": {"ratio": "sequence", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax 2025: the clipped weight in front of the log-prob, no lower bound, weights up to 5.
    "cispo": {"clip": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    # On-policy distillation: each token's advantage is how much likelier the teacher finds it.
    "opd": {"advantage": "teacher", "normalize": "none", "clip": "none"},
    # Supervised, and over preference pairs: these take global_batch_size, beta and label_smoothing only.
    "sft": {},
    "dpo": {},
    "ipo": {},
    "reward_model": {},
}


ASYNCHRONOUS: dict[str, Any] = {"proximal": "trainer", "correction": "token_tis"}
"""Where rollouts may lag behind: the ratio is against the policy before the step (decoupled PPO), and a truncated
weight corrects for the gap between that and the policies that sampled."""


def resolve(own: dict[str, Any], *, lag: int) -> dict[str, Any]:
    """A file's own keys of [algorithm] over its preset; under a lag, over a correction too, unless the file says that
    the ratio is against the generator's log-probs, which corrects by itself."""
    corrected = ASYNCHRONOUS if lag and own.get("proximal") != "generator" else {}
    return PRESETS[own.get("name", "grpo")] | corrected | own
