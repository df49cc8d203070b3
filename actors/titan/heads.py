"""Replacements for a decoder's output projection. FSDP2 and TP wrap them like the original.

TokenHead    hidden -> log-prob of the target, entropy       without logits (kernels/token_logprob.py)
ValueHead    hidden -> one number per position               critic and reward model
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.config import derive, override
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import norm_config
from torchtitan.protocols.sharding import ShardingConfig

from titan_rl.kernels.divergence import divergence
from titan_rl.kernels.kept_bits import kept_bits
from titan_rl.kernels.token_logprob import most_likely, token_logprob
from titan_rl.wire.model_families import Head


class Question(NamedTuple):
    """The targets that a forward of the head scores."""

    targets_BT: torch.Tensor
    places_BT: torch.Tensor  # where each is predicted, in the flattened rows
    on_BT: torch.Tensor  # targets to answer for
    temperature: float
    with_entropy_grad: bool = False
    float32_logits: bool = False
    keep_logits: bool = False  # for the backward
    kept: tuple[torch.Tensor, torch.Tensor] | None = None  # kept sets: counts [B * T], ids (kernels/kept_bits.py)
    teacher: tuple[torch.Tensor, torch.Tensor] | None = None  # ids (-1: unknown) and log-probs, [N, k]: the divergence
    beta: float = 0.5
    top: int = 0  # above 0: answer with ids and log-probs, [N, 1 + top], of the targets and the most likely tokens

    def kept_bits(self, vocabulary: int, start: int = 0) -> torch.Tensor | None:
        """Return the masks of the targets that are on, over `vocabulary` ids from `start` on."""
        if self.kept is None:
            return None
        counts_N, ids_P = self.kept  # targets that are off have no ids
        return kept_bits(counts_N[self.on_BT.flatten()], ids_P, vocabulary, start)


class TokenHead(Linear):
    """The vocabulary projection, which returns log-probs of given targets. Under TP each rank has some of its rows.

    Only places with a target under the mask are projected: prompts, tool output and padding cost nothing here, and
    return 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        output_multiplier: float = 1.0  # on logits, as TorchTitan's SoftCappedLinear names both
        output_soft_cap_temp: float | None = None  # the largest logit after that, approached by tanh

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._question: Question | None = None
        self._multiplier, self._cap = config.output_multiplier, config.output_soft_cap_temp or 0.0

    @contextmanager
    def asked(self, question: Question) -> Iterator[None]:
        """Set what the next forward answers: the decoder passes the hidden states only.

        TorchTitan's way (skip the head, let the loss call it with the targets) was tried. FSDP2 then computed another
        gradient after a forward on frozen weights (FrozenWeights): norm 0.28242 for 0.28246 in dpo_llama's second step.
        """
        self._question = question
        try:
            yield
        finally:
            self._question = None

    def forward(self, input: torch.Tensor) -> Any:
        assert self._question is not None, "asked() sets the targets"
        question, on_BT = self._question, self._question.on_BT
        hidden_BLD, weight_VD, shard, start = input, self.weight, None, 0
        if isinstance(weight_VD, DTensor):
            mesh = weight_VD.device_mesh
            start = mesh.get_local_rank() * -(-weight_VD.shape[0] // mesh.size())  # as Shard(0) cuts
            shard = mesh.get_group(), start
            weight_VD = weight_VD.to_local()
        if isinstance(hidden_BLD, DTensor):  # the kernel's backward sums over the group itself
            hidden_BLD = hidden_BLD.to_local(grad_placements=[Replicate()])
        hidden_TD, targets_T = hidden_BLD.flatten(0, 1)[question.places_BT[on_BT]], question.targets_BT[on_BT]
        others_TK, teacher_TK = question.teacher or (None, None)
        if question.top:
            others_TK = most_likely(hidden_TD, weight_VD, question.top, shard)
        answers_T = token_logprob(
            hidden_TD,
            weight_VD,
            targets_T,
            question.temperature / self._multiplier,
            shard=shard,
            with_entropy_grad=question.with_entropy_grad,
            float32_logits=question.float32_logits,
            keep_logits=question.keep_logits,
            kept=question.kept_bits(len(weight_VD), start),
            others=others_TK,
            cap=self._cap / self._multiplier,
        )
        if question.top and others_TK is not None:
            logprob_T, _, logprobs_TK = answers_T
            return tuple(torch.cat(x, 1) for x in ((targets_T[:, None], others_TK), (logprob_T[:, None], logprobs_TK)))
        if others_TK is not None and teacher_TK is not None:
            found_T = divergence(answers_T[2], teacher_TK, question.beta)
            answers_T = *answers_T[:2], torch.where(others_TK[:, 0] >= 0, found_T, 0.0)
        return tuple(x_T.new_zeros(on_BT.shape).masked_scatter(on_BT, x_T) for x_T in answers_T)


class ValueHead(Linear):
    """One row instead of a vocabulary, in float32: a value is learnt by regression, and bf16 has three digits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        value_BL = F.linear(input.float(), self.weight.float()).squeeze(-1)
        return value_BL.to_local() if isinstance(value_BL, DTensor) else value_BL


@override(target=Linear.Config, fqns=["lm_head"], description="Log-probs of given targets instead of logits.")
def token_head(config: Linear.Config) -> TokenHead.Config:
    kept = {field.name for field in fields(TokenHead.Config)}
    if lost := sorted({field.name for field in fields(config)} - kept):
        raise ValueError(f"lm_head: expected a head with {sorted(kept)}, found one that computes with {lost} too")
    return derive(config, TokenHead.Config, sharding_config=_local_output(config))


@override(target=Linear.Config, fqns=["lm_head"], description="One number per position instead of logits.")
def value_head(config: Linear.Config) -> ValueHead.Config:
    sharding = _local_output(config)
    if sharding is not None:
        sharding = replace(sharding, state_shardings=norm_config(enable_sp=True).state_shardings)  # on every rank
    return derive(config, ValueHead.Config, out_features=1, sharding_config=sharding)


def _local_output(config: Linear.Config) -> ShardingConfig | None:
    sharding: ShardingConfig | None = config.sharding_config
    return sharding and replace(sharding, out_src_shardings=None, out_dst_shardings=None)


OVERRIDES: dict[Head, str] = {"lm": f"{__name__}.token_head", "value": f"{__name__}.value_head"}
