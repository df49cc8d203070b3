"""The families of decoders, by their parts. Trainer, generator, checkpoints and weight sync read this table.

All families have RMSNorm before attention and before a gated SiLU feed-forward, grouped-query attention with rotary
embeddings over halves of a head, and no bias but those below. In a mixture of experts, the feed-forward of every layer
is a router and experts. A new family of such parts is one entry here.
"""

from dataclasses import dataclass
from typing import Literal

from titan_rl.config.choices import Family

Head = Literal["lm", "value"]  # log-probs of tokens, or one number per position (critic, reward model)
RopeType = Literal["default", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyParts:
    """Parts in which model families differ."""

    model_type: str  # in config.json
    architectures: dict[Head, str]  # in config.json
    qkv_bias: bool = False  # query, key and value projections have biases
    head_norms: bool = False  # RMSNorm over each query and key head
    experts: bool = False  # a router chooses experts for each token, instead of one feed-forward
    default_window: int = 0  # sliding window if config.json has no such key; 0: the family has no window
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
}
BY_MODEL_TYPE: dict[str, Family] = {parts.model_type: family for family, parts in FAMILIES.items()}

OTHER_KINDS = {  # why a model_type has no entry
    "mixture of experts of another kind": ("mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4"),
    "model with other norms, scales or activations": ("gemma", "gemma2", "gemma3", "gemma3_text", "olmo2", "glm4"),
    "model with fused or partly rotated projections": ("phi", "phi3", "glm", "chatglm", "gpt_neox", "stablelm"),
    "model with vision": ("mllama", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "llava", "pixtral"),
    "model with a state-space or linear attention": ("mamba", "mamba2", "falcon_h1", "qwen3_next", "jamba", "bamba"),
}


def why_unknown(model_type: str) -> str:
    """Return what kind of model a model_type without an entry is, for the refusal; "" if that is not known."""
    return next((f", a {kind}" for kind, types in OTHER_KINDS.items() if model_type in types), "")
