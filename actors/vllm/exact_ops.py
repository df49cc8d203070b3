"""The generator's half of exact mode: vLLM's layers with the forward of kernels/row_blocks.py. CPU only.

vLLM's own models, scheduler, KV blocks and sampler stay. The KV cache keeps vLLM's memory, in another order: a slot's
keys, then its values.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from titan_rl.actors.vllm.kept_tokens import last_kept
from titan_rl.kernels.kept_bits import kept_bits
from titan_rl.kernels.row_blocks import (
    VECTORS,
    Segment,
    block_attention,
    block_linear,
    block_silu,
    block_token_logprob,
)
from titan_rl.wire.kept_sets import KeptSets

GREEDY = 1e-5  # vLLM samples greedily below this temperature, and takes log-probs at 1


def use_exact_ops() -> None:
    """Replace vLLM's operations in this process. Call this before the model is built."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    torch.set_num_threads(1)
    utils.dispatch_cpu_unquantized_gemm = _linear_by_parts
    if RMSNorm.forward is _norm:  # an earlier engine of this process has replaced the rest
        return
    RMSNorm.forward = _norm
    SiluAndMul.forward = _silu_and_mul
    RotaryEmbedding.forward = _rotate
    CPUAttentionBackendImpl.do_kv_cache_update = _store
    CPUAttentionBackendImpl.forward = _attend
    _log_probs_from_hidden_states()


def _linear_by_parts(layer: Any, remove_weight: bool) -> None:
    """Multiply each part of a fused layer (q, k, v; gate, up) by itself, because the trainer's are separate."""
    sizes: Sequence[int] = getattr(layer, "output_partition_sizes", ())

    def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(sizes) < 2:
            return block_linear(x, weight, bias)
        biases = bias.split(sizes) if bias is not None else [None] * len(sizes)
        return torch.cat([block_linear(x, w, b) for w, b in zip(weight.split(sizes), biases, strict=True)], -1)

    layer.cpu_linear = cpu_linear


def _norm(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    if residual is not None:
        x = residual = x + residual
    y = F.rms_norm(x.contiguous(), x.shape[-1:], self.weight, self.variance_epsilon)
    return y if residual is None else (y, residual)


def _silu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return block_silu(gate) * up


def _rotate(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, offsets: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if not self.is_neox_style or self.rotary_dim != self.head_size:
        raise NotImplementedError("debug.exact: expected rotary embeddings of whole heads, found a part of them")
    if not hasattr(self, "exact_table"):  # vLLM rounds its table to the model's dtype
        length = self.max_position_embeddings
        self.max_position_embeddings = -(-length // VECTORS) * VECTORS
        self.exact_table = self._compute_cos_sin_cache().float()
        self.max_position_embeddings = length
    cos, sin = (x.repeat(1, 2).unsqueeze(1) for x in self.exact_table[positions].chunk(2, -1))

    def turned(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(len(positions), -1, self.head_size).float()
        first, second = heads.chunk(2, -1)
        return (heads * cos + torch.cat([-second, first], -1) * sin).to(x.dtype).view(x.shape)

    return turned(query), turned(key)


def _slots(kv_cache: torch.Tensor) -> torch.Tensor:
    """View a layer's cache [blocks, G, block_size, 2 H] as [slots, 2, G, H]."""
    blocks, groups, block_size, both = kv_cache.shape
    return kv_cache.view(-1).view(blocks * block_size, 2, groups, both // 2)


def _store(
    self: Any,
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    slots = slot_mapping[: len(key)]
    on = slots >= 0  # padding has none
    _slots(kv_cache)[slots[on]] = torch.stack([key[: len(slots)][on], value[: len(slots)][on]], 1)


def _attend(
    self: Any,
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    attn_metadata: Any,
    output: torch.Tensor,
    output_scale: torch.Tensor | None = None,
    output_block_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    if attn_metadata is None:  # a warm-up
        return output
    count = attn_metadata.num_actual_tokens
    if not hasattr(attn_metadata, "exact_segments"):  # the step's other layers share them
        attn_metadata.exact_segments = _segments(attn_metadata, kv_cache.shape[2])
    segments, slots = attn_metadata.exact_segments
    keys, values = _slots(kv_cache)[slots].unbind(1)
    window = max(self.sliding_window, 0)  # -1: none
    output[:count] = block_attention(query[:count], keys, values, segments, self.scale, window).view_as(output[:count])
    return output


def _segments(metadata: Any, block_size: int) -> tuple[list[Segment], torch.Tensor]:
    """Return each request's segment, and the slots of all their keys, one request after the other."""
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    segments, slots, begin = list[Segment](), list[torch.Tensor](), 0
    within = torch.arange(block_size)
    for number, length in enumerate(lengths):
        first, last = starts[number], starts[number + 1]
        if last > first:
            segments.append(Segment(first, last - first, begin, length - (last - first)))
            blocks = metadata.block_table[number, : -(-length // block_size)].long()
            slots.append((blocks[:, None] * block_size + within).flatten()[:length])
            begin += length
    return segments, torch.cat(slots)


def _log_probs_from_hidden_states() -> None:
    """Compute the log-probs of what was sampled as the trainer will: from hidden states, by block_token_logprob."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.v1.sample.sampler import Sampler

    vllms_logits, vllms_sample = LogitsProcessor.forward, Sampler.forward
    last: list[tuple[torch.Tensor, torch.Tensor, bool]] = []

    def logits(self: Any, lm_head: Any, hidden_states: torch.Tensor, *others: Any, **named: Any) -> Any:
        if self.scale != 1.0 or self.soft_cap is not None:
            raise NotImplementedError("debug.exact: expected logits without a scale or a cap")
        in_float32 = self.head_dtype == torch.float32 and hidden_states.dtype != torch.float32
        last[:] = [(hidden_states, lm_head.weight[: self.org_vocab_size], in_float32)]
        return vllms_logits(self, lm_head, hidden_states, *others, **named)

    def sample(self: Any, logits: torch.Tensor, sampling_metadata: Any, *others: Any, **named: Any) -> Any:
        output = vllms_sample(self, logits, sampling_metadata, *others, **named)
        if output.logprobs_tensors is None:
            return output
        ((hidden, weight, in_float32),) = last
        token = output.sampled_token_ids[:, 0].long()
        warmth = sampling_metadata.temperature
        warmth = torch.ones(len(token)) if warmth is None else warmth[: len(token)]
        warmth = torch.where(warmth < GREEDY, 1.0, warmth)
        kept = KeptSets.of(last_kept() or [b""] * len(token))
        for temperature in warmth.unique().tolist():
            rows = warmth == temperature
            found, _ = block_token_logprob(
                hidden[rows],
                weight,
                token[rows],
                temperature,
                float32_logits=in_float32,
                kept=masks_of(kept.take(rows.nonzero()[:, 0].numpy()), len(weight)),
            )
            output.logprobs_tensors.logprobs[rows, 0] = found
        return output

    LogitsProcessor.forward, Sampler.forward = logits, sample


def masks_of(kept: KeptSets, vocabulary: int) -> torch.Tensor | None:
    if not kept.sizes.any():
        return None
    counts, ids = (torch.from_numpy(x) for x in kept.ids())
    return kept_bits(counts, ids, vocabulary)
