import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from support.shapes import GLM_AIR
from titan_rl.config.sections import ModelSection
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.model_shape import ROUTE_BIAS, ModelShape, shape_of_folder

LLAMA = ModelShape(
    family="llama3",
    vocab_size=97,
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    hidden_dim=96,
    max_seq_len=16384,
    rope_theta=500000.0,
    norm_eps=1e-5,
    tied=False,
)
SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LENGTH = {"original_max_position_embeddings": 1024}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, **LENGTH, "beta_fast": 16.0, "beta_slow": 2.0},
    **{"mscale": 1.5, "mscale_all_dim": 0.7, "truncate": False},
}
YARN_ALONE = {"rope_type": "yarn", "factor": 4.0, **LENGTH}
GPT_OSS_YARN = YARN_ALONE | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
SHAPES = {
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tied=True),
    "llama scaled": replace(LLAMA, rope_scaling=SCALING),
    "llama head_dim": replace(LLAMA, head_dim=32),
    "llama yarn": replace(LLAMA, rope_scaling={"rope_type": "yarn", "factor": 4.0, **LENGTH}, max_seq_len=4096),
    "qwen2": replace(LLAMA, family="qwen2"),
    "qwen2 yarn": replace(LLAMA, family="qwen2", tied=True, rope_scaling=YARN, max_seq_len=4096),
    "mistral": replace(LLAMA, family="mistral", head_dim=24, sliding_window=96),
    "mistral without window": replace(LLAMA, family="mistral", n_kv_heads=1),
    "qwen yarn": replace(LLAMA, family="qwen3", rope_scaling=YARN, max_seq_len=4096),
    "qwen": replace(LLAMA, family="qwen3"),
    "qwen moe": replace(LLAMA, family="qwen3_moe", experts=4, experts_per_token=3, norm_routes=True),
    "smollm3": replace(LLAMA, family="smollm3", tied=True, unrotated_layers=(1,)),
    "olmo2": replace(LLAMA, family="olmo2"),
    "olmo3": replace(LLAMA, family="olmo3", sliding_window=96, full_layers=(1,), rope_scaling=YARN, max_seq_len=4096),
    "phi3": replace(LLAMA, family="phi3", rotary_dim=12),
    "glm4": replace(LLAMA, family="glm4", head_dim=24, rotary_dim=12, attention_bias=True),
    "gemma3": replace(
        LLAMA, family="gemma3", head_dim=32, sliding_window=96, full_layers=(0,), window_theta=1e4, query_scalar=48
    ),
    "gpt-oss": replace(
        LLAMA,
        family="gpt_oss",
        **{"experts": 4, "experts_per_token": 3, "norm_routes": True, "sliding_window": 96, "full_layers": (1,)},
        rope_scaling=GPT_OSS_YARN,
        max_seq_len=4096,
    ),
    "glm4_moe": replace(
        LLAMA,
        family="glm4_moe",
        **{"experts": 4, "experts_per_token": 3, "norm_routes": True, "dense_layers": 1, "dense_hidden_dim": 80},
        **{"shared_experts": 2, "route_scale": 2.5, "use_head_norms": True, "rotary_dim": 8},
    ),
    "qwen tied head_dim": replace(LLAMA, family="qwen3", tied=True, head_dim=24, dim=50),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
VALUED = {name: shape for name, shape in SHAPES.items() if "value" in shape.parts.architectures}
valued = pytest.mark.parametrize("shape", VALUED.values(), ids=VALUED)


def saved(shape: ModelShape, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=[2, 3], pad=0)))
    return folder


@shapes
def test_transformers_reads_what_is_written(shape: ModelShape, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(saved(shape, tmp_path))
    assert ModelShape.from_hf(config.to_dict()) == shape
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, [2, 3], 0)


