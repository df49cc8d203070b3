"""The surrogate of a token: one function for each value of the key `clip`, and the settings of the loss.

config/methods.py lists the clips with their formulas, where r is the ratio, A the advantage, p = exp(logprob_t) and
q = exp(old_t). sapo's tau, and vespo's k and lambda, follow from the sign of A.

The covariance of a token is (A - mean A) (logprob_t - mean logprob), with means over the microbatch.
"""

import math
from dataclasses import dataclass, field, replace

import torch

from titan_rl.config.sections import Level
from titan_rl.kernels.kl import MAX_LOG_RATIO, Estimator
from titan_rl.kernels.off_policy import OffPolicy
from titan_rl.kernels.selections import evenly_spaced, ranks, share_of
from titan_rl.kernels.statistics import broadcast, sequence_lengths, sequence_sums

LEAST_LOG_W = math.log(1e-8)
TINY = 1e-8  # keeps dppo_kl's logarithm finite where a probability is 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    ratio: Level = "token"
    clip: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0  # above 1; 0 disables it
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    vespo_k_positive: float = 2.0
    vespo_k_negative: float = 3.0
    vespo_lambda_positive: float = 3.0
    vespo_lambda_negative: float = 2.0
    cov_share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_kl_coef: float = 1.0
    ratio_penalty: float = 0.0
    kl: Estimator = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    top_entropy_share: float = 1.0
    off_policy: OffPolicy = field(default_factory=OffPolicy)


