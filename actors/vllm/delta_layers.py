"""Layers of Gated DeltaNet in vLLM on a CPU, in torch: what vllm_cpu.py puts in place of vLLM's own kernels."""

from typing import Any

import torch
import torch.nn.functional as F
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from titan_rl.kernels.gated_delta import causal_conv, gated_delta_rule


def run(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: LayerNameType
) -> None:
    """Write the answer to each token of a batch from its sequence's state, and the states after it. First are sequences
    with one more token each, then those with several. (vLLM makes an operator of the annotations.)"""
    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a run that measures memory
        return
    batch: Any = context.attn_metadata[layer.prefix]  # pyright: ignore[reportCallIssue, reportArgumentType]
    inputs, states = layer.kv_cache  # by slot: the convolution's last inputs [places, channels], and the state
    if is_conv_state_dim_first():
        inputs = inputs.transpose(1, 2)
    log_decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    beta, places = b.float().sigmoid(), inputs.shape[1]
    slots, begins = batch.non_spec_state_indices_tensor.long(), batch.non_spec_query_start_loc.tolist()

    def compute(slot: torch.Tensor, tokens: slice, *, begun: bool) -> None:
        def of(x: torch.Tensor) -> torch.Tensor:
            return x[tokens].unflatten(0, (len(slot), -1))

        before, state = (x[slot] if begun else torch.zeros_like(x[slot]) for x in (inputs, states))
        both = torch.cat([before.to(mixed_qkv.dtype), of(mixed_qkv)], dim=1)
        inputs[slot] = both[:, -places:].to(inputs.dtype)
        mixed = causal_conv(both, layer.conv1d.weight[:, 0])[:, places:].flatten(0, 1)
        q, k, v = (x.squeeze(0).unflatten(0, (len(slot), -1)) for x in layer.rearrange_mixed_qkv(mixed))
        out, state = gated_delta_rule(
            q,
            k,
            v,
            of(log_decay),
            of(beta),
            state_BNKV=state.transpose(-1, -2),
        )
        core_attn_out[tokens] = out.flatten(0, 1).to(core_attn_out.dtype)
        states[slot] = state.transpose(-1, -2).to(states.dtype)

    if batch.num_decodes:
        compute(slots[: batch.num_decodes], slice(0, batch.num_decodes), begun=True)
    for i in range(batch.num_decodes, batch.num_decodes + batch.num_prefills):
        compute(slots[i : i + 1], slice(begins[i], begins[i + 1]), begun=bool(batch.has_initial_state[i]))
