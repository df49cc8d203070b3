"""Generalized Jensen-Shannon divergence from a teacher, over its most likely tokens (GKD).

p is the teacher's distribution and q the policy's, over the teacher's k most likely tokens and one bucket of all
others. m = beta p + (1 - beta) q.

    beta = 0      KL(p || q)                                 forward: covers all that the teacher may say
    beta = 1      KL(q || p)                                 reverse: keeps to what the teacher may say
    between       beta KL(p || m) + (1 - beta) KL(q || m)

With k = the vocabulary the bucket is empty, and this is the divergence of the whole distributions.
"""

import math

import torch

LEAST_REST = 1e-7  # mass of the bucket: its logarithm stays finite


def divergence(student_TK: torch.Tensor, teacher_TK: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the divergence at each place, [T], from both models' log-probs of the same k tokens."""
    q_TK, p_TK = with_rest(student_TK), with_rest(teacher_TK)
    if beta == 0:
        return kl(p_TK, q_TK)
    if beta == 1:
        return kl(q_TK, p_TK)
    m_TK = torch.logaddexp(p_TK + math.log(beta), q_TK + math.log1p(-beta))
    return beta * kl(p_TK, m_TK) + (1 - beta) * kl(q_TK, m_TK)


def with_rest(logprobs_TK: torch.Tensor) -> torch.Tensor:
    """Append the log of the mass that these log-probs leave."""
    log_mass_T1 = logprobs_TK.logsumexp(-1, keepdim=True).clamp(max=-LEAST_REST)
    return torch.cat([logprobs_TK, torch.log(-torch.expm1(log_mass_T1))], -1)


def kl(p_TK: torch.Tensor, q_TK: torch.Tensor) -> torch.Tensor:
    return (p_TK.exp() * (p_TK - q_TK)).sum(-1)
