"""Shapes of published models, whose weights no test needs, and a tiny one to compute with."""

from dataclasses import replace

from titan_rl.wire.model_shape import ModelShape

LLAMA_8B = ModelShape(
    family="llama3",
    vocab_size=128256,
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    hidden_dim=14336,
    max_seq_len=131072,
    rope_theta=500000.0,
    norm_eps=1e-5,
    tied=False,
)
LLAMA_70B = replace(LLAMA_8B, dim=8192, n_layers=80, n_heads=64, hidden_dim=28672)
QWEN_600M = replace(
    LLAMA_8B,
    family="qwen3",
    vocab_size=151936,
    dim=1024,
    n_layers=28,
    n_heads=16,
    hidden_dim=3072,
    max_seq_len=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied=True,
)
QWEN_30B_A3B = replace(
    QWEN_600M,
    family="qwen3_moe",
    dim=2048,
    n_layers=48,
    n_heads=32,
    n_kv_heads=4,
    hidden_dim=768,
    experts=128,
    experts_per_token=8,
    norm_routes=True,
    tied=False,
)
GLM_AIR = replace(
    LLAMA_8B,
    family="glm4_moe",
    vocab_size=151552,
    n_layers=46,
    n_heads=96,
    hidden_dim=1408,
    rotary_dim=64,
    rope_theta=1e6,
    attention_bias=True,
    **{"experts": 128, "experts_per_token": 8, "norm_routes": True, "shared_experts": 1},
    **{"dense_layers": 1, "dense_hidden_dim": 10944},
)
QWEN_32B = replace(QWEN_600M, dim=5120, n_layers=64, n_heads=64, hidden_dim=25600, norm_eps=1e-6, tied=False)
TINY = ModelShape(
    family="qwen3",
    vocab_size=50,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    hidden_dim=48,
    max_seq_len=256,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tied=False,
)
