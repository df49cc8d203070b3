"""Estimators of KL(policy || reference) from one sampled token. r = reference / policy probability of that token
(J. Schulman, "Approximating KL divergence").

    k1   -log r            unbiased value, high variance; often negative
    k2   (log r)^2 / 2     biased value; its gradient is an unbiased estimate of the KL's gradient
    k3   r - 1 - log r     unbiased value, never negative

As a loss, k1's gradient is the score function, which is zero on average and does not hold the policy near the
reference: use k2 or k3 in the loss, and k1 as a penalty in the reward.
"""

import torch

from titan_rl.config.sections import Estimator

MAX_LOG_RATIO = 20.0  # exp() of a larger difference carries no information: the policies are simply different


def kl_estimate(logprob_T: torch.Tensor, reference_T: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    log_r = reference_T - logprob_T
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r.square()
    log_r = log_r.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_r.exp() - log_r - 1
