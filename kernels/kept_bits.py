"""Masks of the tokens that truncated sampling kept, one bit per token of the vocabulary: bit v % 8 of byte v // 8.

An eighth of a byte per logit: 16 times less than the logits in bfloat16 that token_logprob.py does not keep.
"""

import torch

DROPPED = -1e30  # logit of a dropped token: finite, because -inf minus -inf would be NaN


def kept_bits(counts_T: torch.Tensor, ids_P: torch.Tensor, vocabulary: int, start: int = 0) -> torch.Tensor:
    """Return the masks of T tokens over `vocabulary` ids from `start` on, [T, ceil(vocabulary / 8)] uint8; at least a
    byte each.

    Token t keeps counts_T[t] ids, the next ones of ids_P; all ids where the count is 0.
    """
    width, tokens = max(1, -(-vocabulary // 8)), torch.arange(len(counts_T), device=ids_P.device)
    row_P = tokens.repeat_interleave(counts_T, output_size=len(ids_P))
    own_P = ids_P - start
    inside_P = (own_P >= 0) & (own_P < vocabulary)
    own_P = torch.where(inside_P, own_P, 0)
    bit_P = torch.where(inside_P, 1 << own_P % 8, 0).to(torch.uint8)
    bits = torch.zeros(len(counts_T) * width, dtype=torch.uint8, device=ids_P.device)
    bits.scatter_add_(0, row_P * width + own_P // 8, bit_P)  # each id once: a sum is a union
    return torch.where((counts_T == 0).unsqueeze(1), 255, bits.view(-1, width))


def dropped(bits_TB: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return which of the first `vocabulary` tokens were dropped, [T, vocabulary] bool."""
    bytes_TB = bits_TB[:, : -(-vocabulary // 8)].unsqueeze(-1)
    kept_TB8 = bytes_TB >> torch.arange(8, dtype=torch.uint8, device=bits_TB.device) & 1
    return (kept_TB8 == 0).flatten(1)[:, :vocabulary]


def keeps(bits_TB: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    """Return whether each token's mask has its id, [T] bool."""
    byte_T = bits_TB.gather(1, (ids_T // 8).unsqueeze(1)).squeeze(1)
    return (byte_T >> (ids_T % 8).to(torch.uint8) & 1) == 1
