"""Attention over packed documents, which may share a prompt, in the dtype of the model, on any device.

SharedVarlen   TorchTitan's VarlenAttention: CUDA, and casts q, k and v of any dtype to bfloat16
DocumentSDPA   a CPU, or float32
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torchtitan.config import derive, override
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.tools.logging import logger

from titan_rl.actors.titan.context_parallel import of_whole_rows
from titan_rl.actors.titan.document_masks import (
    Attended,
    ClassedSegments,
    SegmentClass,
    SharedMetadata,
    classed_masks,
    varlen_masks,
)


class DocumentSDPA(VarlenAttention):
    """VarlenAttention's contract as one SDPA per class of equally long segments."""

    cp_mesh: DeviceMesh | None = None  # the ranks with the other parts of the rows

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
        **_: Any,
    ) -> torch.Tensor:
        masks: ClassedSegments = attention_masks
        if self.cp_mesh is not None:
            k_BLNH, v_BLNH = of_whole_rows(k_BLNH, v_BLNH, self.cp_mesh)
        outputs = list[torch.Tensor]()
        parts_q = masks.queries(q_BLNH.flatten(0, 1)).split([shape.segments * shape.length for shape in masks.classes])
        keys = [shape.segments * shape.keys for shape in masks.classes]
        parts_k, parts_v = (masks.keys(x.flatten(0, 1)).split(keys) for x in (k_BLNH, v_BLNH))
        for shape, *qkv in zip(masks.classes, parts_q, parts_k, parts_v, strict=True):
            q_SNLH, k_SNLH, v_SNLH = (x.unflatten(0, (shape.segments, -1)).transpose(1, 2) for x in qkv)
            mask = seen_by(shape, self.window_size[0], q_BLNH.device)
            attended = F.scaled_dot_product_attention(
                q_SNLH, k_SNLH, v_SNLH, mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
            )
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        return masks.outputs(torch.cat(outputs)).view(q_BLNH.shape)


def seen_by(segments: SegmentClass, window: int, device: torch.device) -> torch.Tensor | None:
    """Return which keys each place of a segment sees, [length, keys]; None: causal, without a prefix. `window` counts
    the places before a query's own; -1 is all."""
    if not 0 <= window < segments.keys - 1:
        if not segments.prefix:
            return None
        window = segments.keys
    seen = torch.ones((segments.length, segments.keys), dtype=torch.bool, device=device).tril(segments.prefix)
    return seen.triu(segments.prefix - window)


class SharedVarlen(VarlenAttention):
    """VarlenAttention whose documents may begin with keys of another. FlashAttention aligns its causal mask, and a
    sliding window, to the end of the keys: a segment after a prefix sees the prefix (within the window) and, causally,
    itself."""

    cp_mesh: DeviceMesh | None = None  # the ranks with the other parts of the rows

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
        if self.cp_mesh is not None:
            k_BLNH, v_BLNH = of_whole_rows(k_BLNH, v_BLNH, self.cp_mesh)
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
        return attended.view(q_BLNH.shape).to(dtype)


@override(target=VarlenAttention.Config, exact=True, description="Attention over packed documents in any dtype.")
def document_attention(config: VarlenAttention.Config) -> DocumentSDPA.Config:
    return derive(config, DocumentSDPA.Config)


@override(target=VarlenAttention.Config, exact=True, description="Attention over documents that share prompts.")
def shared_attention(config: VarlenAttention.Config) -> SharedVarlen.Config:
    return derive(config, SharedVarlen.Config)


def cut_rows(model: Any, mesh: DeviceMesh | None) -> None:
    """Make the model's attention gather keys and values over `mesh`, whose ranks have parts of the same rows."""
    if mesh is None:
        return
    for module in model.modules():
        if isinstance(module, VarlenAttention):
            if not isinstance(module, DocumentSDPA | SharedVarlen):
                raise TypeError(f"expected an attention that can cut rows (SharedVarlen), {_replaced(module)}")
            module.cp_mesh = mesh


def masks_of(model: Any, attended: Attended, device: torch.device) -> Any:
    """Return the masks that the model's attention takes for these segments."""
    attention = model.config.first_attention.inner_attention
    if isinstance(attention, DocumentSDPA.Config):
        return classed_masks(attended, device)
    masks = varlen_masks(attended, device)
    if isinstance(masks, SharedMetadata) and not isinstance(attention, SharedVarlen.Config):
        raise TypeError(f"expected an attention that can share prompts (SharedVarlen), {_replaced(attention)}")
    return masks


def _replaced(attention: Any) -> str:
    return f"found {type(attention).__qualname__}, which override.imports has set"


def overrides(device: str, compute: str) -> list[str]:
    """Return the override of TorchTitan's attention, which may not run here, or not compute in this dtype."""
    if device == "cuda" and compute == "float32":
        logger.warning(
            'training.mixed_precision_param = "float32": attention runs in float32 too, in torch\'s SDPA, '
            "which is slower than the FlashAttention that bfloat16 uses"
        )
    attention = "document_attention" if device == "cpu" or compute == "float32" else "shared_attention"
    return [f"{__name__}.{attention}"]


def forbid_tf32() -> None:
    """Make CUDA multiply float32 matrices in float32, not in torch's default: TF32 has three digits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
