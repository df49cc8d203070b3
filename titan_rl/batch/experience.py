"""Turns rollouts into training samples with a mask and an advantage for each token. Pure; numpy only.

A rollout is one sequence, however many branches it has: each branch is a sample, and all of them share the rollout's
baseline, its advantage and its one place in a denominator. Token by token (returns, GAE) a rollout is one trajectory:
its sampled tokens in the order of its turns.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise, zip_longest
from types import MappingProxyType

import numpy as np

from titan_rl.batch.advantages import discounted, gae, kl_penalty, per_reward, token_baselines, whiten
from titan_rl.batch.role_means import RoleMeans
from titan_rl.config.methods import advantage_of, function_of
from titan_rl.config.sections import AlgorithmSection
from titan_rl.wire.errors import RunError
from titan_rl.wire.side_columns import extras_of
from titan_rl.wire.types import Column, Group, Rollout, Sample

Arrays = list[np.ndarray]  # one per sample, an entry per token
Weights = Mapping[str, float]  # by the name of a reward in Rollout.parts
NO_WEIGHTS: Weights = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RewardedGroup:
    """A group as an estimate of advantages sees it: its rollouts that have a reward."""

    group: Group
    rewards: np.ndarray  # [n], without the penalties for length
    lengths: np.ndarray  # [n] sampled tokens
    columns: Sequence[Mapping[str, np.ndarray]]  # by rollout; an entry for each sampled token


Estimate = Callable[[RewardedGroup], Sequence[float | np.ndarray]]
"""Returns the advantage of each of a group's rollouts, or an array with one for each of its sampled tokens."""


ValidRollouts = Sequence[tuple[Rollout, Sequence[Sample]]]  # one group's, each with a sample for every branch
NumberedRollouts = Sequence[tuple[int, Rollout]]  # with their numbers in the group
Baseline = Callable[[Sequence[float], Sequence[int], AlgorithmSection], Sequence[float]]


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """What an estimator of a whole group gets. It returns arrays by the name of a column, one for each sample:
    "advantage", and others that the losses read."""

    group: Group
    valid: ValidRollouts
    algorithm: AlgorithmSection
    weights: Weights


def samples_of(groups: Sequence[Group], algorithm: AlgorithmSection) -> list[Sample]:
    """Return a sample for every branch of every rollout to train on, with the mask of the tokens to train on.

    The mask selects sampled tokens. With overlong_filter it leaves out truncated rollouts. It always leaves out tokens
    whose log-prob is not finite: they would spread to the group through a KL in the reward, and to the whole step
    through whitening."""
    owned = [
        (branch, rollout, group.sequence(k), branch.images)
        for group, trained in zip(groups, _trained(groups, algorithm), strict=True)
        for k, rollout in trained
        for branch in rollout.branches
    ]
    turns = [turn for branch, *_ in owned for turn in branch.turns]
    parts = [part for turn in turns for part in (turn.context, turn.completion.tokens)]
    sizes = np.array([len(part) for part in parts], np.int64)
    mask = np.repeat(np.arange(len(parts)) % 2, sizes)
    tokens, behaviour = np.fromiter(chain.from_iterable(parts), np.int64, len(mask)), np.zeros(len(mask))
    logprobs = chain.from_iterable(turn.completion.logprobs for turn in turns)
    behaviour[mask > 0] = np.fromiter(logprobs, np.float64, mask.sum())
    mask *= np.isfinite(behaviour)
    last = np.cumsum([2 * len(branch.turns) for branch, *_ in owned], dtype=np.int64) - 1
    ends = sizes.cumsum()[last]
    lengths = np.diff(ends, prepend=0)
    if algorithm.overlong_filter:
        mask *= np.repeat([not rollout.truncated for _, rollout, *_ in owned], lengths)
    if algorithm.online_pairs and all(a is b for (_, a, *_), (_, b, *_) in zip(owned[::2], owned[1::2], strict=True)):
        mask[:] = 0  # no group has a pair
    spans, extras = zip((ends - lengths).tolist(), ends.tolist(), strict=True), extras_of([b for b, *_ in owned])
    columns: dict[Column, np.ndarray] = {"behaviour": behaviour}
    seen = [bool(images) for *_, images in owned]
    if any(seen):
        columns["image"] = np.repeat(seen, lengths)
    return [
        Sample(
            tokens[begin:end],
            mask[begin:end],
            {name: column[begin:end] for name, column in columns.items()},
            len(branch.turns[0].context),
            sequence,
            recorded,
            images,
        )
        for (begin, end), (branch, _, sequence, images), recorded in zip(spans, owned, extras, strict=True)
    ]


