"""One step's numbers, computed from the data that flowed through it and never carried inside that data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan_rl.wire.types import Backlog, EngineStats, Group, StepStats, SyncStats

EVAL_SCORE = "eval/score"

DOCS: dict[str, str] = {
    "time/step": "Wall seconds of the step, evaluation and checkpoints apart.",
    "time/generate": "Seconds in which the controller waited for rollouts.",
    "time/judge": "Seconds in which reference, teacher, critic and trainer said what they think of the rollouts.",
    "time/train": "Seconds of the optimizer updates.",
    "time/sync": "Seconds until every generator served the new weights.",
    "time/wait": "What is left of the step: packing, scoring, messages.",
    "reward/mean": "Mean reward over the step's rollouts.",
    "reward/std": "Standard deviation of the reward over the step's rollouts.",
    "frac_reward_zero_std": "Share of groups whose rewards are all equal: they teach nothing.",
    "completions/mean_length": "Mean number of sampled tokens of a rollout.",
    "completions/max_length": "Most sampled tokens of a rollout.",
    "completions/clipped_ratio": "Share of rollouts that did not end with a stop token.",
    "advantage/min": "Lowest advantage: of a rollout, the mean over its tokens.",
    "advantage/max": "Highest advantage.",
    "advantage/mean": "Mean advantage over rollouts.",
    "loss": "The algorithm's loss, normalized over the whole step; near zero on-policy by construction.",
    "grad_norm": "Gradient norm before clipping.",
    "lr": "Learning rate of the step.",
    "updates/skipped": "Optimizer updates skipped because their gradient was not finite.",
    "entropy": "Mean entropy of the policy over trained tokens, in nats.",
    "logprob_gap/mean": "Mean |trainer log-prob - sampling log-prob| over trained tokens.",
    "logprob_gap/max": "Largest |trainer log-prob - sampling log-prob|.",
    "logprob_gap/mult": "Mean exp(|gap|): 1 is exact, investigate above 1.05.",
    "ratio/mean": "Mean importance ratio.",
    "ratio/min": "Smallest importance ratio.",
    "ratio/max": "Largest importance ratio.",
    "clip_ratio/low": "Share of trained tokens clipped at 1 - clip_low.",
    "clip_ratio/high": "Share of trained tokens clipped at 1 + clip_high.",
    "clip_ratio/dual": "Share of trained tokens clipped at dual_clip.",
    "off_policy/weight_mean": "Mean weight that corrects for the gap between trainer and generator.",
    "off_policy/weight_min": "Smallest such weight.",
    "off_policy/weight_max": "Largest such weight.",
    "off_policy/ess": "Effective sample size of those weights, as a share of the trained tokens.",
    "off_policy/masked": "Share of trained tokens that the correction masks out.",
    "policy_age/mean": "Mean optimizer steps between sampling a token and training on it, less one: 0 is on-policy.",
    "policy_age/max": "Age of the step's stalest token.",
    "inflight/groups": "Groups under way when the step ended, the next step's included.",
    "inflight/finished": "Of those, the ones that only waited to be trained on.",
    "bubble/trainer": "Share of the step in which the trainers neither trained nor judged.",
    "bubble/generator": "Share of the step in which the average engine did not sample (an evaluation counts).",
    "overlap": "How much of the shorter one of sampling and training ran beside the other, at least.",
    "dropped/groups": "Groups that dynamic sampling replaced, for all their rewards were equal.",
    "dropped/failed": "Groups that were replaced because their reward failed (fault.reward_attempts).",
    "dropped/tokens": "Tokens sampled in vain for both.",
    "tokens/sampled": "Tokens that the generators sampled for the step.",
    "tokens/trained": "Tokens in the loss.",
    "throughput/tokens_per_second": "Sampled tokens per wall second of the step.",
    "engine/sampling_seconds": "Seconds that the busiest vLLM engine sampled; evaluation included where there was one.",
    "engine/prefix_hit_rate": "Share of prompt tokens whose keys and values the engines had cached.",
    "engine/imbalance": "Most tokens that an engine sampled over the engines' mean: 1 is even.",
    "engine/training_seconds": "Seconds that the slowest trainer rank spent in the step.",
    "sync/seconds": "Wall seconds of the weight sync, seen from the controller.",
    "sync/bytes": "Bytes that all generator ranks read.",
    "sync/publish_seconds": "Slowest trainer rank: casting and staging its shard.",
    "sync/read_seconds": "Slowest generator rank: one-sided reads, beside the sampling; nothing over shared memory.",
    "sync/write_seconds": "Slowest generator rank: staged bytes into the engine's parameters.",
    "sync/verify_seconds": "Slowest generator rank: comparing checksums with the trainer's (weight_sync.verify).",
    "sync/hidden": "Share of sync/seconds in which the trainers had gone on already.",
    "sync/pause_seconds": "Slowest engine: seconds between two steps that went to the new weights.",
    EVAL_SCORE: "Held-out problems: mean reward of greedy samples; of a reward model, pairs in the right order.",
    "time/eval": "Seconds of the evaluation that followed the step; not in time/step.",
    "time/save": "Seconds of the checkpoint that followed the step; not in time/step.",
    "time/pause": "Seconds of a pause that followed the step; not in time/step.",
    "dropped/truncated": "Rollouts not trained on because they were truncated (overlong_filter).",
    "sync/blocks_changed": "Share of the weights' blocks transferred and written, under weight_sync.delta.",
    "reward/penalty": "Mean soft overlong punishment; not in reward/mean.",
    "kl/k1": "k1 estimate of the KL to the reference.",
    "kl/k2": "k2 estimate of the KL to the reference.",
    "kl/k3": "k3 estimate of the KL to the reference.",
    "value/loss": "The critic's loss.",
    "value/mean": "Mean value over trained tokens.",
    "value/clipped": "Share of trained tokens whose value is clipped.",
    "value/explained_variance": "1 - Var(return - value) / Var(return), values before the step: 1 is a perfect critic.",
    "value/grad_norm": "The critic's gradient norm before clipping.",
    "value/lr": "The critic's learning rate.",
    "return/mean": "Mean return over trained tokens.",
    "rewards/chosen": "DPO: beta (log pi - log ref) of the chosen answers.",
    "rewards/rejected": "DPO: beta (log pi - log ref) of the rejected answers.",
    "rewards/margins": "DPO: chosen less rejected.",
    "rewards/accuracies": "DPO: share of pairs with a positive margin.",
    "logps/chosen": "DPO: log-prob of the chosen answers.",
    "logps/rejected": "DPO: log-prob of the rejected answers.",
    "accuracy": "Reward model: share of the step's pairs in the right order.",
    "margin": "Reward model: mean score of the chosen answers less that of the rejected.",
    "score/mean": "Reward model: mean score.",
    "score/min": "Reward model: lowest score.",
    "score/max": "Reward model: highest score.",
    "throughput/tflops": "TFLOPS of the slowest trainer rank in the step, by TorchTitan's estimate of a token's FLOPs.",
    "throughput/mfu": "That as a percentage of the GPU's bfloat16 peak, where TorchTitan knows it.",
    "memory/max_active_gib": "Slowest trainer rank: most GPU memory in use in the step, in GiB.",
    "memory/max_active_pct": "The same as a percentage of the GPU's memory.",
    "memory/max_reserved_gib": "Slowest trainer rank: most GPU memory that torch's allocator held in the step.",
    "memory/max_reserved_pct": "The same as a percentage of the GPU's memory.",
    "memory/num_alloc_retries": "Slowest trainer rank: allocations that had to be retried since it started.",
    "memory/num_ooms": "Slowest trainer rank: out-of-memory errors since it started.",
}
"""Every key that a step may log. Histograms come beside them: "ratio/histogram", counts between types.RATIO_EDGES, and
"policy_age/histogram", the tokens of each age from 0 on."""

OCCASIONAL = tuple(DOCS)[tuple(DOCS).index(EVAL_SCORE) :]
"""Those that some steps or some algorithms have."""


NOTHING = Backlog(0, 0)


AFTER = ("eval", "save", "pause")
"""Parts of a lap that are not the step's."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the controller's wall seconds of one step went."""

    generate: float
    judge: float
    train: float
    sync: float
    wall: float

    @classmethod
    def of(cls, lap: Mapping[str, float]) -> "StepTimes":
        """A lap of the clock, less what followed the step."""
        wall = lap["wall"] - sum(lap.get(part, 0.0) for part in AFTER)
        parts = {part: lap.get(part, 0.0) for part in ("generate", "judge", "train", "sync")}
        return cls(**parts, wall=wall)

    @property
    def wait(self) -> float:
        return max(0.0, self.wall - self.generate - self.judge - self.train - self.sync)


def step_metrics(
    step: int,
    groups: Sequence[Group],
    stats: StepStats,
    sync: SyncStats,
    times: StepTimes,
    *,
    dropped: Sequence[Group] = (),
    backlog: Backlog = NOTHING,
    score: float | None = None,
) -> dict[str, float]:
    """The metrics of RL step `step`; `score` is the held-out score where the step was followed by an evaluation."""
    engines = list(sync.engines.values()) or [EngineStats()]
    sampling = np.array([engine.seconds for engine in engines])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array([r.reward for r in rollouts])
    lengths = np.array([r.sampled for r in rollouts])
    advantages = np.array([r.advantage for r in rollouts])
    failed = sum(bool(np.isnan(group.rewards).any()) for group in dropped)
    in_vain = sum(r.sampled for group in dropped for r in group.rollouts)
    ages = ages_of(step, groups)
    metrics = {
        "time/step": times.wall,
        "time/generate": times.generate,
        "time/judge": times.judge,
        "time/train": times.train,
        "time/sync": times.sync,
        "time/wait": times.wait,
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "frac_reward_zero_std": np.mean([group.flat for group in groups]),
        "completions/mean_length": lengths.mean(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": np.mean([r.truncated for r in rollouts]),
        "advantage/min": advantages.min(),
        "advantage/max": advantages.max(),
        "advantage/mean": advantages.mean(),
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "updates/skipped": stats.skipped,
        **stats.metrics,
        **stats.hardware,
        "policy_age/mean": ages.mean(),
        "policy_age/max": ages.max(),
        "dropped/groups": len(dropped) - failed,
        "dropped/failed": failed,
        "dropped/tokens": in_vain,
        "tokens/sampled": lengths.sum() + in_vain,
        "tokens/trained": stats.tokens,
        "throughput/tokens_per_second": (lengths.sum() + in_vain) / times.wall,
        "inflight/groups": backlog.inflight,
        "inflight/finished": backlog.finished,
        "bubble/trainer": _share(times.wall - times.train - times.judge, times.wall),
        "bubble/generator": _share(times.wall - sampling.mean(), times.wall),
        "overlap": _share(times.train + sampling.max() - times.wall, min(times.train, sampling.max())),
        "engine/sampling_seconds": sampling.max(),
        "engine/prefix_hit_rate": _share(sum(e.cached_tokens for e in engines), sum(e.prompt_tokens for e in engines)),
        "engine/imbalance": max(e.tokens for e in engines) * len(engines) / max(1, sum(e.tokens for e in engines)),
        "engine/training_seconds": stats.seconds,
        "sync/seconds": sync.seconds,
        "sync/bytes": sync.bytes,
        "sync/publish_seconds": sync.publish,
        "sync/read_seconds": sync.read,
        "sync/write_seconds": sync.write,
        "sync/verify_seconds": sync.verify,
        "sync/pause_seconds": sync.pause,
        "sync/hidden": _share(sync.seconds - sync.waited, sync.seconds),
    }
    if sync.changed is not None:
        metrics["sync/blocks_changed"] = sync.changed
    if penalties := [r.penalty for r in rollouts if r.penalty]:
        metrics["reward/penalty"] = sum(penalties) / len(rollouts)
    if score is not None:
        metrics[EVAL_SCORE] = score
    return {key: float(value) for key, value in metrics.items()}


def ages_of(step: int, groups: Sequence[Group]) -> np.ndarray:
    """Of each sampled token. Step n trains the policy that n - 1 steps made: a token of that version has age 0."""
    versions = [v for group in groups for r in group.rollouts for v in r.versions]
    return step - 1 - np.array(versions or [step - 1])  # aborted rollouts may have none


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def fit_metrics(stats: StepStats, lap: Mapping[str, float], *, score: float | None = None) -> dict[str, float]:
    """The metrics of a step on given data: supervised, or over preference pairs."""
    times = StepTimes.of(lap)
    metrics = {
        "time/step": times.wall,
        "time/judge": times.judge,
        "time/train": times.train,
        "time/sync": times.sync,
        "time/wait": times.wait,
        **{f"time/{part}": lap[part] for part in AFTER if part in lap},
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "updates/skipped": stats.skipped,
        "tokens/trained": stats.tokens,
        **stats.metrics,
        **stats.hardware,
    }
    return metrics if score is None else metrics | {EVAL_SCORE: score}
