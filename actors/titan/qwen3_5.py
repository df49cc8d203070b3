"""Qwen3.5's dense text models from the config.json of a Hugging Face folder, which may have a vision tower.

Most layers have a recurrent state (Gated DeltaNet), the others gated attention. TorchTitan's own blocks import `fla`, a
library of Triton kernels; these are the same in torch (kernels/gated_delta.py), and run on any device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.attention import AttentionMasksType, BaseAttention, VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_param_placement,
    norm_config,
    rowwise_config,
    set_dense_ffn_sharding,
)
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.utils import get_moe_model_nparams_and_flops
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from titan_rl.actors.titan import family_parts
from titan_rl.actors.titan.spec import Adapter, spec_of_blocks
from titan_rl.kernels.gated_delta import causal_conv, gated_delta_rule
from titan_rl.wire.hf_config import FULL, refused

LINEAR, FULL_EVERY = "linear_attention", 4  # transformers' default of layer_types, counted from 1
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
INIT: dict[str, Any] = {"weight": partial(nn.init.normal_, std=0.02)}
FIXED: dict[str, tuple[Any, ...]] = {  # keys of parts that are not computed here, with their only values
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "output_gate_type": ("silu", "swish"),
    "attn_output_gate": (True,),
}
PROJECTED = ("q", "k", "v", "z", "a", "b")
CONVOLVED = ("q", "k", "v")
BY_HEAD = ("conv_q", "conv_k", "conv_v", "A_log", "dt_bias")  # parameters whose rows tensor parallelism cuts
DELTA = "linear_attn."  # in a layer's names in the folder


class Qwen35Adapter(Adapter):
    """Our names. The folder has q, k and v of a layer with a state as one, and its convolutions with a middle size."""

    tower: bool = False  # the text model is part of another
    fused: Mapping[str, tuple[str, ...]] = {
        DELTA + "in_proj_qkv.weight": tuple(f"{DELTA}in_proj_{x}.weight" for x in CONVOLVED),
        DELTA + "conv1d.weight": tuple(f"{DELTA}conv_{x}.weight" for x in CONVOLVED),
    }
    in_float32 = ("A_log",)  # ends of the names of tensors that vLLM keeps so in any engine

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        delta = {f"in_proj_{x}.weight": f"in_proj_{x}.weight" for x in PROJECTED}
        delta |= {f"conv_{x}.weight": f"conv_{x}" for x in CONVOLVED} | {x: x for x in ("A_log", "dt_bias")}
        delta |= {"norm.weight": "norm", "out_proj.weight": "out_proj.weight"}
        names = {f"model.layers.{{}}.{DELTA}{hf}": f"layers.{{}}.attention.{name}" for hf, name in delta.items()}
        names = self.from_hf_map | names
        if self.tower:
            names = {name.replace("model.", "model.language_model.", 1): ours for name, ours in names.items()}
        self.from_hf_map = names

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value.unsqueeze(1) if f".{DELTA}conv_" in name else value
            for name, value in super().to_hf(state_dict).items()
        }


class Qwen35TowerAdapter(Qwen35Adapter):
    tower = True


class HybridModel(family_parts.Model):
    """A decoder of which some layers have a recurrent state."""

    @dataclass(kw_only=True, slots=True)
    class Config(family_parts.Model.Config):
        @property
        def first_attention(self) -> BaseAttention.Config | None:
            return next((x.attention for x in self.layers if not isinstance(x.attention, DeltaAttention.Config)), None)

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            layers, sp = self.layers, config.parallelism.enable_sequence_parallel
            recurrent = [layer for layer in layers if isinstance(layer.attention, DeltaAttention.Config)]
            self.layers = [layer for layer in layers if layer not in recurrent]
            try:
                family_parts.Model.Config.update_from_config(self, config=config, **kwargs)
            finally:
                attended, self.layers = self.layers[0], layers
            for layer in recurrent:
                layer.attention_norm.sharding_config = layer.ffn_norm.sharding_config = norm_config(enable_sp=sp)
                layer.attention.shard(attended.attention, sp=sp)
                set_dense_ffn_sharding(
                    layer.feed_forward,
                    attn_x_layout=attended.feed_forward.sharding_config.in_src_shardings["x"],
                    enable_sp=sp,
                )

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Count attention in the layers that have it. What a state takes grows with tokens, and is not counted."""
            attention: Any = self.first_attention
            attended = replace(self, layers=[x for x in self.layers if isinstance(x.attention, type(attention))])
            return get_moe_model_nparams_and_flops(
                attended,
                model,
                attention.n_heads,
                2 * attention.head_dim,
                seq_len,
            )


