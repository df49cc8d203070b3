"""Attention over packed documents, which may share a prompt, in the dtype of the model, on any device.

SharedVarlen   TorchTitan's VarlenAttention: CUDA, and casts q, k and v of any dtype to bfloat16
DocumentSDPA   a CPU, or float32
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.tools.logging import logger

from titan_rl.actors.titan.document_masks import (
    Attended,
    ClassedSegments,
    SegmentClass,
    SharedMetadata,
    classed_masks,
    varlen_masks,
)
from titan_rl.actors.titan.row_parts import RowParts

EXTRA = 8  # elements that heads get with sinks


class DocumentSDPA(VarlenAttention):
    """VarlenAttention's contract as one SDPA per class of equally long segments. Heads may have sinks: logits in the
    softmax's denominator."""

    row_parts: RowParts | None = None  # this rank's, if others have parts of the same rows

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(  # TorchTitan's local_map finds q, k and v by these names
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        sinks_N: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        masks: ClassedSegments = attention_masks
        if self.row_parts is not None:
            k_BLNH, v_BLNH = self.row_parts.of_whole_rows(k_BLNH, v_BLNH)
        outputs = list[torch.Tensor]()
        parts_q = masks.queries(q_BLNH.flatten(0, 1)).split([shape.segments * shape.length for shape in masks.classes])
        keys = [shape.segments * shape.keys for shape in masks.classes]
        parts_k, parts_v = (masks.keys(x.flatten(0, 1)).split(keys) for x in (k_BLNH, v_BLNH))
        for shape, *qkv in zip(masks.classes, parts_q, parts_k, parts_v, strict=True):
            q_SNLH, k_SNLH, v_SNLH = (x.unflatten(0, (shape.segments, -1)).transpose(1, 2) for x in qkv)
            mask = seen_by(shape, self.window_size[0], q_BLNH.device, always=sinks_N is not None)
            if sinks_N is not None:
                assert mask is not None
                assert scale is not None
                q_SNLH, k_SNLH, v_SNLH, mask = with_sinks(q_SNLH, k_SNLH, v_SNLH, mask, sinks_N / scale)
            attended = F.scaled_dot_product_attention(
                q_SNLH, k_SNLH, v_SNLH, mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
            )[..., : v_BLNH.shape[-1]]
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        return masks.outputs(torch.cat(outputs)).view(*q_BLNH.shape[:-1], v_BLNH.shape[-1])


def with_sinks(
    q_SNLH: torch.Tensor, k_SNLH: torch.Tensor, v_SNLH: torch.Tensor, seen: torch.Tensor, unscaled_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a key whose score is each head's sink for every query, and whose value is zero. It is the only key that is
    not zero in the elements by which heads grow: SDPA's kernels take multiples of eight. torch's attention has no
    gradient of the log-sum-exp, by which outputs could be scaled instead."""
    sinks_SNL1 = unscaled_N[:, None, None].to(q_SNLH.dtype).expand(*q_SNLH.shape[:3], 1)
    q_SNLH = torch.cat([q_SNLH, F.pad(sinks_SNL1, (0, EXTRA - 1))], dim=-1)
    sink_key = F.pad(k_SNLH.new_ones(*k_SNLH.shape[:2], 1, 1), (k_SNLH.shape[-1], EXTRA - 1))
    k_SNLH = torch.cat([F.pad(k_SNLH, (0, EXTRA)), sink_key], dim=2)
    return q_SNLH, k_SNLH, F.pad(v_SNLH, (0, EXTRA, 0, 1)), F.pad(seen, (0, 1), value=True)


def seen_by(segments: SegmentClass, window: int, device: torch.device, *, always: bool = False) -> torch.Tensor | None:
    """Return which keys each place of a segment sees, [length, keys]; None, unless `always`: causal, without a prefix.
    `window` counts the places before a query's own; -1 is all."""
    if not 0 <= window < segments.keys - 1:
        if not (segments.prefix or always):
            return None
        window = segments.keys
    seen = torch.ones((segments.length, segments.keys), dtype=torch.bool, device=device).tril(segments.prefix)
    return seen.triu(segments.prefix - window)


class SharedVarlen(VarlenAttention):
    """VarlenAttention whose documents may begin with keys of another. FlashAttention aligns its causal mask, and a
    sliding window, to the end of the keys: a segment after a prefix sees the prefix (within the window) and, causally,
    itself."""

    row_parts: RowParts | None = None  # this rank's, if others have parts of the same rows

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata | SharedMetadata,
        scale: float | None = None,
        **others: Any,
    ) -> torch.Tensor:
        if isinstance(attention_masks, VarlenMetadata):
            return super().forward(q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, scale=scale, **others)
        varlen = attention_masks.varlen
        dtype = q_BLNH.dtype
        q_BLNH, k_BLNH, v_BLNH = (x.to(torch.bfloat16) for x in (q_BLNH, k_BLNH, v_BLNH))
        if self.row_parts is not None:
            k_BLNH, v_BLNH = self.row_parts.of_whole_rows(k_BLNH, v_BLNH)
        q_TNH, k_TNH, v_TNH = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        attended = varlen_attn(
            q_TNH,
            attention_masks.keys(k_TNH),
            attention_masks.keys(v_TNH),
            varlen.cu_seq_q,
            varlen.cu_seq_k,
            varlen.max_q,
            varlen.max_k,
            scale=scale,
            window_size=self.window_size,
            enable_gqa=others.get("enable_gqa", False),
            num_splits=1 if current_flash_attention_impl() in (None, "FA2") else None,  # as TorchTitan does
        )
        assert isinstance(attended, torch.Tensor)
        return attended.view(*q_BLNH.shape[:-1], v_BLNH.shape[-1]).to(dtype)


@override(target=VarlenAttention.Config, exact=True, description="Attention over packed documents in any dtype.")
def document_attention(config: VarlenAttention.Config) -> DocumentSDPA.Config:
    return derive(config, DocumentSDPA.Config)


@override(target=VarlenAttention.Config, exact=True, description="Attention over documents that share prompts.")
def shared_attention(config: VarlenAttention.Config) -> SharedVarlen.Config:
    return derive(config, SharedVarlen.Config)


def cut_rows(model: Any, parts: RowParts | None) -> None:
    """Make the model's attention gather the keys and values of all parts of rows."""
    if parts is None:
        return
    for module in model.modules():
        if isinstance(module, VarlenAttention):
            if not isinstance(module, DocumentSDPA | SharedVarlen):
                raise TypeError(f"expected an attention that can cut rows (SharedVarlen), {_replaced(module)}")
            module.row_parts = parts


def masks_of(model: Any, attended: Attended, device: torch.device) -> Any:
    """Return the masks that the model's attention takes for these segments."""
    attention = model.config.first_attention.inner_attention
    states = any(hasattr(layer.attention, "recurrent_heads") for layer in model.config.layers)
    if states and attended.before.any():
        raise ValueError("expected whole documents for layers with a recurrent state, found parts of some")
    if isinstance(attention, DocumentSDPA.Config):
        return classed_masks(attended, device)
    masks = varlen_masks(attended, device)
    if isinstance(masks, SharedMetadata) and not isinstance(attention, SharedVarlen.Config):
        raise TypeError(f"expected an attention that can share prompts (SharedVarlen), {_replaced(attention)}")
    return masks


def _replaced(attention: Any) -> str:
    return f"found {type(attention).__qualname__}, which override.imports has set"


def overrides(device: str, compute: str, *, sinks: bool = False) -> list[str]:
    """Return the override of TorchTitan's attention, which may not run here, or not compute in this dtype. With sinks
    it has wrong gradients: varlen_attn's backward ignores the log-sum-exp's (torch 2.13)."""
    if device == "cuda" and compute == "float32":
        logger.warning(
            'training.mixed_precision_param = "float32": attention runs in float32 too, in torch\'s SDPA, '
            "which is slower than the FlashAttention that bfloat16 uses"
        )
    if device == "cuda" and sinks:
        logger.warning("attention with sinks runs in torch's SDPA, which is slower than FlashAttention")
    by_sdpa = device == "cpu" or compute == "float32" or sinks
    attention = "document_attention" if by_sdpa else "shared_attention"
    return [f"{__name__}.{attention}"]


def forbid_tf32() -> None:
    """Make CUDA multiply float32 matrices in float32, not in torch's default: TF32 has three digits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
