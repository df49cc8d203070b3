"""The numbers of one step, computed from the data that flowed through it and never carried inside that data."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from titan_rl.wire.reports import Backlog, EngineStats, StepStats, SyncStats
from titan_rl.wire.side_columns import metrics_of_extras
from titan_rl.wire.types import Group, Rollout, uniform

NOTHING = Backlog(0, 0)
NO_SCORES: Mapping[str, float] = {}

AFTER = ("eval", "save", "pause")
"""Parts of a lap that follow the step and are not in its time."""


def step_times(lap: Mapping[str, float]) -> dict[str, float]:
    """Return where the controller's wall seconds of one step went, without what followed the step in its lap."""
    wall = lap["wall"] - sum(lap.get(part, 0.0) for part in AFTER)
    generate, judge, train, sync = (lap.get(part, 0.0) for part in ("generate", "judge", "train", "sync"))
    return {
        "time/step": wall,
        "time/generate": generate,
        "time/judge": judge,
        "time/train": train,
        "time/sync": sync,
        "time/wait": max(0.0, wall - generate - judge - train - sync),
    }


def step_metrics(
    step: int,
    groups: Sequence[Group],
    stats: StepStats,
    sync: SyncStats,
    times: Mapping[str, float],
    *,
    dropped: Sequence[Group] = (),
    backlog: Backlog = NOTHING,
    scores: Mapping[str, float] = NO_SCORES,
) -> dict[str, float]:
    """Return the metrics of RL step `step`; `scores` come from an evaluation that followed the step."""
    ages = ages_of(step, groups)
    failed = sum(bool(np.isnan(group.rewards).all()) for group in dropped)
    wasted = sum(rollout.sampled for group in dropped for rollout in group.rollouts)
    sampled = wasted + sum(rollout.sampled for group in groups for rollout in group.rollouts)
    metrics = {
        **times,
        **_rollout_metrics(groups),
        **_turn_metrics([rollout for group in groups for rollout in group.rollouts]),
        **_part_metrics([rollout for group in groups for rollout in group.rollouts]),
        **metrics_of_extras([rollout for group in groups for rollout in group.rollouts]),
        **_update_metrics(stats),
        **stats.metrics,
        **stats.hardware,
        "policy_age/mean": ages.mean(),
        "policy_age/max": ages.max(),
        "dropped/groups": len(dropped) - failed,
        "dropped/failed": failed,
        "dropped/tokens": wasted,
        "tokens/sampled": sampled,
        "tokens/trained": stats.tokens,
        "throughput/tokens_per_second": sampled / times["time/step"],
        "inflight/groups": backlog.inflight,
        "inflight/finished": backlog.finished,
        **backlog.curriculum,
        "bubble/trainer": _share(times["time/step"] - times["time/train"] - times["time/judge"], times["time/step"]),
        **_engine_metrics(list(sync.engines.values()) or [EngineStats()], times),
        "engine/training_seconds": stats.seconds,
        **_sync_metrics(sync),
    }
    if sync.relayed:
        metrics["sync/bytes_relayed"] = sync.relayed
    if sync.fell_back:
        metrics["sync/fell_back"] = len(sync.fell_back)
    if sync.changed is not None:
        metrics["sync/blocks_changed"] = sync.changed
    penalties = [rollout.penalty for group in groups for rollout in group.rollouts]
    if any(penalties):
        metrics["reward/penalty"] = sum(penalties) / len(penalties)
    baselines = [group.baseline for group in groups if group.baseline is not None]
    if baselines:
        metrics["reward/greedy"] = fmean(baselines)
    return {key: float(value) for key, value in {**metrics, **scores}.items()}


def fit_metrics(
    stats: StepStats, lap: Mapping[str, float], *, scores: Mapping[str, float] = NO_SCORES
) -> dict[str, float]:
    """Return the metrics of a step on given data: supervised examples or preference pairs."""
    metrics = {
        **{key: value for key, value in step_times(lap).items() if key != "time/generate"},
        **{f"time/{part}": lap[part] for part in AFTER if part in lap},
        **_update_metrics(stats),
        "tokens/trained": stats.tokens,
        **stats.metrics,
        **stats.hardware,
    }
    return {**metrics, **scores}


