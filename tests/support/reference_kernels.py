"""What kernels are compared with: the same in plain torch, however slow."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titan_rl.wire.weight_plan import Copy


def reference_pack(params: Mapping[str, Tensor], copies: Sequence[Copy], run: Tensor) -> None:
    """Pack by indices, row by row."""
    packed = [run.new_empty(0)]
    for c in copies:
        blocks, rows = torch.arange(c.blocks)[:, None], torch.arange(c.rows)
        index = (c.src_row0 + blocks * c.block_stride + rows * c.src_step).flatten().to(params[c.name].device)
        table = params[c.name].reshape(len(params[c.name]), -1)
        packed.append(table[index, c.src_col0 : c.src_col0 + c.cols].flatten().to(run.device, run.dtype))
    run.copy_(torch.cat(packed))


def reference_token_logprob(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute token_logprob in plain autograd, both results differentiable. It keeps several [T, V] tensors."""
    logits_TV = hidden_TD @ weight_VD.T
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)) / temperature
    logprobs_TV = logits_TV.log_softmax(-1)
    logprob_T = logprobs_TV.gather(-1, targets_T.unsqueeze(-1)).squeeze(-1)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprob_T, entropy_T
