"""Log-probability of each target token, and the entropy of each position's distribution.

    logits [B, L, V], targets [B, L] -> logprob [B, L], entropy [B, L]

Both sides of the loop must mean the same thing by "log-prob": log_softmax(logits / temperature) in fp32, which is what
vLLM's `processed_logprobs` returns at the sampling temperature.
"""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard


def token_logprob(
    logits_BLV: torch.Tensor,
    targets_BL: torch.Tensor,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_BLV = whole_vocabulary(logits_BLV)
    logits_BLV = logits_BLV.to(torch.promote_types(logits_BLV.dtype, torch.float32))
    if temperature != 1.0:
        logits_BLV = logits_BLV / temperature
    logprobs_BLV = logits_BLV.log_softmax(-1)
    logprob_BL = logprobs_BLV.gather(-1, targets_BL.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():  # entropy is watched, not optimized
        entropy_BL = -(logprobs_BLV.exp() * logprobs_BLV).sum(-1)
    return logprob_BL, entropy_BL


def whole_vocabulary(logits_BLV: torch.Tensor) -> torch.Tensor:
    """Under tensor parallelism the output head yields vocabulary shards: gather them."""
    if not isinstance(logits_BLV, DTensor):
        return logits_BLV
    last = logits_BLV.ndim - 1
    placements = [Replicate() if isinstance(p, Shard) and p.dim in (-1, last) else p for p in logits_BLV.placements]
    return logits_BLV.redistribute(placements=placements).to_local()
