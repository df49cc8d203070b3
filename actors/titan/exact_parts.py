"""The trainer's half of exact mode: TorchTitan's parts with the forward of kernels/row_blocks.py.

Norms and rotary embeddings stay TorchTitan's: they compute each row by itself.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torchtitan.config import derive, override
from torchtitan.models.common import FeedForward, Linear
from torchtitan.models.common.attention import VarlenAttention

from titan_rl.actors.titan import heads
from titan_rl.actors.titan.document_attention import DocumentSDPA
from titan_rl.actors.titan.document_masks import ClassedSegments
from titan_rl.kernels.row_blocks import (
    VECTORS,
    Segment,
    block_attention,
    block_linear,
    block_silu,
    block_token_logprob,
    forward_in_blocks,
)
from titan_rl.wire.model_shape import Head


class ExactLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return block_linear(input, self.weight, self.bias)


class ExactFeedForward(FeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(block_silu(self.w1(x)) * self.w3(x))


class ExactAttention(DocumentSDPA):
    @dataclass(kw_only=True, slots=True)
    class Config(DocumentSDPA.Config):
        block_places: ClassVar[int] = 0  # a segment has all its keys in a row

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        **others: Any,
    ) -> torch.Tensor:
        masks: ClassedSegments = attention_masks
        factor = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        window = max(self.window_size[0] + 1, 0)  # TorchTitan's counts the places before a query's own, -1 is all

        def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q_QNH = masks.queries(q.flatten(0, 1))
            k_KGH, v_KGH = (masks.keys(x.flatten(0, 1)) for x in (k, v))
            return masks.outputs(block_attention(q_QNH, k_KGH, v_KGH, segments_of(masks), factor, window)).view(q.shape)

        def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return super(ExactAttention, self).forward(q, k, v, attention_masks=masks, scale=scale, **others)

        return forward_in_blocks(exact, plain, q_BLNH, k_BLNH, v_BLNH)


def segments_of(masks: ClassedSegments) -> list[Segment]:
    """Return the segments as `masks` gathers them, class by class."""
    found, queries, keys = list[Segment](), 0, 0
    for count, _, length, prefix in masks.classes:
        for _ in range(count):
            found.append(Segment(queries, length, keys, prefix))
            queries, keys = queries + length, keys + prefix + length
    return found


class ExactTokenHead(heads.TokenHead):
    @dataclass(kw_only=True, slots=True)
    class Config(heads.TokenHead.Config):
        pass

    def forward(self, input: torch.Tensor) -> Any:
        assert self._question is not None, "asked() sets the targets"
        asked, on_BT = self._question, self._question.on_BT
        answers_T = block_token_logprob(
            input.flatten(0, 1)[asked.places_BT[on_BT]],
            self.weight,
            asked.targets_BT[on_BT],
            asked.temperature,
            with_entropy_grad=asked.with_entropy_grad,
            float32_logits=asked.float32_logits,
            kept=asked.kept_bits(len(self.weight)),
        )
        return tuple(x_T.new_zeros(on_BT.shape).masked_scatter(on_BT, x_T) for x_T in answers_T)


@override(target=Linear.Config, fqns=["layers.*.attention.*"], description="Products in blocks of rows.")
def exact_linear(config: Linear.Config) -> ExactLinear.Config:
    return derive(config, ExactLinear.Config)


@override(target=FeedForward.Config, exact=True, description="Products and silu in blocks of rows.")
def exact_feed_forward(config: FeedForward.Config) -> ExactFeedForward.Config:
    parts = {name: exact_linear(getattr(config, name)) for name in ("w1", "w2", "w3")}
    return derive(config, ExactFeedForward.Config, **parts)


@override(target=VarlenAttention.Config, exact=True, description="Attention in blocks of queries and keys.")
def exact_attention(config: VarlenAttention.Config) -> ExactAttention.Config:
    return derive(config, ExactAttention.Config)


@override(target=Linear.Config, fqns=["lm_head"], description="Log-probs of given targets in blocks of rows.")
def exact_token_head(config: Linear.Config) -> ExactTokenHead.Config:
    return derive(heads.token_head(config), ExactTokenHead.Config)


def exact_overrides(head: Head) -> list[str]:
    last = f"{__name__}.exact_token_head" if head == "lm" else heads.OVERRIDES[head]
    return [last, *(f"{__name__}.{name}" for name in ("exact_linear", "exact_feed_forward", "exact_attention"))]


def whole_vectors(places: int) -> int:
    """Return the places that a rotary table needs to have no remainder: its cosines would depend on its length."""
    return -(-places // VECTORS) * VECTORS
