"""Turns rollouts into training samples with a mask and an advantage for each token. Pure; numpy only."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from titan_rl.batch.advantages import discounted, gae, group_relative, kl_penalty, leave_one_out, whiten
from titan_rl.config.sections import AlgorithmSection
from titan_rl.wire.types import Group, Rollout, Sample


def samples_of(groups: Sequence[Group], algorithm: AlgorithmSection) -> list[Sample]:
    """Return a sample for every rollout of every group, in order, with the mask of the tokens to train on."""
    return [_sample(rollout, algorithm) for group in groups for rollout in group.rollouts]


def with_advantages(
    groups: Sequence[Group], samples: Sequence[Sample], algorithm: AlgorithmSection
) -> tuple[list[Group], list[Sample]]:
    """Add the "advantage" column (and the critic's "return") to the samples, and each rollout's mean to the groups."""
    masks = [np.asarray(s.mask) for s in samples]
    returns: list[np.ndarray] | None = None
    if algorithm.advantage in ("group", "leave_one_out"):
        advantages = _of_groups(groups, samples, algorithm)
    else:
        signals = [signal for group in groups for signal in group.signals]
        rewards = [_token_rewards(r, s, algorithm) for r, s in zip(signals, samples, strict=True)]
        if algorithm.advantage == "teacher":
            advantages = [
                np.where(m > 0, np.asarray(s.columns["teacher"], np.float64) - s.columns["behaviour"], 0.0)
                for s, m in zip(samples, masks, strict=True)
            ]
        elif algorithm.advantage == "return":
            advantages = [discounted(r, m, algorithm.gamma) for r, m in zip(rewards, masks, strict=True)]
        else:
            estimated = [
                gae(r, np.asarray(s.columns["value"], np.float64), m, gamma=algorithm.gamma, lam=algorithm.gae_lambda)
                for r, s, m in zip(rewards, samples, masks, strict=True)
            ]
            advantages, returns = [a for a, _ in estimated], [r for _, r in estimated]
    if algorithm.normalize == "batch":
        advantages = whiten(advantages, masks)
    found = [s.with_columns(advantage=a) for s, a in zip(samples, advantages, strict=True)]
    if returns is not None:
        found = [s.with_columns(**{"return": r}) for s, r in zip(found, returns, strict=True)]
    means = iter([float(a[m > 0].mean()) if (m > 0).any() else 0.0 for a, m in zip(advantages, masks, strict=True)])
    judged = [replace(group, rollouts=[replace(r, advantage=next(means)) for r in group.rollouts]) for group in groups]
    return judged, found


def dead(samples: Sequence[Sample]) -> bool:
    """Return True if no token under a mask has an advantage: an update would only follow KL and entropy."""
    return not any((np.asarray(s.columns["advantage"])[np.asarray(s.mask) > 0] != 0).any() for s in samples)


def minibatches(samples: Sequence[Sample], algorithm: AlgorithmSection) -> list[list[Sample]]:
    """Return the step's updates: `epochs` passes over `minibatches` equal parts, made of whole groups in order."""
    size = -(-len(samples) // algorithm.minibatches)
    parts = [list(samples[i : i + size]) for i in range(0, len(samples), size)]
    return parts * algorithm.epochs


def _sample(rollout: Rollout, algorithm: AlgorithmSection) -> Sample:
    """Return a rollout's sample. It trains on the sampled tokens: not on truncated rollouts if overlong_filter is set,
    and not on tokens whose log-prob is not finite. Those would spread to the group through a KL in the reward, and to
    the whole step through whitening."""
    behaviour = np.array(rollout.logprobs)
    mask = np.array(rollout.mask) * np.isfinite(behaviour)
    if algorithm.overlong_filter and rollout.truncated:
        mask[:] = 0
    prompt = len(rollout.turns[0].context)
    return Sample(np.array(rollout.tokens, np.int64), mask, {"behaviour": behaviour}, prompt)


def _of_groups(groups: Sequence[Group], samples: Sequence[Sample], algorithm: AlgorithmSection) -> list[np.ndarray]:
    """Return one advantage per rollout, on each of its trained tokens. A KL in the reward is subtracted before the
    baseline."""
    rest = iter(samples)
    advantages = []
    for group in groups:
        own = [next(rest) for _ in group.rollouts]
        rewards = [r - float(_kl(s, algorithm).sum()) for r, s in zip(group.signals, own, strict=True)]
        if algorithm.advantage == "leave_one_out":
            relative = leave_one_out(rewards)
        else:
            relative = group_relative(rewards, normalize_std=algorithm.normalize == "group")
        advantages += [np.where(np.asarray(s.mask) > 0, a, 0.0) for a, s in zip(relative, own, strict=True)]
    return advantages


def _token_rewards(reward: float, sample: Sample, algorithm: AlgorithmSection) -> np.ndarray:
    """Return the rollout's reward on its last trained token, minus each token's KL if that is in the reward."""
    rewards = np.zeros(len(sample.tokens))
    trained = np.flatnonzero(sample.mask)
    if len(trained):
        rewards[trained[-1]] = reward
    return rewards - _kl(sample, algorithm)


def _kl(sample: Sample, algorithm: AlgorithmSection) -> np.ndarray:
    """Return the KL to subtract from each token's reward; zeros if the KL is in the loss or there is none."""
    if algorithm.kl_in != "reward" or "reference" not in sample.columns:
        return np.zeros(len(sample.tokens))
    policy = np.asarray(sample.columns.get("proximal", sample.columns["behaviour"]))
    estimate = algorithm.kl_coef * kl_penalty(policy, np.asarray(sample.columns["reference"]), algorithm.kl)
    return np.where(np.asarray(sample.mask) > 0, estimate, 0.0)