def with_advantages(
    groups: Sequence[Group],
    samples: Sequence[Sample],
    algorithm: AlgorithmSection,
    weights: Weights = NO_WEIGHTS,
    estimate: Estimate | None = None,
    role_means: RoleMeans | None = None,
) -> tuple[list[Group], list[Sample]]:
    """Add the "advantage" column (and the critic's "return") to the samples, and each rollout's mean to the groups.
    `weights`: of the rewards that "per_reward" normalizes one by one. `estimate` takes the place of
    algorithm.advantage. `role_means`: of earlier steps."""
    role_means = role_means or RoleMeans(algorithm.role_decay)
    _refuse_opponents(groups)
    trained = _trained(groups, algorithm)
    columns = defaultdict[str, Arrays](list)
    remaining = iter(samples)
    for group, numbered in zip(groups, trained, strict=True):
        valid = [(rollout, [next(remaining) for _ in rollout.branches]) for _, rollout in numbered]
        if not valid:
            continue
        judged = JudgedGroup(group, valid, algorithm, weights)
        found = _columns_of(judged, estimate, role_means)
        for name, arrays in found.items():
            columns[name] += arrays

    masks = [np.asarray(sample.mask) > 0 for sample in samples]
    advantages = columns.pop("advantage", [])
    advantages = [np.where(mask, each, 0.0) for mask, each in zip(masks, advantages, strict=True)]
    if algorithm.normalize == "batch":
        advantages = whiten(advantages, masks)
    if algorithm.teacher_coef:  # after the baseline and its scale: a critic's returns know nothing of it
        gained = _gains(samples)
        advantages = [a + algorithm.teacher_coef * gain for a, gain in zip(advantages, gained, strict=True)]
    columns["advantage"] = advantages

    estimated = list(samples)
    for name, arrays in columns.items():
        estimated = [s.with_columns(**{name: array}) for s, array in zip(estimated, arrays, strict=True)]
    counted = [advantage[mask] for advantage, mask in zip(advantages, masks, strict=True)]
    return _with_means(groups, trained, counted), estimated


def _columns_of(judged: JudgedGroup, estimate: Estimate | None, role_means: RoleMeans) -> dict[str, Arrays]:
    """Return the advantages of a group's samples, and the other columns that its estimator has."""
    if estimate is not None:
        return {"advantage": _estimated(judged.group, judged.valid, estimate)}
    entry = advantage_of(judged.algorithm.advantage)
    estimator = function_of(entry)
    if entry.level == "player":
        baseline = partial(estimator, role_means, judged.group.seat)
        return {"advantage": _of_rollouts(judged.valid, judged.algorithm, baseline)}
    if entry.level == "reward":
        return {"advantage": _of_baseline(judged, estimator)}
    return estimator(judged)


def _with_means(groups: Sequence[Group], trained: Sequence[NumberedRollouts], counted: Arrays) -> list[Group]:
    """Return the groups, each rollout with the mean advantage of its tokens under a mask; 0 if it has none."""
    remaining = iter(counted)
    found = []
    for group, numbered in zip(groups, trained, strict=True):
        by_rollout = defaultdict[int, Arrays](list)
        for k, rollout in numbered:
            by_rollout[k] += [next(remaining) for _ in rollout.branches]
        rollouts = []
        for k, rollout in enumerate(group.rollouts):
            tokens = _flat(by_rollout[k])
            mean = tokens.sum() / max(len(tokens), 1)
            rollouts.append(replace(rollout, advantage=float(mean)))
        found.append(replace(group, rollouts=rollouts))
    return found


def dead(samples: Sequence[Sample]) -> bool:
    """Return True if no token under a mask has an advantage: an update would only follow KL and entropy."""
    return not any((np.asarray(s.columns["advantage"])[np.asarray(s.mask) > 0] != 0).any() for s in samples)


def teaches(group: Group, algorithm: AlgorithmSection, weights: Weights = NO_WEIGHTS) -> bool:
    """Return True if the rewards of a group give some token an advantage over its siblings."""
    rollouts = [rollout for rollout in group.rollouts if rollout.valid]
    if algorithm.advantage == "per_reward":
        return any(_of_rewards(rollouts, algorithm, weights))
    if algorithm.credit == "outcome":
        signals, entry = [rollout.signal for rollout in rollouts], advantage_of(algorithm.advantage)
        if len({*signals}) < 2 or entry.level != "reward":
            return len({*signals}) > 1
        return any(function_of(entry)(signals, [rollout.sampled for rollout in rollouts], algorithm))
    returns = (_discounted_turns(_turn_rewards(rollout), algorithm.gamma) for rollout in rollouts)
    return any(len({value for value in turn if value is not None}) > 1 for turn in zip_longest(*returns))


