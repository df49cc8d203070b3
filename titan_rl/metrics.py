"""One step's numbers, computed from the data that flowed through it and never carried inside that data."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_rl.types import Group, StepStats, SyncStats

EVAL_SCORE = "eval/score"

DOCS: dict[str, str] = {
    "time/step": "Wall seconds of the step, evaluation and checkpoints apart.",
    "time/generate": "Seconds in which the controller waited for rollouts.",
    "time/train": "Seconds of the optimizer step.",
    "time/sync": "Seconds until every generator served the new weights.",
    "time/wait": "What is left of the step: packing, scoring, messages.",
    "reward/mean": "Mean reward over the step's rollouts.",
    "reward/std": "Standard deviation of the reward over the step's rollouts.",
    "frac_reward_zero_std": "Share of groups whose rewards are all equal: they teach nothing.",
    "completions/mean_length": "Mean number of sampled tokens of a rollout.",
    "completions/max_length": "Most sampled tokens of a rollout.",
    "completions/clipped_ratio": "Share of rollouts that did not end with a stop token.",
    "advantage/min": "Lowest advantage.",
    "advantage/max": "Highest advantage.",
    "loss": "Policy loss, normalized by the trained tokens; near zero on-policy by construction.",
    "grad_norm": "Gradient norm before clipping.",
    "lr": "Learning rate of the step.",
    "entropy": "Mean entropy of the policy over trained tokens, in nats.",
    "kl/k3": "k3 estimate of the KL to the reference policy; 0 without one.",
    "logprob_gap/mean": "Mean |trainer log-prob - sampling log-prob| over trained tokens.",
    "logprob_gap/max": "Largest |trainer log-prob - sampling log-prob|.",
    "logprob_gap/mult": "Mean exp(|gap|): 1 is exact, investigate above 1.05.",
    "ratio/mean": "Mean importance ratio.",
    "ratio/max": "Largest importance ratio.",
    "clip_ratio/low": "Share of trained tokens clipped at 1 - clip_low.",
    "clip_ratio/high": "Share of trained tokens clipped at 1 + clip_high.",
    "policy_age/mean": "Mean optimizer steps between sampling a token and training on it, less one: 0 is on-policy.",
    "policy_age/max": "Age of the step's stalest token.",
    "tokens/sampled": "Tokens that the generators sampled for the step.",
    "tokens/trained": "Tokens in the loss.",
    "throughput/tokens_per_second": "Sampled tokens per wall second of the step.",
    "engine/sampling_seconds": "Seconds that the busiest vLLM engine sampled; evaluation included where there was one.",
    "engine/training_seconds": "Seconds that the slowest trainer rank spent in the step.",
    "sync/seconds": "Wall seconds of the weight sync, seen from the controller.",
    "sync/bytes": "Bytes that all generator ranks read.",
    "sync/publish_seconds": "Slowest trainer rank: casting and staging its shard.",
    "sync/read_seconds": "Slowest generator rank: one-sided reads.",
    "sync/write_seconds": "Slowest generator rank: staged bytes into the engine's parameters.",
    EVAL_SCORE: "Mean reward on the held-out problems, sampled greedily.",
    "time/eval": "Seconds of the evaluation that followed the step; not in time/step.",
    "time/save": "Seconds of the checkpoint that followed the step; not in time/step.",
}
"""Every key that a step may log."""

OCCASIONAL = (EVAL_SCORE, "time/eval", "time/save")  # absent from steps without an evaluation, or without a checkpoint


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the controller's wall seconds of one step went."""

    generate: float
    train: float
    sync: float
    wall: float

    @property
    def wait(self) -> float:
        return max(0.0, self.wall - self.generate - self.train - self.sync)


def step_metrics(
    step: int,
    groups: Sequence[Group],
    stats: StepStats,
    sync: SyncStats,
    times: StepTimes,
    *,
    score: float | None = None,
) -> dict[str, float]:
    """The metrics of RL step `step`; `score` is the held-out score where the step was followed by an evaluation."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array([r.reward for r in rollouts])
    lengths = np.array([r.sampled for r in rollouts])
    advantages = np.array([r.advantage for r in rollouts])
    # Step n trains the policy that n - 1 steps made: a token of that version has age 0. Aborted rollouts may have none.
    ages = step - 1 - np.array([v for r in rollouts for v in r.versions] or [step - 1])
    metrics = {
        "time/step": times.wall,
        "time/generate": times.generate,
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
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "entropy": stats.entropy,
        "kl/k3": stats.kl,
        "logprob_gap/mean": stats.gap_mean,
        "logprob_gap/max": stats.gap_max,
        "logprob_gap/mult": stats.gap_mult,
        "ratio/mean": stats.ratio_mean,
        "ratio/max": stats.ratio_max,
        "clip_ratio/low": stats.clip_low,
        "clip_ratio/high": stats.clip_high,
        "policy_age/mean": ages.mean(),
        "policy_age/max": ages.max(),
        "tokens/sampled": lengths.sum(),
        "tokens/trained": stats.tokens,
        "throughput/tokens_per_second": lengths.sum() / times.wall,
        "engine/sampling_seconds": sync.sampling,
        "engine/training_seconds": stats.seconds,
        "sync/seconds": sync.seconds,
        "sync/bytes": sync.bytes,
        "sync/publish_seconds": sync.publish,
        "sync/read_seconds": sync.read,
        "sync/write_seconds": sync.write,
    }
    if score is not None:
        metrics[EVAL_SCORE] = score
    return {key: float(value) for key, value in metrics.items()}
