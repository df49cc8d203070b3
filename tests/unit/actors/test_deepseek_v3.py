"""What DeepSeek V3's config.json may have, and the sizes that follow."""

from typing import Any

import pytest

from titan_rl.actors.titan.deepseek_v3 import rope, rope_of, spec
from titan_rl.actors.titan.spec_sizes import sizes

PUBLISHED: dict[str, Any] = {  # in transformers 4's form
    **{"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16"},
    **{"vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "max_position_embeddings": 163840},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432},
    **{"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_shared_experts": 1},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True},
    **{"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1},
    **{"rope_theta": 10000, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False},
    **{"tie_word_embeddings": False, "num_nextn_predict_layers": 1},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1},
        **{"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
SCALING: dict[str, Any] = PUBLISHED["rope_scaling"]


def test_the_published_sizes() -> None:
    found = sizes("titan_rl.actors.titan.deepseek_v3:spec", PUBLISHED | {"num_hidden_layers": 4})
    tensors, adaptable = found.pop("tensors"), found.pop("adaptable")
    assert {name.split(".")[-2] for name in adaptable} == {"q_b_proj", "kv_b_proj", "o_proj"}
    assert found == {
        **{"vocab_size": 129280, "dim": 7168, "n_layers": 4, "n_heads": 128, "n_kv_heads": 128, "head_dim": 192},
        **{"latent_dim": 576, "hidden_dim": 2048, "dense_layers": 3, "dense_hidden_dim": 18432, "experts": 256},
        **{"experts_per_token": 8, "shared_experts": 1, "max_seq_len": 163840, "rope_theta": 10000.0},
        **{"norm_eps": 1e-6, "tied": False, "fused_tensors": {}, "float32_ends": (), "recurrent_heads": 0},
        "blocks": "model.layers.",
    }
    assert tensors["model.layers.3.mlp.experts.255.down_proj.weight"] == [7168, 2048]
    assert tensors["model.layers.3.mlp.gate.e_score_correction_bias"] == [256]
    assert "model.layers.2.mlp.gate.weight" not in tensors


def test_the_context_ends_where_yarns_does() -> None:
    scaling = rope_of(PUBLISHED) | {"factor": 2}
    assert rope(scaling, 64, 163840).max_seq_len == 2 * 4096
    assert rope(rope_of({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}), 64, 99).theta == 5e4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"topk_method": "greedy"}, 'topk_method: expected noaux_tc, found "greedy"'),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps: expected 1e-06, which transformers has in latent attention, found"),
        ({"rope_interleave": False}, "rope_interleave: expected True, found false"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: expected false, as vLLM ignores it for DeepseekV3"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: expected weights that are not quant"),
        ({"first_k_dense_replace": 61}, "first_k_dense_replace: expected 0 to 61 - 1, as vLLM needs a layer with"),
        ({"n_group": 3}, "n_group: expected groups of two or more of n_routed_experts = 256, found 3"),
        ({"n_group": 256}, "n_group: expected groups of two or more of n_routed_experts = 256, found 256"),
        ({"topk_group": 9}, "topk_group: expected 1 to n_group = 8, found 9"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: expected at most 128, the experts of topk_group = 4"),
        ({"rope_scaling": SCALING | {"mscale": 0.7}}, "rope_scaling: expected equal mscale and mscale_all_dim, and no"),
        ({"rope_scaling": {"type": "linear"}}, 'rope_scaling: expected rope_type default or yarn, found "linear"'),
    ],
)
def test_what_it_cannot_compute_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        spec(PUBLISHED | changes)
    assert str(error.value).startswith(problem)
