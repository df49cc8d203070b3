"""Functions of a user's module for model.spec: two that build models, and others that are refused."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torchtitan.models import llama3, muse_glimmer
from torchtitan.models.common import ComplexRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, make_mla_attention_config, parallelize_deepseekv3
from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.actors.titan.muse_glimmer import spec

INIT: dict[str, Any] = {"weight": partial(nn.init.normal_, std=0.02)}
ONES: dict[str, Any] = {"weight": nn.init.ones_}
MLA: dict[str, Any] = {  # a config of DeepSeek V3 without experts
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "first_k_dense_replace": 2},
    **{"q_lora_rank": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}


def own(config: Mapping[str, Any]) -> ModelSpec:
    return spec(config)


def mla(config: Mapping[str, Any]) -> ModelSpec:
    """Build a dense DeepSeek V3, with TorchTitan's own adapter and parallelize function."""
    c, dim = config, config["hidden_size"]
    rope = ComplexRoPE.Config(
        dim=c["qk_rope_head_dim"],
        max_seq_len=c["max_position_embeddings"],
        theta=c["rope_parameters"]["rope_theta"],
    )
    norm = partial(RMSNorm.Config, normalized_shape=dim, eps=c["rms_norm_eps"], param_init=ONES)
    sizes = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    def block(layer: int) -> DeepSeekV3TransformerBlock.Config:
        attention = make_mla_attention_config(
            layer_id=layer,
            dim=dim,
            n_heads=c["num_attention_heads"],
            **{key: c[key] for key in sizes},
            attn_backend="varlen",
            linear_init=INIT,
            norm_init=ONES,
            depth_init=lambda _: INIT,
            rope=rope,
        )
        attention.q_norm.eps = attention.kv_norm.eps = c["rms_norm_eps"]
        ffn = make_ffn_config(dim=dim, hidden_dim=c["intermediate_size"], w1_param_init=INIT, w2w3_param_init=INIT)
        return DeepSeekV3TransformerBlock.Config(
            attention=attention, feed_forward=ffn, attention_norm=norm(), ffn_norm=norm()
        )

    model = DeepSeekV3Model.Config(
        dim=dim,
        vocab_size=c["vocab_size"],
        tok_embeddings=Embedding.Config(num_embeddings=c["vocab_size"], embedding_dim=dim, param_init=INIT),
        norm=norm(),
        lm_head=Linear.Config(in_features=dim, out_features=c["vocab_size"], param_init=INIT),
        layers=[block(layer) for layer in range(c["num_hidden_layers"])],
    )
    return ModelSpec(
        name="deepseek_v3",
        flavor="dense",
        model=model,
        parallelize_fn=parallelize_deepseekv3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=DeepSeekV3StateDictAdapter,
    )


def make_mla_folder(folder: Path) -> Path:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**MLA)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def reordering(config: Mapping[str, Any]) -> ModelSpec:
    """Return Llama 3, whose adapter reorders rows of q and k."""
    return llama3.model_registry("debugmodel", attn_backend="varlen")


def flexible(config: Mapping[str, Any]) -> ModelSpec:
    return muse_glimmer.model_registry("debugmodel")


def empty(config: Mapping[str, Any]) -> None:
    """Return nothing."""