def ages_of(step: int, groups: Sequence[Group]) -> np.ndarray:
    """Return the age of each sampled token. Step n trains version n - 1: a token of that version has age 0."""
    sampled = [rollout.policy_versions for group in groups for rollout in group.rollouts]
    parts = [np.full(len(each), each[0]) if uniform(each) else np.array(each, np.int64) for each in sampled]
    versions = np.concatenate([np.zeros(0, np.int64), *parts])
    return step - 1 - (versions if versions.size else np.array([step - 1]))  # aborted rollouts may have no tokens


def _rollout_metrics(groups: Sequence[Group]) -> dict[str, float | np.floating]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array([r.reward for r in rollouts if r.valid])
    lengths = np.array([r.sampled for r in rollouts])
    advantages = np.array([r.advantage for r in rollouts if r.valid])
    return {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "frac_reward_zero_std": np.mean([group.flat for group in groups]),
        "completions/mean_length": lengths.mean(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": np.mean([r.truncated for r in rollouts]),
        "advantage/min": advantages.min(),
        "advantage/max": advantages.max(),
        "advantage/mean": advantages.mean(),
    }


def _turn_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of rollouts that are more than a single answer. A number that only some rollouts report is
    the mean over them."""
    if all(rollout.plain for rollout in rollouts):
        return {}
    turns = [sum(len(branch.turns) for branch in rollout.branches) for rollout in rollouts]
    found: dict[str, float] = {
        "turns/mean": fmean(turns),
        "turns/max": max(turns),
        "branches/mean": fmean(len(rollout.branches) for rollout in rollouts),
        "rollouts/failed": sum(not rollout.valid for rollout in rollouts),
        "rollouts/begun_again": sum(rollout.attempts - 1 for rollout in rollouts),
    }
    statuses = Counter(rollout.status for rollout in rollouts)
    found |= {f"stop/{status}": count / len(rollouts) for status, count in sorted(statuses.items())}
    named: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            named[f"environment/{name}"].append(value)
        for name, value in rollout.rewards.items() if rollout.valid else ():
            named[f"reward_part/{name}"].append(value)
        for seat, reward in rollout.seats.items():
            if reward is not None and seat not in rollout.opponents:
                named[f"reward_seat/{seat}"].append(reward)
    return found | {name: fmean(values) for name, values in named.items()}


def _part_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each component of the reward, over the answers that have it, and the number of answers without
    a reward if there are any."""
    named: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.parts.items():
            named[f"reward_part/{name}"].append(value)
    failed = (
        {"rollouts/failed": float(sum(not r.valid for r in rollouts))} if any(r.unrewarded for r in rollouts) else {}
    )
    return failed | {name: fmean(values) for name, values in named.items()}


def _update_metrics(stats: StepStats) -> dict[str, float]:
    return {"loss": stats.loss, "grad_norm": stats.grad_norm, "lr": stats.lr, "updates/skipped": stats.skipped}


def _engine_metrics(engines: Sequence[EngineStats], times: Mapping[str, float]) -> dict[str, float | np.floating]:
    sampling = np.array([engine.seconds for engine in engines])
    wall, train = times["time/step"], times["time/train"]
    drafted, accepted = sum(e.drafted for e in engines), sum(e.accepted for e in engines)
    drafts = {"engine/drafted_tokens": drafted, "engine/accepted_tokens": accepted} if drafted else {}
    return {
        "bubble/generator": _share(wall - sampling.mean(), wall),
        "overlap": _share(train + sampling.max() - wall, min(train, sampling.max())),
        "engine/sampling_seconds": sampling.max(),
        "engine/prefix_hit_rate": _share(sum(e.cached_tokens for e in engines), sum(e.prompt_tokens for e in engines)),
        "engine/recomputed_tokens": sum(e.recomputed for e in engines),
        "engine/imbalance": max(e.tokens for e in engines) * len(engines) / max(1, sum(e.tokens for e in engines)),
        **drafts,
    }


def _sync_metrics(sync: SyncStats) -> dict[str, float]:
    return {
        "sync/seconds": sync.seconds,
        "sync/bytes": sync.bytes,
        "sync/bytes_into_host": sync.into_host,
        **{f"sync/{part}_seconds": getattr(sync, part) for part in ("publish", "read", "write", "verify", "pause")},
        "sync/hidden": _share(sync.seconds - sync.waited, sync.seconds),
    }


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
