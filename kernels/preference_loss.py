"""Losses over pairs. Sequences 2k and 2k + 1 of a microbatch are the chosen and the rejected answer to one prompt.

    h = (log pi - log ref)(chosen) - (log pi - log ref)(rejected)                     summed over answer tokens

    dpo     -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)                     s: label smoothing (cDPO)
    ipo     (h' - 1 / (2 beta))^2, where h' averages log-probs over each answer's tokens

    reward model (Bradley-Terry)   -log sigmoid(score(chosen) - score(rejected))

IPO averages over tokens, as TRL does; the paper's sum would make the target 1 / (2 beta) depend on length.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from titan_rl.kernels.statistics import Statistics, masked_max, masked_min, masked_sum, sequence_lengths, sequence_sums

Preference = Literal["dpo", "ipo"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The sequences of a microbatch."""

    mask_T: torch.Tensor
    sequence_T: torch.Tensor
    sequences: int
    total: int  # pairs in the whole batch: the denominator


def dpo_loss(
    logprob_T: torch.Tensor,
    entropy_T: torch.Tensor,
    reference_T: torch.Tensor,
    pairs: Pairs,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    kind: Preference = "dpo",
) -> tuple[torch.Tensor, Statistics]:
    on_T, sequence_T, sequences = pairs.mask_T > 0, pairs.sequence_T, pairs.sequences
    policy_S = sequence_sums(logprob_T, on_T, sequence_T, sequences)
    reference_S = sequence_sums(reference_T, on_T, sequence_T, sequences)
    ratio_S = policy_S - reference_S
    if kind == "ipo":
        ratio_S = ratio_S / sequence_lengths(on_T, sequence_T, sequences, ratio_S.dtype).clamp(min=1)
    chosen_P, rejected_P = ratio_S[0::2], ratio_S[1::2]
    h_P = chosen_P - rejected_P
    if kind == "ipo":
        loss_P = (h_P - 1 / (2 * beta)).square()
    else:
        loss_P = -(1 - label_smoothing) * F.logsigmoid(beta * h_P) - label_smoothing * F.logsigmoid(-beta * h_P)
    loss = loss_P.sum() / pairs.total
    with torch.no_grad():
        per_pair = {  # times 2 below: a pair is two sequences
            "rewards/chosen": beta * chosen_P,
            "rewards/rejected": beta * rejected_P,
            "rewards/margins": beta * h_P,
            "rewards/accuracies": (h_P > 0).to(h_P.dtype),
            "logps/chosen": policy_S[0::2],
            "logps/rejected": policy_S[1::2],
        }
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