@dataclass(frozen=True, slots=True)
class Policies:
    """What a clip reads of a microbatch. Values are 0 where a token is not trained on."""

    on_T: torch.Tensor
    current_T: torch.Tensor  # log-prob, with its gradient
    old_T: torch.Tensor  # log-prob in the denominator of the ratio
    ratio_T: torch.Tensor  # at the level of `Surrogate.ratio`
    advantage_T: torch.Tensor
    sequence_T: torch.Tensor
    sequences: int

    @property
    def log_ratio_T(self) -> torch.Tensor:
        """The token's own, also if the ratio is a sequence's."""
        return (self.current_T - self.old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def moved_T(self) -> torch.Tensor:
        """The change of the token's probability, detached."""
        return self.current_T.detach().exp() - self.old_T.exp()

    @property
    def covariance_T(self) -> torch.Tensor:
        """Detached."""
        tokens = self.on_T.sum().clamp(min=1)
        logprob_T = self.current_T.detach()
        product_T = (self.advantage_T - self.advantage_T.sum() / tokens) * (logprob_T - logprob_T.sum() / tokens)
        return torch.where(self.on_T, product_T, -torch.inf)


@dataclass(frozen=True, slots=True)
class Clipped:
    """A surrogate, and the tokens whose gradient its clip removes or limits: below, above, and at dual_clip; and those
    selected by their covariance. None: no token."""

    loss_T: torch.Tensor
    low_T: torch.Tensor | None = None
    high_T: torch.Tensor | None = None
    dual_T: torch.Tensor | None = None
    selected_T: torch.Tensor | None = None


def ppo(x: Policies, s: Surrogate) -> Clipped:
    clipped_T = x.ratio_T.clamp(1 - s.clip_low, 1 + s.clip_high)
    loss_T = -torch.minimum(x.ratio_T * x.advantage_T, clipped_T * x.advantage_T)
    low_T, high_T = _beyond(x, s)
    if not s.dual_clip:
        return Clipped(loss_T, low_T, high_T)
    limited_T = torch.where(x.advantage_T < 0, torch.minimum(loss_T, -s.dual_clip * x.advantage_T), loss_T)
    return Clipped(limited_T, low_T, high_T, (x.ratio_T > s.dual_clip) & (x.advantage_T < 0))


def cispo(x: Policies, s: Surrogate) -> Clipped:
    """Clip the weight of the score function, for advantages of both signs."""
    weight_T = x.ratio_T.detach().clamp(1 - s.clip_low, 1 + s.clip_high)
    low_T, high_T = x.ratio_T < 1 - s.clip_low, x.ratio_T > 1 + s.clip_high
    return Clipped(-weight_T * x.advantage_T * x.current_T, low_T, high_T)


def sapo(x: Policies, s: Surrogate) -> Clipped:
    """Fade the gradient out as the ratio leaves 1. At 1 it is PPO's."""
    tau_T = _where(x.advantage_T > 0, s.sapo_tau_positive, s.sapo_tau_negative, x.ratio_T)
    return Clipped(-torch.sigmoid(tau_T * (x.ratio_T - 1)) * 4 / tau_T * x.advantage_T)


def dppo_tv(x: Policies, s: Surrogate) -> Clipped:
    moved_T = x.moved_T
    return _without(x, s, rose_T=moved_T > s.clip_high, fell_T=moved_T < -s.clip_low)


def dppo_kl(x: Policies, s: Surrogate) -> Clipped:
    """Measure the KL of the distribution over two outcomes, the sampled token and any other."""
    current_T = x.current_T.detach()
    p_T, q_T = current_T.exp(), x.old_T.exp()
    other_p_T, other_q_T = (1 - p_T).clamp(min=0), (1 - q_T).clamp(min=0)  # rounding can make a probability above 1
    kl_T = q_T * (x.old_T - current_T) + other_q_T * torch.log((other_q_T + TINY) / (other_p_T + TINY))
    return _without(x, s, rose_T=(kl_T > s.clip_high) & (p_T > q_T), fell_T=(kl_T > s.clip_low) & (p_T < q_T))


def prob_diff(x: Policies, s: Surrogate) -> Clipped:
    """Drop a token whose probability has moved far, whichever way its advantage points."""
    moved_T = x.moved_T
    low_T, high_T = moved_T < -s.clip_low, moved_T > s.clip_high
    return Clipped(-torch.where(low_T | high_T, 0.0, x.ratio_T) * x.advantage_T, low_T, high_T)


def gmpo(x: Policies, s: Surrogate) -> Clipped:
    """Clip each token's log-ratio, then take the geometric mean over the sequence."""
    log_T = x.current_T - x.old_T
    positive_T, negative_T = x.advantage_T > 0, x.advantage_T < 0
    clipped_T = torch.where(positive_T, log_T.clamp(max=s.clip_high), log_T)
    clipped_T = torch.where(negative_T, clipped_T.clamp(min=-s.clip_low), clipped_T)
    ratio_T = sequence_log_ratio(clipped_T, x.on_T, x.sequence_T, x.sequences).exp()
    low_T, high_T = negative_T & (log_T < -s.clip_low), positive_T & (log_T > s.clip_high)
    return Clipped(-ratio_T * x.advantage_T, low_T, high_T)


def vespo(x: Policies, s: Surrogate) -> Clipped:
    """Weigh the score function by a gamma function of the whole sequence's ratio. It is 1 at a ratio of 1."""
    log_S = sequence_sums(x.log_ratio_T.detach(), x.on_T, x.sequence_T, x.sequences)
    log_w_T = broadcast(log_S.clamp(LEAST_LOG_W, MAX_LOG_RATIO), x.sequence_T)
    positive_T = x.advantage_T >= 0
    k_T = _where(positive_T, s.vespo_k_positive, s.vespo_k_negative, log_w_T)
    lambda_T = _where(positive_T, s.vespo_lambda_positive, s.vespo_lambda_negative, log_w_T)
    weight_T = torch.exp(lambda_T + k_T * log_w_T - lambda_T * log_w_T.exp())
    return Clipped(-weight_T * x.advantage_T * x.current_T)


def clip_cov(x: Policies, s: Surrogate) -> Clipped:
    """Remove the gradient of a few tokens that would lower the entropy most, besides PPO's clip."""
    low_T, high_T = _beyond(x, s)
    covariance_T = x.covariance_T
    inside_T = (covariance_T > s.cov_low) & (covariance_T < s.cov_high) & ~(low_T | high_T)
    selected_T = evenly_spaced(inside_T, share_of(s.cov_share, x.on_T))
    clipped = ppo(x, s)
    return replace(clipped, loss_T=torch.where(selected_T, 0.0, clipped.loss_T), selected_T=selected_T)


def kl_cov(x: Policies, s: Surrogate) -> Clipped:
    """Hold back the tokens that would lower the entropy most."""
    selected_T = x.on_T & (ranks(x.covariance_T, x.on_T) < share_of(s.cov_share, x.on_T))
    penalty_T = torch.where(selected_T, s.cov_kl_coef * x.log_ratio_T.abs(), 0.0)
    return Clipped(-x.ratio_T * x.advantage_T + penalty_T, selected_T=selected_T)


def unclipped(x: Policies, s: Surrogate) -> Clipped:
    return Clipped(-x.ratio_T * x.advantage_T)


def sequence_log_ratio(
    log_T: torch.Tensor, on_T: torch.Tensor, sequence_T: torch.Tensor, sequences: int
) -> torch.Tensor:
    """Return the mean log-ratio of each token's sequence, [T]. Each token keeps the gradient of `log_T`."""
    lengths_S = sequence_lengths(on_T, sequence_T, sequences, log_T.dtype).clamp(min=1)
    mean_S = sequence_sums(log_T.detach(), on_T, sequence_T, sequences) / lengths_S
    level_T = broadcast(mean_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), sequence_T)
    return torch.where(on_T, level_T + (log_T - log_T.detach()), torch.zeros_like(log_T))


def _where(condition_T: torch.Tensor, value: float, other: float, like_T: torch.Tensor) -> torch.Tensor:
    """Choose between two numbers, in the dtype of `like_T`: torch.where would return its default dtype."""
    return torch.full_like(like_T, other).masked_fill(condition_T, value)


def _beyond(x: Policies, s: Surrogate) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens whose ratio is below or above PPO's clip, in the direction of their advantage."""
    low_T = (x.ratio_T < 1 - s.clip_low) & (x.advantage_T < 0)
    return low_T, (x.ratio_T > 1 + s.clip_high) & (x.advantage_T > 0)


def _without(x: Policies, s: Surrogate, *, rose_T: torch.Tensor, fell_T: torch.Tensor) -> Clipped:
    """Weigh the score function by the ratio, but drop tokens that moved too far in the direction of their advantage."""
    positive_T = x.advantage_T > 0
    high_T, low_T = positive_T & rose_T, ~positive_T & fell_T
    kept_T, weight_T, dual_T = ~(high_T | low_T), x.ratio_T.detach(), None
    if s.dual_clip:
        weight_T, dual_T = weight_T.clamp(max=s.dual_clip), kept_T & (weight_T > s.dual_clip)
    return Clipped(-torch.where(kept_T, weight_T, 0.0) * x.advantage_T * x.current_T, low_T, high_T, dual_T)
