"""Computes advantages from rewards: how much better each token did than expected. Pure functions on numpy.

    group            r - mean(group)                     GRPO, Dr.GRPO
    leave_one_out    r - mean(the others)                RLOO
    return           sum of discounted token rewards     REINFORCE++
    gae              sum_l (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t     PPO
    teacher          teacher log-prob - sampling log-prob: on-policy distillation, reverse KL token by token

Then, by `normalize`: divided by the group's standard deviation ("group"), or whitened over all tokens of the step
("batch"), or unchanged.
"""

import math
from collections.abc import Sequence

import numpy as np


def group_relative(rewards: Sequence[float], *, normalize_std: bool, eps: float = 1e-4) -> list[float]:
    """Return reward minus group mean, divided by the sample standard deviation plus eps (TRL: ddof = 1, 1e-4).

    A flat group gets exact zeros: its mean may differ from its rewards by rounding, and eps would blow that up. verl's
    eps is 1e-6.
    """
    if len({*rewards}) < 2:
        return [0.0] * len(rewards)
    r = np.array(rewards, np.float64)
    advantages = r - np.add.reduce(r) / len(r)  # numpy's mean and std take several times as long for a few numbers
    if normalize_std:
        advantages /= math.sqrt(np.add.reduce(advantages * advantages) / (len(r) - 1)) + eps
    return advantages.tolist()


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return reward minus the mean of the other samples' rewards: unbiased, because this baseline does not
    depend on the sample itself."""
    if len({*rewards}) < 2:
        return [0.0] * len(rewards)
    r = np.array(rewards, np.float64)
    return (r - (r.sum() - r) / (len(r) - 1)).tolist()


def discounted(rewards: np.ndarray, mask: np.ndarray, gamma: float) -> np.ndarray:
    """Return R_t = r_t + gamma R_{t+1} of one trajectory, over the tokens under the mask. Tokens outside it (tool
    output) are not steps and are skipped."""
    returns = np.zeros(len(rewards))
    running = 0.0
    for t in np.flatnonzero(mask)[::-1]:
        running = rewards[t] + gamma * running
        returns[t] = running
    return returns


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the generalized advantage estimates of one trajectory, and the returns (advantage + value) that a critic
    learns. The value after the last token is 0."""
    advantages = np.zeros(len(rewards))
    running = following = 0.0
    for t in np.flatnonzero(mask)[::-1]:
        delta = rewards[t] + gamma * following - values[t]
        running = delta + gamma * lam * running
        advantages[t], following = running, values[t]
    return advantages, np.where(np.asarray(mask) > 0, advantages + values, 0.0)


def whiten(advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray], eps: float = 1e-8) -> list[np.ndarray]:
    """Scale to mean 0 and (sample) variance 1 over all tokens under the masks, as verl's masked_whiten; 0 elsewhere.
    Equal advantages become exact zeros."""
    on = [np.asarray(mask) > 0 for mask in masks]
    every = np.concatenate([a[m] for a, m in zip(advantages, on, strict=True)] or [np.zeros(0)])
    if not len(every) or (every == every[0]).all():
        return [np.zeros(len(a)) for a in advantages]
    mean, scale = every.mean(), 1 / np.sqrt(every.var(ddof=1) + eps)
    return [np.where(m, (a - mean) * scale, 0.0) for a, m in zip(advantages, on, strict=True)]


def kl_penalty(logprobs: np.ndarray, reference: np.ndarray, estimator: str) -> np.ndarray:
    """Return per-token KL estimates in numpy, for the reward; kernels/kl.py defines them."""
    log_r = np.asarray(reference, np.float64) - np.asarray(logprobs, np.float64)
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r**2
    return np.expm1(np.clip(log_r, -20, 20)) - np.clip(log_r, -20, 20)


def soft_overlong_punishment(length: int, *, longest: int, buffer: int) -> float:
    """DAPO: 0 up to `longest - buffer` tokens, falling linearly to -1 at `longest`."""
    return -min(max(length - (longest - buffer), 0), buffer) / buffer if buffer else 0.0
