"""The critic's loss.

    1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)        clip = 0: 1/2 (V - R)^2

R is the return (advantage + V_old, before the advantages are whitened), V_old the value before the step's first update.
"""

import torch

from titan_rl.kernels.statistics import Statistics, masked_sum


def value_loss(
    value_T: torch.Tensor,
    *,
    old_T: torch.Tensor,
    return_T: torch.Tensor,
    mask_T: torch.Tensor,
    weight_T: torch.Tensor,
    clip: float,
) -> tuple[torch.Tensor, Statistics]:
    on_T, zero_T = mask_T > 0, torch.zeros_like(value_T)
    value_T, old_T, return_T = (torch.where(on_T, x, zero_T) for x in (value_T, old_T, return_T))
    error_T = (value_T - return_T).square()
    chosen_T = error_T
    if clip > 0:
        held_T = torch.maximum(torch.minimum(value_T, old_T + clip), old_T - clip)
        chosen_T = torch.maximum(error_T, (held_T - return_T).square())
    loss = 0.5 * (torch.where(on_T, weight_T, zero_T) * chosen_T).sum()
    with torch.no_grad():
        residual_T = return_T - old_T
        return loss, Statistics(
            tokens={
                "value/mean": masked_sum(value_T, on_T),
                "value/clipped": masked_sum((chosen_T > error_T).to(value_T.dtype), on_T),
                "return/mean": masked_sum(return_T, on_T),
                # first and second moments, for the explained variance
                "return/square": masked_sum(return_T.square(), on_T),
                "residual/mean": masked_sum(residual_T, on_T),
                "residual/square": masked_sum(residual_T.square(), on_T),
            },
            sums={"loss": loss.detach()},
        )