def minibatches(samples: Sequence[Sample], algorithm: AlgorithmSection, group_size: int) -> list[list[Sample]]:
    """Return the step's updates: `epochs` passes over `minibatches` parts of whole groups, in order. Parts differ by
    one group at most, however many rollouts failed; there are fewer only if there are fewer groups."""
    keys = [sample.sequence // group_size if sample.sequence >= 0 else -1 - i for i, sample in enumerate(samples)]
    begins = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
    first_groups = [part[0] for part in np.array_split(begins, algorithm.minibatches) if len(part)]
    parts = [list(samples[begin:end]) for begin, end in pairwise([*first_groups, len(samples)])]
    return parts * algorithm.epochs


def _trained(groups: Sequence[Group], algorithm: AlgorithmSection) -> list[list[tuple[int, Rollout]]]:
    """Return each group's rollouts to train on, with their numbers in it: the valid ones; with a pair_loss the best and
    the worst of them. Without any pair in the step, one rollout twice, because trainers need rows."""
    valid = [[(k, rollout) for k, rollout in enumerate(group.rollouts) if rollout.valid] for group in groups]
    if not algorithm.online_pairs:
        return valid
    pairs = [_best_and_worst(each, algorithm) for each in valid]
    return pairs if any(pairs) else [[(k, r) for k, r in each if r.branches][:1] * 2 for each in valid]


def _best_and_worst(valid: Sequence[tuple[int, Rollout]], algorithm: AlgorithmSection) -> list[tuple[int, Rollout]]:
    """Return a group's first rollout with the highest reward and its first with the lowest; none if all are equal."""
    if (branches := max((len(r.branches) for _, r in valid), default=1)) > 1:
        needed = f'algorithm.pair_loss = "{algorithm.pair_loss}" expected rollouts of one branch, found {branches}'
        raise RunError(needed, "An agent that changes earlier messages begins a branch.")
    fit = [(k, r) for k, r in valid if r.sampled and not (algorithm.overlong_filter and r.truncated)]
    if len({r.signal for _, r in fit}) < 2:
        return []
    return [choose(fit, key=lambda numbered: numbered[1].signal) for choose in (max, min)]


def _refuse_opponents(groups: Sequence[Group]) -> None:
    """Refuse a game whose players are branches of one rollout, and win what others lose: a rollout has one advantage,
    by the sum of its rewards, which is always 0."""
    for group in groups:
        valid = [rollout for rollout in group.rollouts if rollout.valid]
        if len(valid) > 1 and all(map(_opposed, valid)):
            where = group.prompt.where or f"prompt {group.prompt.id}"
            raise RunError(
                f"{where}: expected rollouts of one player, found {len(valid)} whose branches win what others lose",
                "Their rewards add up to 0, and nothing is learned. List the players in environment.seats, and return "
                "a reward for each.",
            )


def _opposed(rollout: Rollout) -> bool:
    rewards = [math.fsum(turn.reward for turn in branch.turns) for branch in rollout.branches]
    return min(rewards, default=0.0) < 0 and abs(math.fsum(rewards)) < 1e-9 * max(map(abs, rewards))


def _flat(values: Iterable[Sequence[float] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *values], dtype=np.float64)


def _gains(samples: Iterable[Sample]) -> Arrays:
    """Return the teacher's log-prob less the sampling log-prob, 0 where the mask is 0."""
    return [
        np.where(np.asarray(s.mask) > 0, np.subtract(s.columns["teacher"], s.columns["behaviour"]), 0.0)
        for s in samples
    ]


def over_role_mean(
    means: RoleMeans, seat: str, rewards: Sequence[float], lengths: Sequence[int], a: AlgorithmSection
) -> list[float]:
    return means.advantages(seat, rewards)


def of_each_reward(judged: JudgedGroup) -> dict[str, Arrays]:
    advantages = _of_rewards([rollout for rollout, _ in judged.valid], judged.algorithm, judged.weights)
    return {"advantage": _spread(advantages, judged.valid)}


def returns(judged: JudgedGroup) -> dict[str, Arrays]:
    return {"advantage": [advantage for advantage, _ in _of_trajectories(judged)]}


def over_greedy(judged: JudgedGroup) -> dict[str, Arrays]:
    return {"advantage": [advantage - judged.group.baseline for advantage, _ in _of_trajectories(judged)]}


def over_token_baselines(judged: JudgedGroup) -> dict[str, Arrays]:
    left = iter(returns(judged)["advantage"])
    return {"advantage": _minus_token_baselines(judged.valid, left)}


def over_critic(judged: JudgedGroup) -> dict[str, Arrays]:
    pairs = _of_trajectories(judged)
    return {"advantage": [advantage for advantage, _ in pairs], "return": [value for _, value in pairs]}


def gains(judged: JudgedGroup) -> dict[str, Arrays]:
    return {"advantage": _gains(sample for _, own in judged.valid for sample in own)}


def _of_trajectories(judged: JudgedGroup) -> list[tuple[np.ndarray, np.ndarray]]:
    return [pair for rollout, own in judged.valid if own for pair in _of_trajectory(rollout, own, judged.algorithm)]


def _of_baseline(judged: JudgedGroup, baseline: Baseline) -> Arrays:
    by_turn = judged.algorithm.credit == "turn"
    return (_of_turns if by_turn else _of_rollouts)(judged.valid, judged.algorithm, baseline)


def _spread(advantages: Sequence[float], valid: ValidRollouts) -> Arrays:
    """Return each rollout's advantage for all tokens of its samples."""
    return [np.full(len(s.tokens), a) for a, (_, own) in zip(advantages, valid, strict=True) for s in own]


def _estimated(group: Group, valid: ValidRollouts, estimate: Estimate) -> Arrays:
    """Return the advantages of a group's samples by a user's estimate."""
    sampled, columns = list[np.ndarray](), list[dict[str, np.ndarray]]()
    for rollout, own in valid:
        on = np.concatenate([branch.mask for branch in rollout.branches]) > 0
        names = own[0].columns if own else ()
        columns.append({name: _flat(s.columns[name] for s in own)[on] for name in names})
        sampled.append(on)
    view = RewardedGroup(
        group,
        rewards=np.array([rollout.signal for rollout, _ in valid]),
        lengths=np.array([rollout.sampled for rollout, _ in valid]),
        columns=columns,
    )
    found = Arrays()
    for (_, own), on, values in zip(valid, sampled, sampled_advantages(view, estimate), strict=True):
        flat = np.zeros(len(on))
        flat[on] = values
        found += np.split(flat, np.cumsum([len(s.tokens) for s in own])[:-1])
    return found


def sampled_advantages(group: RewardedGroup, estimate: Estimate) -> Arrays:
    """Return the estimated advantages of each rollout's sampled tokens. Raise RunError if they are unfit."""
    advantages, name = estimate(group), f"the advantages of prompt {group.group.prompt.id}"
    if len(advantages) != len(group.rewards):
        expected = f"expected {len(group.rewards)}, one for each rollout with a reward"
        raise RunError(f"{name}: {expected}, found {len(advantages)}")
    found = Arrays()
    for advantage, length in zip(advantages, group.lengths.tolist(), strict=True):
        values = np.asarray(advantage, np.float64)
        if values.ndim and values.shape != (length,):
            expected = f"a number or an array of {length}, one for each sampled token"
            raise RunError(f"{name}: expected {expected}, found one of shape {list(values.shape)}")
        if not np.isfinite(values).all():
            raise RunError(f"{name}: expected finite numbers, found {advantage}")
        found.append(np.broadcast_to(values, (length,)))
    return found


def _of_rewards(rollouts: Sequence[Rollout], algorithm: AlgorithmSection, weights: Weights) -> list[float]:
    """Return the advantages of a group whose rewards are normalized one by one. The penalty for length is one of
    them."""
    for rollout in rollouts:
        if not weights.keys() & rollout.parts.keys():
            raise RunError(
                'algorithm.advantage = "per_reward" expected the components of task.rewards, found a rollout without',
                "Its environment or agent gave it a reward. Return none there, so that task.rewards judges it.",
            )
    table = [[r.parts.get(name, math.nan) for name in weights] + [-r.penalty] for r in rollouts]
    return per_reward(table, [*weights.values(), algorithm.length_weight])


def _charges(valid: ValidRollouts, charges: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the KL that each rollout's turns are charged. A rollout without trained tokens (overlong_filter) has no
    KL: it is charged its siblings' mean, so that their baseline does not depend on whether it was filtered."""
    trained = [any(np.asarray(s.mask).any() for s in own) for _, own in valid]
    turns = zip_longest(*(charge for charge, on in zip(charges, trained, strict=True) if on))
    means = [float(np.mean([charge for charge in turn if charge is not None])) for turn in turns]
    return [
        list(charge) if on else [means[k] if k < len(means) else 0.0 for k in range(len(charge))]
        for charge, on in zip(charges, trained, strict=True)
    ]


def _of_rollouts(valid: ValidRollouts, algorithm: AlgorithmSection, baseline: Baseline) -> Arrays:
    """Return the advantages of a group's samples with credit "outcome": each token has its rollout's. A KL in the
    reward is subtracted before the baseline."""
    rewards = [rollout.signal for rollout, _ in valid]
    if algorithm.kl_in == "reward":
        charges = _charges(valid, [[float(sum(_kl(s, algorithm).sum() for s in own))] for _, own in valid])
        rewards = [reward - charge for reward, (charge,) in zip(rewards, charges, strict=True)]
    return _spread(baseline(rewards, [rollout.sampled for rollout, _ in valid], algorithm), valid)


def _of_turns(valid: ValidRollouts, algorithm: AlgorithmSection, baseline: Baseline) -> Arrays:
    """Return the advantages of a group's samples with credit "turn": each token has its turn's. A KL in the reward is
    subtracted before the baseline."""
    kl = [np.concatenate([_kl(s, algorithm) for s in own]) for _, own in valid]
    spans = [_spans(rollout) for rollout, _ in valid]
    charges = _charges(valid, [[float(k[b:e].sum()) for b, e in own] for k, own in zip(kl, spans, strict=True)])
    returns = [
        _discounted_turns([r - c for r, c in zip(_turn_rewards(rollout), charge, strict=True)], algorithm.gamma)
        for (rollout, _), charge in zip(valid, charges, strict=True)
    ]
    by_turn = zip_longest(*returns)  # the k-th turns of all rollouts; None where a rollout ended before
    advantages = [iter(baseline([g for g in turn if g is not None], (), algorithm)) for turn in by_turn]
    return [
        level
        for (rollout, _), g in zip(valid, returns, strict=True)
        for level in _by_turn(rollout, [next(advantages[k]) for k in range(len(g))])
    ]


def _of_trajectory(
    rollout: Rollout, own: Sequence[Sample], algorithm: AlgorithmSection
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the advantages and the returns of a rollout's samples, estimated token by token over all of its turns."""
    spans, order = _spans(rollout), _order(rollout, own)
    ends = np.cumsum([len(s.tokens) for s in own])

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
    if algorithm.needs_critic:
        values = joined([s.columns["value"] for s in own])
        advantages, returns = gae(rewards, values, mask, gamma=algorithm.gamma, lam=algorithm.gae_lambda)
    else:
        advantages = returns = discounted(rewards, mask, algorithm.gamma)
    back = np.argsort(order)
    return list(zip(np.split(advantages[back], ends[:-1]), np.split(returns[back], ends[:-1]), strict=True))


def _order(rollout: Rollout, own: Sequence[Sample]) -> np.ndarray:
    """Return the places of a rollout's tokens, all branches end to end, in the order of its turns."""
    spans = _spans(rollout) if len(own) > 1 else [(0, len(own[0].tokens))]
    return np.concatenate([np.arange(*span) for span in spans])


def _minus_token_baselines(valid: ValidRollouts, returns: Iterator[np.ndarray]) -> Arrays:
    """Return the returns of a group's samples minus the optimal baseline of its t-th trained tokens."""
    by_rollout, trained, norms, ends = Arrays(), Arrays(), Arrays(), Arrays()
    for rollout, own in valid:
        if not own:
            continue
        order = _order(rollout, own)
        on = _flat(s.mask for s in own)[order] > 0
        by_rollout.append(_flat(next(returns) for _ in own))
        trained.append(order[on])
        norms.append(_flat(s.columns["score_norm"] for s in own)[order[on]])
        ends.append(np.cumsum([len(s.tokens) for s in own]))
    baselines = token_baselines([r[at] for r, at in zip(by_rollout, trained, strict=True)], norms)
    found = Arrays()
    for flat, at, baseline, cuts in zip(by_rollout, trained, baselines, ends, strict=True):
        flat[at] -= baseline
        found += np.split(flat, cuts[:-1])
    return found


def _spans(rollout: Rollout) -> list[tuple[int, int]]:
    """Return where each turn begins and ends in a rollout's tokens, all branches end to end; in the order of turns."""
    spans, begin = [], 0
    for branch in rollout.branches:
        for turn in branch.turns:
            end = begin + len(turn.context) + len(turn.completion.tokens)
            spans.append((turn.index, begin, end))
            begin = end
    return [(begin, end) for _, begin, end in sorted(spans)]


def _turn_rewards(rollout: Rollout) -> list[float]:
    """Return the reward of each turn. The last one gets the remainder of the rollout's reward."""
    rewards = [turn.reward for turn in rollout.turns]
    rewards[-1] += rollout.signal - sum(rewards)
    return rewards


def _discounted_turns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return G_k = r_k + gamma G_{k+1} of each turn."""
    returns, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
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