class GatedAttention(family_parts.Attention):
    """Attention whose output is gated. In each head's rows the gate follows the query."""

    @dataclass(kw_only=True, slots=True)
    class Config(family_parts.Attention.Config):
        pass

    def forward(
        self, x_BLD: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert self.q_norm is not None
        assert self.k_norm is not None
        linear: Any = self.qkv_linear
        q_BLNH, gate_BLNH = linear.wq(x_BLD).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k_BLNH, v_BLNH = (project(x_BLD).unflatten(-1, (-1, self.head_dim)) for project in (linear.wk, linear.wv))
        q_BLNH, k_BLNH = self.rope(self.q_norm(q_BLNH), self.k_norm(k_BLNH), positions)
        out_BLNH = self.attend(q_BLNH, k_BLNH, v_BLNH, attention_masks)
        return self.wo((out_BLNH * gate_BLNH.sigmoid()).contiguous().flatten(2))


class DeltaAttention(Module):
    """Gated DeltaNet: a causal convolution of queries, keys and values, a state that each token corrects, and a gated
    norm of the answer. The state begins anew with each document. Tensor parallelism cuts heads."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        key_heads: int
        value_heads: int
        key_size: int
        value_size: int
        width: int  # tokens that the convolution sees
        eps: float
        linears: dict[str, Linear.Config]

        @property
        def recurrent_heads(self) -> tuple[int, int]:
            return self.key_heads, self.value_heads

        def shard(self, attention: Any, *, sp: bool) -> None:
            """Cut heads, with inputs laid out as another layer's `attention` has them."""
            state = {name: dense_param_placement(tp=spmd.S(0)) for name in BY_HEAD}
            state["norm"] = dense_param_placement(tp=spmd.R)
            self.sharding_config = replace(attention.sharding_config, state_shardings=state)
            for name, linear in self.linears.items():
                linear.sharding_config = rowwise_config(output_sp=sp) if name == "out_proj" else colwise_config()

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.key_size, self.value_size, self.eps = config.key_size, config.value_size, config.eps
        for x in PROJECTED:
            setattr(self, f"in_proj_{x}", config.linears[f"in_proj_{x}"].build())
        self.out_proj = config.linears["out_proj"].build()
        rows = {"q": config.key_heads * config.key_size, "v": config.value_heads * config.value_size}
        for x in CONVOLVED:
            setattr(self, f"conv_{x}", nn.Parameter(torch.empty(rows.get(x, rows["q"]), config.width)))
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))
        self.norm = nn.Parameter(torch.empty(config.value_size))

    def forward(
        self, x_BLD: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert positions is not None
        documents_BL = (positions == 0).cumsum(1)
        projected = [getattr(self, f"in_proj_{x}")(x_BLD) for x in PROJECTED]
        q, k, v, z, a, b = map(own_heads, projected)
        weights = (own_heads(getattr(self, f"conv_{x}")) for x in CONVOLVED)
        q, k, v = (causal_conv(x, weight, documents_BL) for x, weight in zip((q, k, v), weights, strict=True))
        q, k = (x.unflatten(-1, (-1, self.key_size)) for x in (q, k))
        v_BLNV, z_BLNV = (x.unflatten(-1, (-1, self.value_size)) for x in (v, z))
        steps_BLN = F.softplus(a.float() + own_heads(self.dt_bias).float())
        log_decay_BLN = -own_heads(self.A_log).float().exp() * steps_BLN
        out_BLNV, _ = gated_delta_rule(
            q,
            k,
            v_BLNV,
            log_decay_BLN,
            b.float().sigmoid(),
            documents_BL=documents_BL,
        )
        norm = own_heads(self.norm, Partial())
        normed = norm * F.rms_norm(out_BLNV, (self.value_size,), eps=self.eps).to(x_BLD.dtype)
        out = (normed * F.silu(z_BLNV.float())).to(x_BLD.dtype).flatten(2)
        if isinstance(projected[0], DTensor):
            out = DTensor.from_local(out, projected[0].device_mesh, [Shard(2)], run_check=False)
        return self.out_proj(out)


def own_heads(x: torch.Tensor, gradient: Placement | None = None) -> torch.Tensor:
    """Return a rank's part. Its gradient is placed as the part is, or as given."""
    if not isinstance(x, DTensor):
        return x
    return x.to_local(grad_placements=[gradient] if gradient else x.placements)


def spec(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the text model that config.json describes. A ValueError names a key that it cannot compute."""
    text: Mapping[str, Any] = config.get("text_config") or config
    for key, only in FIXED.items():
        if (found := text.get(key, only[0])) not in only:
            raise ValueError(refused(key, " or ".join(map(str, only)), found))
    dim, vocabulary, eps = text["hidden_size"], text["vocab_size"], text["rms_norm_eps"]
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    model = HybridModel.Config(
        dim=dim,
        vocab_size=vocabulary,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary,
            embedding_dim=dim,
            param_init={"weight": skip_param_init} if tied else INIT,
        ),
        norm=norm(dim, eps),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=INIT),
        layers=[block(text, kind) for kind in kinds(text)],
    )
    if model.first_attention is None:
        raise ValueError(
            refused(
                "layer_types",
                "a layer with full_attention",
                text.get("layer_types"),
            )
        )
    return spec_of_blocks(
        "qwen3_5",
        model,
        Qwen35TowerAdapter if "text_config" in config else Qwen35Adapter,
    )


def kinds(text: Mapping[str, Any]) -> list[str]:
    every = text.get("full_attention_interval") or FULL_EVERY
    default = [LINEAR if (i + 1) % every else FULL for i in range(text["num_hidden_layers"])]
    found = list(text.get("layer_types") or default)
    if len(found) != len(default) or not {*found} <= {LINEAR, FULL}:
        raise ValueError(
            refused(
                "layer_types",
                f"{LINEAR} or {FULL} for each of {len(default)} layers",
                found,
            )
        )
    return found


def block(text: Mapping[str, Any], kind: str) -> Qwen3TransformerBlock.Config:
    dim, eps = text["hidden_size"], text["rms_norm_eps"]
    own: Any = attention(text) if kind == FULL else delta_attention(text)
    return Qwen3TransformerBlock.Config(
        attention=own,
        feed_forward=make_ffn_config(
            dim=dim, hidden_dim=text["intermediate_size"], w1_param_init=INIT, w2w3_param_init=INIT
        ),
        attention_norm=norm(dim, eps),
        ffn_norm=norm(dim, eps),
    )


def attention(text: Mapping[str, Any]) -> GatedAttention.Config:
    head_dim, given = text["head_dim"], ROPE | dict(text.get("rope_parameters") or {})
    if given["rope_type"] != "default":
        raise ValueError(refused("rope_parameters", "rope_type default", given))
    usual = make_gqa_config(
        dim=text["hidden_size"],
        n_heads=text["num_attention_heads"],
        n_kv_heads=text["num_key_value_heads"],
        head_dim=head_dim,
        wqkv_param_init=INIT,
        wo_param_init=INIT,
        inner_attention=VarlenAttention.Config(window_size=(-1, 0)),
        rope=family_parts.PartialRoPE.Config(
            dim=int(head_dim * given["partial_rotary_factor"]),
            max_seq_len=text["max_position_embeddings"],
            theta=given["rope_theta"],
        ),
        qk_norm=norm(head_dim, text["rms_norm_eps"]),
    )
    qkv: Any = usual.qkv_linear
    qkv.wq = replace(qkv.wq, out_features=2 * qkv.wq.out_features)
    return GatedAttention.Config(**family_parts.values_of(usual))


def delta_attention(text: Mapping[str, Any]) -> DeltaAttention.Config:
    dim, key_heads, value_heads = text["hidden_size"], text["linear_num_key_heads"], text["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ValueError(
            refused(
                "linear_num_value_heads",
                f"a multiple of {key_heads} key heads",
                value_heads,
            )
        )
    keys, values = key_heads * text["linear_key_head_dim"], value_heads * text["linear_value_head_dim"]
    rows = {"q": keys, "k": keys, "v": values, "z": values, "a": value_heads, "b": value_heads}
    linear = partial(Linear.Config, param_init=INIT)
    linears = {f"in_proj_{x}": linear(in_features=dim, out_features=rows[x]) for x in PROJECTED}
    normal = INIT["weight"]
    return DeltaAttention.Config(
        dim=dim,
        key_heads=key_heads,
        value_heads=value_heads,
        key_size=text["linear_key_head_dim"],
        value_size=text["linear_value_head_dim"],
        width=text["linear_conv_kernel_dim"],
        eps=text["rms_norm_eps"],
        linears=linears | {"out_proj": linear(in_features=values, out_features=dim)},
        param_init={
            **{f"conv_{x}": normal for x in CONVOLVED},
            **{"A_log": decays, "dt_bias": nn.init.ones_, "norm": nn.init.ones_},
        },
    )


def decays(parameter: torch.Tensor) -> torch.Tensor:
    """Draw the logarithms of decays, as transformers does."""
    return parameter.uniform_(0.01, 16.0).log_()


def norm(size: int, eps: float) -> family_parts.OffsetNorm.Config:
    return family_parts.OffsetNorm.Config(
        normalized_shape=size,
        eps=eps,
        param_init={"weight": nn.init.zeros_},
    )
