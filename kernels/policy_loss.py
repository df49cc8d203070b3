"""The losses, as pure functions of per-token values. Each returns sums over the tokens of this microbatch; dividing by
the step's global token count, fixed at packing, is what makes the result independent of mesh and microbatching.

    clipped surrogate (PPO, GRPO)   -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)
    ratio                           exp(logprob - behaviour logprob)
    k3 KL to the reference          exp(ref - logprob) - (ref - logprob) - 1
"""

from dataclasses import dataclass, fields

import torch

MAX_LOG_RATIO = 20.0  # exp() of a larger difference says nothing but "these are different policies"


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over trained tokens (the last two are maxima): reduced over the mesh, then divided by the token count."""

    loss: torch.Tensor
    entropy: torch.Tensor
    gap: torch.Tensor  # |logprob - behaviour|
    gap_mult: torch.Tensor  # exp |logprob - behaviour|
    ratio: torch.Tensor
    clip_low: torch.Tensor
    clip_high: torch.Tensor
    kl: torch.Tensor
    gap_max: torch.Tensor
    ratio_max: torch.Tensor

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]


def grpo(
    logprob_T: torch.Tensor,
    entropy_T: torch.Tensor,
    *,
    behaviour_T: torch.Tensor,
    advantage_T: torch.Tensor,
    mask_T: torch.Tensor,
    reference_T: torch.Tensor | None = None,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
) -> tuple[torch.Tensor, TokenSums]:
    """All tensors of one shape; mask is 1.0 on trained tokens and selects by `where`, so that what lies under a 0
    (padding, prompts) can be anything, NaN included."""
    on = mask_T > 0
    zero = torch.zeros_like(logprob_T)
    difference = torch.where(on, logprob_T - behaviour_T, zero)
    ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantage = torch.where(on, advantage_T, zero)
    surrogate = -torch.minimum(ratio * advantage, clipped * advantage)
    kl = zero
    if reference_T is not None:
        to_reference = torch.where(on, reference_T - logprob_T, zero)
        kl = to_reference.exp() - to_reference - 1
    loss = (surrogate + kl_coef * kl).sum()

    with torch.no_grad():
        gap = difference.abs()
        sums = TokenSums(
            loss=loss.detach(),
            entropy=torch.where(on, entropy_T, zero).sum(),
            gap=gap.sum(),
            gap_mult=torch.where(on, gap.exp(), zero).sum(),
            ratio=torch.where(on, ratio, zero).sum(),
            clip_low=(on & (ratio < 1 - clip_low) & (advantage < 0)).float().sum(),
            clip_high=(on & (ratio > 1 + clip_high) & (advantage > 0)).float().sum(),
            kl=kl.detach().sum(),
            gap_max=gap.max(),
            ratio_max=torch.where(on, ratio, zero).max(),
        )
    return loss, sums


def supervised(
    logprob_T: torch.Tensor,
    entropy_T: torch.Tensor,
    *,
    mask_T: torch.Tensor,
) -> tuple[torch.Tensor, TokenSums]:
    """Cross-entropy on the masked tokens."""
    on = mask_T > 0
    zero = torch.zeros_like(logprob_T)
    loss = -torch.where(on, logprob_T, zero).sum()
    nothing = loss.detach().new_zeros(())
    sums = TokenSums(
        loss=loss.detach(),
        entropy=torch.where(on, entropy_T, zero).sum().detach(),
        **{name: nothing for name in TokenSums.names() if name not in ("loss", "entropy")},
    )
    return loss, sums