@shapes
def test_parameter_count_is_transformers(shape: ModelShape, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(saved(shape, tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())  # a tied weight is counted once
    assert shape.folder_tensors() == on_disk(shape, model)


def on_disk(shape: ModelShape, model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the tensors that transformers writes for its parameters: stacks of experts one by one, but gpt-oss's."""
    biases = ((name, bias) for name, bias in model.named_buffers() if name.endswith(ROUTE_BIAS))
    sizes = {name: tuple(p.shape) for name, p in (*model.named_parameters(), *biases)}
    found = dict[str, tuple[int, ...]]()
    if shape.family == "gpt_oss":
        return sizes
    for name, size in sizes.items():
        stack, _, half = name.rpartition(".")
        if half == "gate_up_proj":
            into = (size[1] // 2, size[2])
            found |= {f"{stack}.{e}.{x}_proj.weight": into for e in range(size[0]) for x in ("gate", "up")}
        elif len(size) == 3:
            found |= {f"{stack}.{e}.{half}.weight": size[1:] for e in range(size[0])}
        else:
            found[name] = size
    return found


@valued
def test_a_value_head_is_transformers_sequence_classification(shape: ModelShape, tmp_path: Path) -> None:
    """One number per position instead of the vocabulary: the same body, read back with its head."""
    valued = shape.with_value_head()
    config = AutoConfig.from_pretrained(saved(valued, tmp_path))
    assert ModelShape.from_hf(config.to_dict()) == valued
    assert (config.num_labels, config.architectures) == (1, [shape.parts.architectures["value"]])
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    assert type(model).__name__ == shape.parts.architectures["value"]
    assert valued.parameters == sum(p.numel() for p in model.parameters())
    assert valued.folder_tensors() == on_disk(shape, model)


@valued
def test_a_reward_model_keeps_tie_word_embeddings_of_the_model_that_it_was(shape: ModelShape) -> None:
    config = shape.with_value_head().hf_config(bos=1, eos=2, pad=0) | {"tie_word_embeddings": True}
    assert ModelShape.from_hf(config) == shape.with_value_head()


@pytest.mark.parametrize(
    ("labels", "found"),
    [({"num_labels": 3}, 3), ({"id2label": {"0": "bad", "1": "good"}}, 2), ({}, 2)],
    ids=["num_labels", "id2label", "transformers' default"],
)
def test_a_classifier_is_no_reward_model(labels: dict[str, Any], found: int) -> None:
    config = LLAMA.with_value_head().hf_config(bos=1, eos=2, pad=0)
    assert ModelShape.from_hf(config | {"num_labels": None, "id2label": {"0": "LABEL_0"}}).head == "value"
    config.pop("num_labels")
    with pytest.raises(ValueError, match=f"^num_labels: expected 1, as a reward is one number, found {found}$"):
        ModelShape.from_hf(config | labels)


@shapes
def test_vllm_reads_what_is_written(shape: ModelShape, tmp_path: Path) -> None:
    from vllm.transformers_utils.config import get_config

    config = get_config(saved(shape, tmp_path), trust_remote_code=False)
    assert ModelShape.from_hf(config.to_dict()) == shape


def test_transformers_4_form() -> None:
    config = replace(LLAMA, rope_scaling=SCALING).hf_config(bos=1, eos=2, pad=None)
    rope = config.pop("rope_parameters")
    old = config | {"rope_theta": int(rope.pop("rope_theta")), "rope_scaling": rope, "torch_dtype": "bfloat16"}
    assert ModelShape.from_hf(old) == replace(LLAMA, rope_scaling=SCALING)
    assert ModelShape.from_hf(old | {"rope_scaling": None}) == LLAMA
    rope["type"] = rope.pop("rope_type")  # older still
    assert ModelShape.from_hf(old | {"rope_scaling": rope}).rope_scaling == SCALING


@pytest.mark.parametrize(("positions", "longest"), [(1024, 1024), (2048, 2048), (16384, 4096)])
def test_yarn_is_as_long_as_vllm_lets_it_be(positions: int, longest: int) -> None:
    """Neither beyond max_position_embeddings, nor beyond the table of 4 x 1024 positions."""
    config = SHAPES["qwen2 yarn"].hf_config(bos=1, eos=2, pad=None) | {"max_position_embeddings": positions}
    assert ModelShape.from_hf(config).max_seq_len == longest


def test_glm_4_5_airs_published_config() -> None:
    """In transformers 4's form; 106B parameters, of which a token passes 12B."""
    keys: dict[str, Any] = {
        **{"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "torch_dtype": "bfloat16"},
        **{"vocab_size": 151552, "hidden_size": 4096, "num_hidden_layers": 46, "max_position_embeddings": 131072},
        **{"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5},
        **{"rope_theta": 1000000, "rope_scaling": None, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
        **{"attention_bias": True, "use_qk_norm": False, "tie_word_embeddings": False},
        **{"intermediate_size": 10944, "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
        **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
        **{"norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1},
    }
    shape = ModelShape.from_hf(keys)
    assert shape == GLM_AIR
    assert shape.parameters == 106_852_245_504
    assert [shape.hidden_per_token(layer) for layer in (0, 1, 45)] == [10944, 9 * 1408, 9 * 1408]


def test_absent_llama_heads_follow_from_the_others() -> None:
    config = LLAMA.hf_config(bos=1, eos=2, pad=None) | {"num_key_value_heads": None, "head_dim": None}
    assert ModelShape.from_hf(config) == replace(LLAMA, n_kv_heads=4, head_dim=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            'idefics3, smolvlm, qwen3_5_text, qwen3_5 or deepseek_v3, found "gpt2"',
        ),
        ({"model_type": "mixtral"}, 'found "mixtral", a mixture of experts of another kind'),
        ({"model_type": "gemma2"}, 'found "gemma2", a model with other norms, scales or activations'),
        ({"architectures": ["LlamaModel"]}, 'expected ["LlamaForCausalLM"] or ["LlamaForSequenceClassification"]'),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size: expected a positive integer, found null"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a positive integer, found 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, 'hidden_act: expected "silu", found "gelu"'),
        ({"attention_bias": True}, "attention_bias: expected false, found true"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 64}, "sliding_window: expected null, as transformers ignores it for Llama, found 64"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected full attention only"),
        ({"num_local_experts": 8}, "num_local_experts: expected a dense model, found 8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "expected rope_type default or llama3 or yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0, found 0.5"),
    ],
)
def test_unsupported_hf_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelShape.from_hf(LLAMA.hf_config(bos=1, eos=2, pad=None) | change)


def test_qwen3_takes_no_llama_scaling_and_no_transformers_defaults() -> None:
    config = SHAPES["qwen"].hf_config(bos=1, eos=2, pad=None)
    with pytest.raises(ValueError, match="rope_type default or yarn for all layers"):
        ModelShape.from_hf(config | {"rope_parameters": SCALING | {"rope_theta": 1e6}})
    with pytest.raises(ValueError, match="head_dim: expected a positive integer, found null"):
        ModelShape.from_hf({key: value for key, value in config.items() if key != "head_dim"})


def test_shape_of_keys() -> None:
    assert shape_of(ModelSection()).parameters == 803_968
    assert shape_of(ModelSection(head_dim=64, name="qwen3")).head_dim == 64


def test_a_folders_key_is_named_in_what_is_wrong_with_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^teacher\.hf_assets_path: expected a Hugging Face folder, found none at"):
        shape_of_folder(str(tmp_path / "none"), "teacher.hf_assets_path")
    with pytest.raises(ValueError, match=r"^critic\.hf_assets_path: expected a config\.json in .*, found none"):
        shape_of_folder(str(tmp_path), "critic.hf_assets_path")


def test_shape_of_folder(tmp_path: Path) -> None:
    saved(SHAPES["qwen"], tmp_path)
    assert shape_of(ModelSection(name="qwen3", hf_assets_path=str(tmp_path))) == SHAPES["qwen"]
    assert shape_of(ModelSection(hf_assets_path=str(tmp_path))) == SHAPES["qwen"], "no key but the path"
    with pytest.raises(ValueError, match=r'model.name: expected "qwen3" or "auto", the family of .*, found "llama3"'):
        shape_of(ModelSection(name="llama3", hf_assets_path=str(tmp_path)))
    for content in ("[1]", "{", '"x"'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"model.hf_assets_path: expected a usable .*config.json"):
            shape_of(ModelSection(hf_assets_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen2", {"head_dim": 32}, "head_dim: expected hidden_size / num_attention_heads = 16, as vLLM's Qwen2For"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window: expected false, found true"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types: expected full attention only"),
        ("qwen moe", {"num_experts": 0}, "num_experts: expected a positive integer of at most 16384, found null"),
        ("qwen moe", {"num_local_experts": 5}, "num_local_experts: expected num_experts = 4, found 5"),
        ("qwen moe", {"num_experts_per_tok": 5}, "a positive integer of at most num_experts = 4, found 5"),
        ("qwen moe", {"moe_intermediate_size": None}, "moe_intermediate_size: expected a positive integer"),
        ("qwen moe", {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false, found 1"),
        ("qwen moe", {"decoder_sparse_step": 2}, "decoder_sparse_step: expected 1: experts in every layer, found 2"),
        ("qwen moe", {"mlp_only_layers": [0]}, "mlp_only_layers: expected []: experts in every layer, found [0]"),
        ("qwen moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size: expected false"),
        ("glm4_moe", {"n_routed_experts": 0}, "n_routed_experts: expected a positive integer of at most 16384, found"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "first_k_dense_replace: expected 0 to 2 - 1, as vLLM needs a layer"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts: expected a positive integer of at most 16384, found"),
        ("glm4_moe", {"n_group": 3}, "n_group: expected groups of two or more of n_routed_experts = 4, found 3"),
        ("glm4_moe", {"topk_group": 2}, "topk_group: expected 1 to n_group = 1, found 2"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor: expected a number above 0, found 0"),
        ("glm4_moe", {"use_qk_norm": 1}, "use_qk_norm: expected true or false, found 1"),
        ("glm4_moe", {"tie_word_embeddings": True}, "tie_word_embeddings: expected false, as vLLM ignores it for Glm4"),
        ("glm4_moe", {"architectures": ["Glm4ForCausalLM"]}, 'architectures: expected ["Glm4MoeForCausalLM"], found'),
        ("mistral", {"sliding_window": 0}, "sliding_window: expected null, or a positive integer"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "sliding attention only, for sliding_window is 96"),
        ("mistral without window", {"layer_types": ["sliding_attention"] * 2}, "full attention only"),
        ("mistral", {"num_key_value_heads": None}, "num_key_value_heads: expected a positive integer, found null"),
        ("qwen2 yarn", {"rope_parameters": YARN | {"beta_fast": None}}, "beta_fast of yarn above 0, or no such key"),
        ("qwen2 yarn", {"rope_parameters": YARN | {"factor": 0.5}}, "a factor of yarn of at least 1"),
        ("qwen2 yarn", {"rope_parameters": YARN | {"truncate": 1}}, "truncate of yarn true or false"),
        ("qwen2 yarn", {"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_theta: expected a number above 1"),
        ("qwen yarn", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type default or yarn for"),
    ],
)
def test_what_a_family_does_not_have_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelShape.from_hf(SHAPES[name].hf_config(bos=1, eos=2, pad=None) | change)


def test_what_qwen_and_mistral_say_of_windows_is_read() -> None:
    qwen = SHAPES["qwen2"].hf_config(bos=1, eos=2, pad=None)
    ignored = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1}
    assert ModelShape.from_hf(qwen | ignored | {"layer_types": ["full_attention"] * 2}) == SHAPES["qwen2"]
    mistral = SHAPES["mistral"].hf_config(bos=1, eos=2, pad=None)
    assert ModelShape.from_hf(mistral | {"layer_types": ["sliding_attention"] * 2}).sliding_window == 96
    del mistral["sliding_window"]
    assert ModelShape.from_hf(mistral).sliding_window == 4096, "transformers' default"


BY_TRANSFORMERS_4: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **{"architectures": ["Gemma3ForCausalLM"], "head_dim": 32, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        **{"sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256},
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "rope_theta": 5e6, "no_rope_layer_interval": 4},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "rope_theta": 5e5, "rope_scaling": None},
    "olmo3": {
        **{"architectures": ["Olmo3ForCausalLM"], "rope_theta": 5e5, "sliding_window": 4096},
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32},
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "rope_theta": 25e4, "rope_scaling": None, "sliding_window": None},
    "gpt_oss": {
        **{"architectures": ["GptOssForCausalLM"], "head_dim": 32, "rope_theta": 150000, "sliding_window": 128},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2, "swiglu_limit": 7.0},
        **{"attention_bias": True, "initial_context_length": 4096, "router_aux_loss_coef": 0.9, "rms_norm_eps": 1e-5},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
            **{"beta_fast": 32.0, "beta_slow": 1.0},
        },
    },
    "glm4": {"architectures": ["Glm4ForCausalLM"], "head_dim": 32, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("kind", BY_TRANSFORMERS_4)
def test_a_config_of_transformers_4_means_what_transformers_5_reads_from_it(kind: str) -> None:
    """Keys that are left out have transformers' defaults: which layers have a window, or no rotary embeddings."""
    sizes = {
        **{"vocab_size": 320, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }
    keys = sizes | BY_TRANSFORMERS_4[kind]
    five = AutoConfig.for_model(kind, **keys).to_dict()
    assert ModelShape.from_hf({"model_type": kind, **keys}) == ModelShape.from_hf(five)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: expected false, found 30.0"),
        ("gemma3", {"hidden_activation": "silu"}, 'hidden_activation: expected "gelu_pytorch_tanh", found "silu"'),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a positive integer, found 0"),
        ("gemma3", {"layer_types": ["full_attention"]}, "full_attention or sliding_attention for each of 2 layers"),
        ("gemma3", {"sliding_window": None}, "sliding_window: expected a positive integer, found null"),
        (
            "olmo3",
            {"layer_types": ["linear_attention"] * 2},
            "full_attention or sliding_attention for each of 2 layers",
        ),
        ("phi3", {"sliding_window": 2047}, "sliding_window: expected null, as vLLM ignores it for Phi-3, found 2047"),
        ("phi3", {"rope_scaling": {"rope_type": "longrope"}}, "expected rope_type default for all layers"),
        (
            "glm4",
            {"rope_parameters": {"partial_rotary_factor": 1.5}},
            "partial_rotary_factor: expected a number above 0",
        ),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: expected a 0 or a 1 for each of 2 layers, found [1]"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "sliding_attention and full_attention in turn, as vLLM"),
        (
            "gpt_oss",
            {"tie_word_embeddings": True},
            "tie_word_embeddings: expected false, as vLLM ignores it for GptOss",
        ),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit: expected 7.0, as vLLM computes, found 5.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha: expected 1.702, as vLLM computes, found 1.0"),
        ("gpt_oss", {"rms_norm_eps": 1e-6}, "rms_norm_eps: expected 1e-05, as vLLM computes, found 1e-06"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias: expected true, found false"),
        ("gpt_oss", {"rope_parameters": {"rope_theta": 1e4}}, "expected rope_type yarn for all layers"),
        ("gpt_oss", {"rope_parameters": YARN_ALONE}, "expected beta_fast and beta_slow of yarn, which vLLM reads"),
        ("gpt_oss", {"rope_parameters": GPT_OSS_YARN | {"mscale": 0.5}}, "yarn without mscale, which vLLM ignores"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config: expected weights that are not quantized, or mxfp4, found",
        ),
        ("qwen3", {"no_rope_layers": [1, 0]}, "no_rope_layers: expected no such key, found [1, 0]"),
    ],
)
def test_unsupported_parts_of_a_family(family: Any, change: dict[str, Any], message: str) -> None:
    shape = replace(LLAMA, family=family, sliding_window=96 if family in ("gemma3", "olmo3") else 0)
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelShape.from_hf(shape.hf_config(bos=1, eos=2, pad=0) | change)
