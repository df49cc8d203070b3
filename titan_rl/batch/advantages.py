"""Computes advantages from rewards: how much better each token did than expected. Pure functions on numpy.

config/methods.py lists the estimators with their formulas. Then, by `normalize`, advantages are divided by the group's
standard deviation ("group") or mean ("mean"), or whitened over all tokens of the step ("batch"), or unchanged.
"""

import math
from collections.abc import Sequence

import numpy as np

from titan_rl.config.sections import AlgorithmSection
from titan_rl.wire.errors import RunError


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


def over_mean(rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    """Return MaxRL's advantages: reward minus group mean, divided by the mean plus eps (SkyRL: 1e-6). Raise RunError if
    a reward is negative: the mean estimates a probability of success."""
    if (least := min(rewards, default=0.0)) < 0:
        raise RunError(f'algorithm.normalize = "mean" expected rewards of at least 0, found {least:g}')
    mean = math.fsum(rewards) / max(len(rewards), 1)
    return [advantage / (mean + eps) for advantage in group_relative(rewards, normalize_std=False)]


def per_reward(rewards: Sequence[Sequence[float]], weights: Sequence[float], eps: float = 1e-4) -> list[float]:
    """Return GDPO's advantages: each reward normalized within the group by itself, then added by weight. `rewards` has
    a row per sample and a column per weight; NaN: the reward does not apply to the sample, and adds 0."""
    table = np.array(rewards, np.float64).reshape(-1, len(weights))
    total = np.zeros(len(table))
    for weight, column in zip(weights, table.T, strict=True):
        applies = ~np.isnan(column)
        total[applies] += weight * np.array(group_relative(column[applies].tolist(), normalize_std=True, eps=eps))
    return total.tolist()


def pass_at_k(rewards: Sequence[float], k: int, *, normalize_std: bool, eps: float = 1e-4) -> list[float]:
    """Return how much each sample raises the best of k: the mean, over all sets of k samples that contain it, of the
    set's best reward minus the best of its others. If k is the group's size, only the best sample has an advantage: its
    lead over the second. Divided by the sample standard deviation plus eps, if asked."""
    n, k = len(rewards), min(k, len(rewards))
    if len({*rewards}) < 2:
        return [0.0] * n
    order = np.argsort(rewards, kind="stable")
    ranked = np.array(rewards, np.float64)[order]
    # Of the sets with sample i, C(j, k - 2) have sample j < i as the best of the others.
    share = np.array([math.comb(j, k - 2) / math.comb(n - 1, k - 1) for j in range(n)])
    lead = np.maximum(ranked[:, None] - ranked, 0.0) @ share
    advantages = np.empty(n)
    advantages[order] = lead / (ranked.std(ddof=1) + eps) if normalize_std else lead
    return advantages.tolist()


def length_weighted(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return OPO's advantages: reward minus the group's mean reward per token, the optimal baseline if the squared norm
    of a sample's gradient is proportional to its length."""
    if len({*rewards}) < 2:
        return [0.0] * len(rewards)
    r = np.array(rewards, np.float64)
    return (r - np.dot(lengths, r) / max(sum(lengths), 1)).tolist()


def token_baselines(returns: Sequence[np.ndarray], norms: Sequence[np.ndarray], eps: float = 1e-8) -> list[np.ndarray]:
    """Return the optimal baseline of each trained token: the mean return of the group's t-th trained tokens, weighted
    by W_t = sum of `norms` up to t, the squared norm of the gradient so far, plus eps. verl adds eps to the sum of the
    weights alone, so that its baseline falls to 0 where all tokens were certain. The baseline is 0 where only one
    sample is left."""
    most = max(returns, key=len, default=np.zeros(0))
    weighted, weight, count = np.zeros((3, len(most)))
    for r, norm in zip(returns, norms, strict=True):
        at, by = slice(len(r)), norm.cumsum() + eps
        weighted[at] += by * (r - most[at])  # exactly 0 if all returns are equal
        weight[at] += by
        count[at] += 1
    baseline = np.where(count > 1, most + weighted / np.maximum(weight, eps), 0.0)
    return [baseline[: len(r)] for r in returns]


def of_group(rewards: Sequence[float], lengths: Sequence[int], a: AlgorithmSection) -> list[float]:
    return (
        over_mean(rewards) if a.normalize == "mean" else group_relative(rewards, normalize_std=a.normalize == "group")
    )


def of_others(rewards: Sequence[float], lengths: Sequence[int], a: AlgorithmSection) -> list[float]:
    return leave_one_out(rewards)


def over_median(rewards: Sequence[float], lengths: Sequence[int], a: AlgorithmSection) -> list[float]:
    """Return reward minus the group's median, divided by the standard deviation of `group_relative` if asked."""
    r = np.array(rewards, np.float64)
    scale = r.std(ddof=1) + 1e-4 if a.normalize == "group" and len(r) > 1 else 1.0
    return ((r - np.median(r)) / scale).tolist()


def of_best(rewards: Sequence[float], lengths: Sequence[int], a: AlgorithmSection) -> list[float]:
    return pass_at_k(rewards, a.pass_k or len(rewards), normalize_std=a.normalize == "group")


def of_lengths(rewards: Sequence[float], lengths: Sequence[int], a: AlgorithmSection) -> list[float]:
    return length_weighted(rewards, lengths)


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


def shorter_is_better(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """Return Kimi k1.5's length rewards of a group: from 0.5 for its shortest answer to -0.5 for its longest, and at
    most 0 for a wrong one. All are 0 if all answers are equally long."""
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest == longest:
        return [0.0] * len(lengths)
    rewards = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [reward if right else min(0.0, reward) for reward, right in zip(rewards, correct, strict=True)]
