"""The keys of [generator] on their way to vLLM."""

from dataclasses import fields, replace

from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.actors.vllm.vllm_args import (
    NOT_VLLMS,
    VLLM_NAMES,
    engine_args,
    memory_share,
    quantization_args,
)

SETTINGS = EngineSettings(
    model_dir="folder", max_model_len=64, tensor_parallel_degree=2, block_size=16, kv_cache_memory_mb=3, seed=7
)


def test_every_key_reaches_vllm_under_its_name() -> None:
    args = engine_args(SETTINGS)
    for key in {field.name for field in fields(SETTINGS)} - NOT_VLLMS:
        assert args[VLLM_NAMES.get(key, key)] == (getattr(SETTINGS, key) if key != "max_num_batched_tokens" else None)
    assert engine_args(replace(SETTINGS, max_num_batched_tokens=8192))["max_num_batched_tokens"] == 8192
    assert not NOT_VLLMS & args.keys()
    assert (args["model"], args["tensor_parallel_size"], args["seed"]) == ("folder", 2, 7)
    assert args["distributed_executor_backend"] == "external_launcher"


def test_fp8_has_a_backend_that_reads_the_weights_as_they_land() -> None:
    for quantization in ("none", "int8"):
        assert quantization_args(replace(SETTINGS, quantization=quantization), on_cpu=False) == {}
    fp8 = replace(SETTINGS, quantization="fp8")
    assert quantization_args(fp8, on_cpu=True) == {"quantization": "fp8_per_channel", "linear_backend": "torch"}
    assert quantization_args(fp8, on_cpu=False) == {"quantization": "fp8_per_channel", "linear_backend": "cutlass"}


def test_the_head_is_the_models_unless_it_shall_be_float32() -> None:
    assert engine_args(replace(SETTINGS, load_format="auto"))["hf_overrides"] == {"head_dtype": "model"}
    assert engine_args(replace(SETTINGS, head_dtype="float32"))["hf_overrides"]["head_dtype"] == "float32"


def test_an_engine_that_gets_whole_numbers_by_sync_reads_no_quantization() -> None:
    assert engine_args(SETTINGS)["hf_overrides"] == {"head_dtype": "model", "quantization_config": None}


def test_a_cache_of_no_size_is_sized_by_vllm() -> None:
    assert engine_args(SETTINGS)["kv_cache_memory_bytes"] == 3 << 20
    assert engine_args(EngineSettings(model_dir="folder", kv_cache_memory_mb=0))["kv_cache_memory_bytes"] is None


def test_a_cache_of_a_given_size_asks_for_no_more_of_the_gpu_than_is_free() -> None:
    """A display that takes a part of a small card ended an engine that would have fitted."""
    total = 16 << 30
    assert memory_share(SETTINGS, total * 7 // 8, total) == 0.437
    assert memory_share(replace(SETTINGS, gpu_memory_utilization=0.3), total, total) == 0.3
    assert memory_share(SETTINGS, 0, total) == 0.001
    assert memory_share(replace(SETTINGS, kv_cache_memory_mb=0), total // 2, total) == 0.9, (
        "vLLM names the missing memory"
    )
