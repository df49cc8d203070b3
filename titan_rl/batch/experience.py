"""Turns rollouts into training samples with a mask and an advantage for each token. Pure; numpy only.

A rollout is one sequence, however many branches it has: each branch is a sample, and all of them share the rollout's
baseline, its advantage and its one place in a denominator. Token by token (returns, GAE) a rollout is one trajectory:
its sampled tokens in the order of its turns.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

import numpy as np

from titan_rl.batch.advantages import discounted, gae, group_relative, kl_penalty, leave_one_out, whiten
from titan_rl.config.sections import AlgorithmSection
from titan_rl.wire.types import Branch, Group, Rollout, Sample

Arrays = list[np.ndarray]  # one per sample, an entry per token


def samples_of(groups: Sequence[Group], algorithm: AlgorithmSection) -> list[Sample]:
    """Return a sample for every branch of every valid rollout, in order, with the mask of the tokens to train on."""
    return [
        _sample(branch, rollout, group.prompt.id * len(group.rollouts) + k, algorithm)
        for group in groups
        for k, rollout in enumerate(group.rollouts)
        if rollout.valid
        for branch in rollout.branches
    ]


def with_advantages(
    groups: Sequence[Group], samples: Sequence[Sample], algorithm: AlgorithmSection
) -> tuple[list[Group], list[Sample]]:
    """Add the "advantage" column (and the critic's "return") to the samples, and each rollout's mean to the groups."""
    masks = [np.asarray(s.mask) for s in samples]
    rest = iter(samples)
    own = [[[next(rest) for _ in r.branches] if r.valid else [] for r in group.rollouts] for group in groups]
    returns: Arrays | None = None
    if algorithm.advantage in ("group", "leave_one_out"):
        advantages = [a for group, of in zip(groups, own, strict=True) for a in _of_group(group, of, algorithm)]
    elif algorithm.advantage == "teacher":
        advantages = [
            np.where(m > 0, np.asarray(s.columns["teacher"], np.float64) - s.columns["behaviour"], 0.0)
            for s, m in zip(samples, masks, strict=True)
        ]
    else:
        pairs = [(r, s) for group, of in zip(groups, own, strict=True) for r, s in zip(group.rollouts, of, strict=True)]
        estimated = [pair for rollout, each in pairs if each for pair in _of_trajectory(rollout, each, algorithm)]
        advantages, learnt = [a for a, _ in estimated], [r for _, r in estimated]
        returns = learnt if algorithm.advantage == "gae" else None
    if algorithm.normalize == "batch":
        advantages = whiten(advantages, masks)
    found = [s.with_columns(advantage=a) for s, a in zip(samples, advantages, strict=True)]
    if returns is not None:
        found = [s.with_columns(**{"return": r}) for s, r in zip(found, returns, strict=True)]
    trained = iter([a[m > 0] for a, m in zip(advantages, masks, strict=True)])

    def mean(branches: int) -> float:
        every = [next(trained) for _ in range(branches)]
        values = every[0] if branches == 1 else np.concatenate([*every, np.zeros(0)])
        return float(np.add.reduce(values) / values.size) if values.size else 0.0  # as values.mean(), sooner

    judged = [
        replace(g, rollouts=[replace(r, advantage=mean(len(s))) for r, s in zip(g.rollouts, of, strict=True)])
        for g, of in zip(groups, own, strict=True)
    ]
    return judged, found


def dead(samples: Sequence[Sample]) -> bool:
    """Return True if no token under a mask has an advantage: an update would only follow KL and entropy."""
    return not any((np.asarray(s.columns["advantage"])[np.asarray(s.mask) > 0] != 0).any() for s in samples)


def minibatches(samples: Sequence[Sample], algorithm: AlgorithmSection) -> list[list[Sample]]:
    """Return the step's updates: `epochs` passes over `minibatches` equal parts of whole rollouts, in order."""
    begins = [i for i, s in enumerate(samples) if i == 0 or s.sequence < 0 or s.sequence != samples[i - 1].sequence]
    size = -(-len(begins) // algorithm.minibatches)
    cuts = [*begins[::size], len(samples)] if samples else []
    parts = [list(samples[begin:end]) for begin, end in pairwise(cuts)]
    return parts * algorithm.epochs


def _sample(branch: Branch, rollout: Rollout, sequence: int, algorithm: AlgorithmSection) -> Sample:
    """Return a branch's sample. It trains on the sampled tokens: not on truncated rollouts if overlong_filter is set,
    and not on tokens whose log-prob is not finite. Those would spread to the group through a KL in the reward, and to
    the whole step through whitening."""
    length = sum([len(turn.context) + len(turn.completion.tokens) for turn in branch.turns])
    tokens, behaviour = np.empty(length, np.int64), np.zeros(length)
    mask, end = np.zeros(length, np.int64), 0
    for turn in branch.turns:
        begin = end + len(turn.context)
        tokens[end:begin] = turn.context
        end = begin + len(turn.completion.tokens)
        tokens[begin:end] = np.fromiter(turn.completion.tokens, np.int64)  # sooner than np.array of a long list
        behaviour[begin:end] = np.fromiter(turn.completion.logprobs, np.float64)
        mask[begin:end] = 1
    mask *= np.isfinite(behaviour)
    if algorithm.overlong_filter and rollout.truncated:
        mask[:] = 0
    prompt = len(branch.turns[0].context)
    return Sample(tokens, mask, {"behaviour": behaviour}, prompt, sequence, branch.kept)


def _of_group(group: Group, own: Sequence[Sequence[Sample]], algorithm: AlgorithmSection) -> Arrays:
    """Return the advantages of a group's samples: one per rollout or, with credit "turn", one per turn, on each of its
    trained tokens. A KL in the reward is subtracted before the baseline, which is of the valid rollouts only."""

    def relative(rewards: Sequence[float]) -> list[float]:
        if algorithm.advantage == "leave_one_out":
            return leave_one_out(rewards)
        return group_relative(rewards, normalize_std=algorithm.normalize == "group")

    valid = [(rollout, of) for rollout, of in zip(group.rollouts, own, strict=True) if rollout.valid]
    if algorithm.credit == "outcome":
        charged = algorithm.kl_in == "reward"
        rewards = [r.signal - float(sum(_kl(s, algorithm).sum() for s in of if charged)) for r, of in valid]
        levels = [[a] * len(of) for a, (_, of) in zip(relative(rewards), valid, strict=True)]
    else:
        returns = [_turn_returns(rollout, of, algorithm) for rollout, of in valid]
        turns = zip_longest(*returns)  # the k-th turns of all, None of a rollout that had ended before
        reached = [iter(relative([g for g in turn if g is not None])) for turn in turns]
        levels = [
            _by_turn(rollout, [next(reached[k]) for k in range(len(g))])
            for (rollout, _), g in zip(valid, returns, strict=True)
        ]
    return [
        np.where(np.asarray(s.mask) > 0, level, 0.0)
        for (_, of), each in zip(valid, levels, strict=True)
        for s, level in zip(of, each, strict=True)
    ]


def _of_trajectory(
    rollout: Rollout, own: Sequence[Sample], algorithm: AlgorithmSection
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the advantages and the returns of a rollout's samples, estimated token by token over all of its turns."""
    spans = _spans(rollout)
    ends = np.cumsum([len(s.tokens) for s in own])
    order = np.concatenate([np.arange(*span) for span in spans]) if len(own) > 1 else np.arange(ends[-1])

    def joined(arrays: Sequence[Sequence[float] | np.ndarray], dtype: type = np.float64) -> np.ndarray:
        return np.concatenate([np.asarray(a, dtype) for a in arrays])[order]

    mask = joined([s.mask for s in own])
    rewards = np.zeros(len(mask))
    if len(trained := np.flatnonzero(mask)):
        if algorithm.credit == "outcome":
            rewards[trained[-1]] = rollout.signal
        else:  # each turn's on its last trained token, or on the one before if it has none
            lengths = np.cumsum([end - begin for begin, end in spans])
            last = np.maximum(np.searchsorted(trained, lengths) - 1, 0)
            np.add.at(rewards, trained[last], _turn_rewards(rollout))
    rewards = rewards - joined([_kl(s, algorithm) for s in own])
    if algorithm.advantage == "return":
        advantages = returns = discounted(rewards, mask, algorithm.gamma)
    else:
        values = joined([s.columns["value"] for s in own])
        advantages, returns = gae(rewards, values, mask, gamma=algorithm.gamma, lam=algorithm.gae_lambda)
    back = np.argsort(order)
    return list(zip(np.split(advantages[back], ends[:-1]), np.split(returns[back], ends[:-1]), strict=True))


def _spans(rollout: Rollout) -> list[tuple[int, int]]:
    """Return where each turn begins and ends in a rollout's tokens, all branches end to end; in the order of turns."""
    found, begin = [], 0
    for branch in rollout.branches:
        for turn in branch.turns:
            end = begin + len(turn.context) + len(turn.completion.tokens)
            found.append((turn.index, begin, end))
            begin = end
    return [(begin, end) for _, begin, end in sorted(found)]


def _turn_rewards(rollout: Rollout) -> list[float]:
    """Return what each turn earned. What the turns leave of the rollout's reward is the last one's."""
    rewards = [turn.reward for turn in rollout.turns]
    rewards[-1] += rollout.signal - sum(rewards)
    return rewards


def _turn_returns(rollout: Rollout, own: Sequence[Sample], algorithm: AlgorithmSection) -> list[float]:
    """Return G_k = r_k + gamma G_{k+1} of each turn, r_k less the KL of its tokens if that is in the reward."""
    kl = np.concatenate([_kl(s, algorithm) for s in own])
    returns, following = [], 0.0
    for reward, (begin, end) in reversed(list(zip(_turn_rewards(rollout), _spans(rollout), strict=True))):
        following = reward - float(kl[begin:end].sum()) + algorithm.gamma * following
        returns.append(following)
    return returns[::-1]


def _by_turn(rollout: Rollout, values: Sequence[float]) -> Arrays:
    """Return each turn's value on all of its places, branch by branch."""
    lengths = [sum(len(t.context) + len(t.completion.tokens) for t in branch.turns) for branch in rollout.branches]
    flat = np.zeros(sum(lengths))
    for value, (begin, end) in zip(values, _spans(rollout), strict=True):
        flat[begin:end] = value
    return np.split(flat, np.cumsum(lengths)[:-1])


def _kl(sample: Sample, algorithm: AlgorithmSection) -> np.ndarray:
    """Return the KL to subtract from each token's reward; zeros if the KL is in the loss or there is none."""
    if algorithm.kl_in != "reward" or "reference" not in sample.columns:
        return np.zeros(len(sample.tokens))
    policy = np.asarray(sample.columns.get("proximal", sample.columns["behaviour"]))
    estimate = algorithm.kl_coef * kl_penalty(policy, np.asarray(sample.columns["reference"]), algorithm.kl)
    return np.where(np.asarray(sample.mask) > 0, estimate, 0.0)
