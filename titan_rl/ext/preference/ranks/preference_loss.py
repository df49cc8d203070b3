"""Losses over pairs. Sequences 2k and 2k + 1 of a microbatch are the chosen and the rejected answer to one prompt.

    c, r = log pi - log ref of the chosen and the rejected answer, summed over answer tokens
    c', r' = the same, averaged over each answer's tokens; without ref in simpo and orpo

    dpo     -(1 - s) log sigmoid(beta (c - r)) - s log sigmoid(-beta (c - r))         s: label smoothing (cDPO)
    ipo     (c' - r' - 1 / (2 beta))^2
    simpo   as dpo, with beta (c' - r') - simpo_gamma
    orpo    -c' - beta log sigmoid(log odds(c') - log odds(r'))                       log odds(x) = x - log(1 - e^x)
    kto     (d sigmoid(beta (z - c)) + u sigmoid(beta (r - z))) / 2                   d, u: weights; z: see below

    reward model (Bradley-Terry)   -log sigmoid(score(chosen) - score(rejected))

IPO averages over tokens, as TRL does; the paper's sum would make the target 1 / (2 beta) depend on length.
KTO's z estimates the KL to the reference from answers to other prompts, once per step (train/learner.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from titan_rl.kernels.statistics import Statistics, masked_max, masked_min, masked_sum, sequence_lengths, sequence_sums

AVERAGED = ("ipo", "simpo", "orpo")
MIN_NLL = 1e-6  # keeps orpo's odds finite where a probability is 1


@dataclass(frozen=True, slots=True)
class Pairs:
    """The sequences of a microbatch."""

    mask_T: torch.Tensor
    sequence_T: torch.Tensor
    sequences: int
    total: int  # pairs in the whole batch: the denominator


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    name: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 1.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Ratios:
    """The log-ratios of a microbatch's pairs; averaged over tokens if AVERAGED has the loss."""

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    kl_P: torch.Tensor  # KTO's z; 0 in other losses

    @property
    def h_P(self) -> torch.Tensor:
        return self.chosen_P - self.rejected_P


def dpo(x: Ratios, s: Preference) -> torch.Tensor:
    return _smoothed(s.beta * x.h_P, s.label_smoothing)


def ipo(x: Ratios, s: Preference) -> torch.Tensor:
    return (x.h_P - 1 / (2 * s.beta)).square()


def simpo(x: Ratios, s: Preference) -> torch.Tensor:
    return _smoothed(s.beta * x.h_P - s.simpo_gamma, s.label_smoothing)


def orpo(x: Ratios, s: Preference) -> torch.Tensor:
    return -x.chosen_P - s.beta * F.logsigmoid(_log_odds(x.chosen_P) - _log_odds(x.rejected_P))


def kto(x: Ratios, s: Preference) -> torch.Tensor:
    """Return half the sum of the losses of two unpaired answers, as the batch's mean is over answers."""
    desirable_P = torch.sigmoid(s.beta * (x.kl_P - x.chosen_P))
    undesirable_P = torch.sigmoid(s.beta * (x.rejected_P - x.kl_P))
    return (s.desirable_weight * desirable_P + s.undesirable_weight * undesirable_P) / 2


LOSSES: dict[str, Callable[[Ratios, Preference], torch.Tensor]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "kto": kto,
}


def _smoothed(margin_P: torch.Tensor, smoothing: float) -> torch.Tensor:
    return -(1 - smoothing) * F.logsigmoid(margin_P) - smoothing * F.logsigmoid(-margin_P)


def _log_odds(logprob_P: torch.Tensor) -> torch.Tensor:
    bounded_P = logprob_P.clamp(max=-MIN_NLL)
    return bounded_P - torch.log(-torch.expm1(bounded_P))


def preference_loss(
    logprob_T: torch.Tensor,
    entropy_T: torch.Tensor,
    pairs: Pairs,
    settings: Preference,
    *,
    reference_T: torch.Tensor | None = None,
    kl_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Statistics]:
    """Return the loss of pairs. `kl_T`: KTO's z, the same on every token."""
    on_T, sequence_T, sequences, beta = pairs.mask_T > 0, pairs.sequence_T, pairs.sequences, settings.beta
    policy_S = sequence_sums(logprob_T, on_T, sequence_T, sequences)
    ratio_S, kl_S = policy_S, torch.zeros_like(policy_S)
    if reference_T is not None:
        ratio_S = policy_S - sequence_sums(reference_T, on_T, sequence_T, sequences)
    tokens_S = sequence_lengths(on_T, sequence_T, sequences, ratio_S.dtype).clamp(min=1)
    if settings.name in AVERAGED:
        ratio_S = ratio_S / tokens_S
    if kl_T is not None:
        kl_S = sequence_sums(kl_T, on_T, sequence_T, sequences) / tokens_S
    ratios = Ratios(ratio_S[0::2], ratio_S[1::2], kl_S[0::2])
    loss = LOSSES[settings.name](ratios, settings).sum() / pairs.total
    with torch.no_grad():
        per_pair = {  # times 2 below: a pair is two sequences
            "rewards/chosen": beta * ratios.chosen_P,
            "rewards/rejected": beta * ratios.rejected_P,
            "rewards/margins": beta * ratios.h_P,
            "rewards/accuracies": (ratios.h_P > 0).to(ratio_S.dtype),
            "logps/chosen": policy_S[0::2],
            "logps/rejected": policy_S[1::2],
        }
        if settings.name == "kto":
            per_pair["rewards/kl"] = ratios.kl_P
        return loss, Statistics(
            tokens={"entropy": masked_sum(entropy_T, on_T)},
            sequences={name: 2 * values_P.sum() for name, values_P in per_pair.items()},
            sums={"loss": loss.detach()},
        )


def bradley_terry_loss(value_T: torch.Tensor, pairs: Pairs) -> tuple[torch.Tensor, Statistics]:
    """Return the reward model's loss. The mask selects the token of each sequence whose value is its score."""
    score_S = sequence_sums(value_T, pairs.mask_T > 0, pairs.sequence_T, pairs.sequences)
    margin_P = score_S[0::2] - score_S[1::2]
    loss = -F.logsigmoid(margin_P).sum() / pairs.total
    with torch.no_grad():
        every_S = torch.ones_like(score_S, dtype=torch.bool)
        return loss, Statistics(
            sequences={
                "accuracy": 2 * (margin_P > 0).to(margin_P.dtype).sum(),
                "margin": 2 * margin_P.sum(),
                "score/mean": score_S.sum(),
            },
            sums={"loss": loss.detach()},
            maxima={"score/max": masked_max(score_S, every_S)},
            minima={"score/min": masked_min(score_S, every_S)},
        )
