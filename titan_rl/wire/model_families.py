"""The families of decoders, by their parts. Trainer, generator, checkpoints and weight sync read this table.

All families have grouped-query attention with rotary embeddings, a gated feed-forward, RMSNorm around both, and no bias
but those below. In a mixture of experts, the feed-forward of every layer, or of all but the first ones, is a router and
experts. A new family of such parts is one entry here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from titan_rl.config.choices import Family

Head = Literal["lm", "value"]  # log-probs of tokens, or one number per position (critic, reward model)
RopeType = Literal["default", "llama3", "yarn"]
NormPlace = Literal["attention_norm", "attention_out_norm", "ffn_norm", "ffn_out_norm"]
"""Norm of the input, or of the output, of a block's attention or feed-forward."""
BEFORE: Mapping[str, NormPlace] = MappingProxyType(
    {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
)
AFTER: Mapping[str, NormPlace] = MappingProxyType(
    {"post_attention_layernorm": "attention_out_norm", "post_feedforward_layernorm": "ffn_out_norm"}
)


def four_norms(*names: str) -> Mapping[str, NormPlace]:
    """Return the places of a block's norms, which are named in the order in which a token passes them."""
    return MappingProxyType(dict(zip(names, get_args(NormPlace), strict=True)))


GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
QKV = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyParts:
    """Parts in which model families differ."""

    model_type: str  # in config.json
    architectures: dict[Head, str]  # in config.json
    qkv_bias: bool | None = False  # query, key and value projections have biases; None: if attention_bias is true
    head_norms: bool | None = False  # RMSNorm over each query and key head; None: if use_qk_norm is true
    wide_norms: bool = False  # RMSNorm over all query heads at once, and over all key heads
    norms: Mapping[str, NormPlace] = field(default_factory=lambda: BEFORE)  # in a block, by their names in the folder
    norm_offset: float = 0.0  # a norm multiplies by this plus its weight
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"  # on the feed-forward's gate
    activation_key: str = "hidden_act"  # in config.json
    scaled_embedding: bool = False  # multiplied by the root of hidden_size
    partly_rotated: bool = False  # partial_rotary_factor may leave elements of a head as they are
    interleaved_rope: bool = False  # rotates neighbouring elements of a head, not its halves
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # tensors of a block that the folder has as one
    full_every: int = 0  # without layer_types, each layer of this number has no sliding window; 0: all have it
    one_rope: bool = False  # layers with a window have the rotary embeddings of the others
    rope_theta: float = 10000.0  # rotary base if config.json has none
    window_theta: float = 0.0  # default rotary base of layers with a window; 0: the others' base
    unrotated_layers: bool = False  # no_rope_layers marks layers without rotary embeddings
    experts: bool = False  # a router chooses experts for each token, instead of one feed-forward
    clamped_experts: bool = False  # one tensor for all experts: gate and up in turn, clamped, with biases
    biased_routes: bool = False  # as DeepSeek V3: see docs/models.md, "What is particular to GLM-4.5?"
    sinks: bool = False  # each head has a logit in its softmax's denominator; all projections have biases
    default_window: int = 0  # sliding window if config.json has no such key; 0: the family has no window
    tied: bool = False  # if config.json has no tie_word_embeddings
    ties: bool = True  # vLLM ties the embedding and the output head where tie_word_embeddings is true
    rotated_share: float = 1.0  # default partial_rotary_factor
    heads_fill_dim: bool = False  # vLLM takes no head_dim other than hidden_size / num_attention_heads
    derived_sizes: tuple[str, ...] = ()  # keys that config.json may omit: they follow from the other sizes
    rope_types: tuple[RopeType, ...] = ("default", "yarn")
    false_keys: tuple[str, ...] = ()  # keys of config.json for parts that are not computed here
    initializers: Literal["depth_scaled", "normal"] = "normal"  # if model.initializer_range is 0


FAMILIES: dict[Family, FamilyParts] = {
    "llama3": FamilyParts(  # Llama 2 and 3.x
        model_type="llama",
        architectures={"lm": "LlamaForCausalLM", "value": "LlamaForSequenceClassification"},
        derived_sizes=("num_key_value_heads", "head_dim"),
        rope_types=("default", "llama3", "yarn"),
        false_keys=("attention_bias", "mlp_bias", "use_sliding_window"),
        initializers="depth_scaled",
    ),
    "qwen2": FamilyParts(  # Qwen2 and Qwen2.5
        model_type="qwen2",
        architectures={"lm": "Qwen2ForCausalLM", "value": "Qwen2ForSequenceClassification"},
        qkv_bias=True,
        heads_fill_dim=True,
        derived_sizes=("head_dim",),
        false_keys=("use_sliding_window",),
    ),
    "qwen3": FamilyParts(
        model_type="qwen3",
        architectures={"lm": "Qwen3ForCausalLM", "value": "Qwen3ForSequenceClassification"},
        head_norms=True,  # its default sizes are one particular model's, so none are derived
        false_keys=("attention_bias", "use_sliding_window"),
    ),
    "qwen3_moe": FamilyParts(  # Qwen3-30B-A3B, 235B-A22B
        model_type="qwen3_moe",
        architectures={"lm": "Qwen3MoeForCausalLM", "value": "Qwen3MoeForSequenceClassification"},
        head_norms=True,
        experts=True,
        false_keys=("attention_bias", "use_sliding_window", "shared_expert_intermediate_size"),
    ),
    "mistral": FamilyParts(
        model_type="mistral",
        architectures={"lm": "MistralForCausalLM", "value": "MistralForSequenceClassification"},
        default_window=4096,
        derived_sizes=("head_dim",),
    ),
    "smollm3": FamilyParts(
        model_type="smollm3",
        architectures={"lm": "SmolLM3ForCausalLM", "value": "SmolLM3ForSequenceClassification"},
        unrotated_layers=True,
        rope_theta=2e6,
        heads_fill_dim=True,
        tied=True,
        derived_sizes=("head_dim",),
        false_keys=("attention_bias", "mlp_bias", "use_sliding_window"),
    ),
    "olmo2": FamilyParts(
        model_type="olmo2",
        architectures={"lm": "Olmo2ForCausalLM", "value": "Olmo2ForSequenceClassification"},
        wide_norms=True,
        norms=AFTER,
        heads_fill_dim=True,
        derived_sizes=("num_key_value_heads", "head_dim"),
        false_keys=("attention_bias",),
    ),
    "olmo3": FamilyParts(
        model_type="olmo3",
        architectures={"lm": "Olmo3ForCausalLM", "value": "Olmo3ForSequenceClassification"},
        wide_norms=True,
        norms=AFTER,
        default_window=4096,
        full_every=4,
        rope_theta=5e5,
        heads_fill_dim=True,
        derived_sizes=("num_key_value_heads", "head_dim"),
        false_keys=("attention_bias",),
    ),
    "phi3": FamilyParts(  # Phi-3, Phi-4
        model_type="phi3",
        architectures={"lm": "Phi3ForCausalLM", "value": "Phi3ForSequenceClassification"},
        fused=QKV | GATE_UP,
        partly_rotated=True,
        heads_fill_dim=True,
        derived_sizes=("num_key_value_heads", "head_dim"),
        rope_types=("default",),
    ),
    "glm4": FamilyParts(  # GLM-4-0414
        model_type="glm4",
        architectures={"lm": "Glm4ForCausalLM", "value": "Glm4ForSequenceClassification"},
        qkv_bias=None,
        norms=four_norms(
            *("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
        ),
        fused=GATE_UP,
        partly_rotated=True,
        interleaved_rope=True,
        rope_types=("default",),
    ),
    "gemma3": FamilyParts(  # text only
        model_type="gemma3_text",
        architectures={"lm": "Gemma3ForCausalLM", "value": "Gemma3TextForSequenceClassification"},
        head_norms=True,
        norms=four_norms(
            *("input_layernorm", "post_attention_layernorm"),
            *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ),
        norm_offset=1.0,
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        scaled_embedding=True,
        default_window=4096,
        full_every=6,
        rope_theta=1e6,
        window_theta=1e4,
        tied=True,
        rope_types=("default",),
        false_keys=(
            *("attention_bias", "use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"),
        ),
    ),
    "gpt_oss": FamilyParts(
        model_type="gpt_oss",
        architectures={"lm": "GptOssForCausalLM", "value": "GptOssForSequenceClassification"},
        qkv_bias=True,
        sinks=True,
        experts=True,
        clamped_experts=True,
        default_window=128,
        full_every=2,
        one_rope=True,
        rope_theta=1.5e5,
        ties=False,
        rope_types=("yarn",),
    ),
    "glm4_moe": FamilyParts(  # GLM-4.5, 4.5-Air, 4.6, 4.7
        model_type="glm4_moe",
        architectures={"lm": "Glm4MoeForCausalLM"},
        qkv_bias=None,
        head_norms=None,
        partly_rotated=True,
        rotated_share=0.5,
        experts=True,
        biased_routes=True,
        ties=False,
        rope_types=("default",),
    ),
}
BY_MODEL_TYPE: dict[str, Family] = {parts.model_type: family for family, parts in FAMILIES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltFamily:
    """A family that is not made of the parts above."""

    spec: str  # "module:function": TorchTitan's spec from the keys of a config.json
    engine_keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys that vLLM needs in config.json, to compute what transformers computes without them."""
    text_only: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json by which vLLM builds no tower
    seeing: Mapping[str, str] = field(default_factory=dict)  # specs that train more of the model, by model.vision


IDEFICS3 = BuiltFamily(
    engine_keys=MappingProxyType({"architectures": ["Idefics3ForConditionalGeneration"]}),  # SmolVLM, without videos
    spec="titan_rl.actors.titan.idefics3:spec",
    seeing=MappingProxyType(
        {
            "projection": "titan_rl.actors.titan.idefics3:with_projection",
            "all": "titan_rl.actors.titan.idefics3:with_tower",
        }
    ),
)
SPECS: dict[str, BuiltFamily] = {  # by model_type
    "muse_glimmer": BuiltFamily(
        spec="titan_rl.actors.titan.muse_glimmer:spec", text_only=MappingProxyType({"has_vision": False})
    ),
    "gemma4_text": BuiltFamily(spec="titan_rl.actors.titan.gemma4:spec"),
    "gemma4": BuiltFamily(spec="titan_rl.actors.titan.gemma4:spec"),
    "idefics3": IDEFICS3,
    "smolvlm": IDEFICS3,
    "qwen3_5_text": BuiltFamily(spec="titan_rl.actors.titan.qwen3_5:spec"),
    "qwen3_5": BuiltFamily(spec="titan_rl.actors.titan.qwen3_5:spec"),
    "deepseek_v3": BuiltFamily(
        spec="titan_rl.actors.titan.deepseek_v3:spec",
        engine_keys=MappingProxyType(
            {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_router_dtype": "float32"}
        ),
    ),
}

OTHER_KINDS = {  # why a model_type has no entry
    "mixture of experts of another kind": (
        *("mixtral", "qwen2_moe", "deepseek_v2", "llama4", "qwen3_5_moe", "qwen3_5_moe_text"),
    ),
    "model with other norms, scales or activations": ("gemma", "gemma2", "olmo", "granite"),
    "model with fused or partly rotated projections": ("phi", "glm", "chatglm", "gpt_neox", "stablelm"),
    "model with vision": (
        "gemma3",
        "mllama",
        "glm4v",
        "glm4v_moe",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "mistral3",
        "llava",
        "pixtral",
    ),
    "model with a state-space or linear attention": ("mamba", "mamba2", "falcon_h1", "qwen3_next", "jamba", "bamba"),
}


def why_unknown(model_type: str) -> str:
    """Return what kind of model a model_type without an entry is, for the refusal; "" if that is not known."""
    return next((f", a {kind}" for kind, types in OTHER_KINDS.items() if model_type in types), "")
