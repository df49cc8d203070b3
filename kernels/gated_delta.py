"""Gated DeltaNet in torch, for trainers and for engines on a CPU: a causal convolution, and a state that decays and
that each token corrects.

    state_t = exp(log_decay_t) state_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T;  out_t = state_t q_t

Shape suffixes, besides a decoder's: C chunks, T places of a chunk, K size of a key's head, V size of a value's.
"""

import torch
import torch.nn.functional as F

CHUNK = 64  # places that are computed at once
EPS = 1e-6  # keeps norms of queries and keys above 0


def causal_conv(x_BLD: torch.Tensor, weight_DW: torch.Tensor, documents_BL: torch.Tensor | None = None) -> torch.Tensor:
    """Return SiLU of the sum of each channel's last W inputs, weighted. Inputs of other documents count as zeros."""
    width = weight_DW.shape[1]
    out_BLD = x_BLD * weight_DW[:, -1]
    for back in range(1, min(width, x_BLD.shape[1])):
        before_BLD = F.pad(x_BLD[:, :-back], (0, 0, back, 0))
        if documents_BL is not None:
            same_BL = documents_BL == F.pad(documents_BL[:, :-back], (back, 0), value=-1)
            before_BLD = before_BLD * same_BL[..., None]
        out_BLD = out_BLD + before_BLD * weight_DW[:, -1 - back]
    return F.silu(out_BLD)


def gated_delta_rule(
    q_BLNK: torch.Tensor,
    k_BLNK: torch.Tensor,
    v_BLNV: torch.Tensor,
    log_decay_BLN: torch.Tensor,
    beta_BLN: torch.Tensor,
    *,
    documents_BL: torch.Tensor | None = None,
    state_BNKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the answer to each query from the state, and the last state, both in float32. `documents_BL` numbers the
    documents of a row; each but the first begins without a state. Heads of keys may each serve several of values."""
    size, length, heads = k_BLNK.shape[-1], k_BLNK.shape[1], v_BLNV.shape[2]
    chunk = min(CHUNK, length)
    padding = -length % chunk
    q_BLNK, k_BLNK = (_unit(x.float()).repeat_interleave(heads // x.shape[2], dim=2) for x in (q_BLNK, k_BLNK))

    def chunks(x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, padding))
        return x.unflatten(1, (-1, chunk)).movedim(3, 1)  # [B, N, C, T, ...]

    q, k, v, log_decay, beta = map(chunks, (q_BLNK * size**-0.5, k_BLNK, v_BLNV, log_decay_BLN, beta_BLN))
    causal_TT = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device).tril()
    steps = log_decay[..., None].expand(*log_decay.shape, chunk).masked_fill(~causal_TT.tril(-1), 0)
    between = steps.cumsum(-2).masked_fill(~causal_TT, float("-inf")).exp()  # decay from one place to a later one
    since = log_decay.cumsum(-1).exp()  # from before the chunk
    until = between[..., -1, :]
    kept = since[..., -1]
    if documents_BL is not None:
        documents = F.pad(documents_BL, (0, padding), mode="replicate").unflatten(1, (-1, chunk))[:, None]
        first = torch.cat([documents[:, :, :1, 0], documents[:, :, :-1, -1]], dim=2)  # where the state is from
        between = between * (documents[..., None] == documents[..., None, :])
        since = since * (documents == first[..., None])
        until, kept = between[..., -1, :], since[..., -1]
    k_beta = k * beta[..., None]
    system = k_beta @ k.transpose(-1, -2) * between
    both = torch.cat([v * beta[..., None], k_beta * since[..., None]], dim=-1)
    values, reads = torch.linalg.solve_triangular(
        system,
        both,
        upper=False,
        unitriangular=True,
    ).split([v.shape[-1], size], dim=-1)
    inside = q @ k.transpose(-1, -2) * between
    q, k = q * since[..., None], k * until[..., None]
    state = k.new_zeros(*k.shape[:2], size, v.shape[-1]) if state_BNKV is None else state_BNKV.float()
    outputs = list[torch.Tensor]()
    for c in range(k.shape[2]):
        value = values[:, :, c] - reads[:, :, c] @ state
        outputs.append(q[:, :, c] @ state + inside[:, :, c] @ value)
        state = state * kept[:, :, c, None, None] + k[:, :, c].transpose(-1, -2) @ value
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2), state


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)
