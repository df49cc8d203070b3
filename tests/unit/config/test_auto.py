"""What "auto" means, by config and device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_rl.config.auto import (
    compiles,
    gradient_sync,
    on_device,
    parameter_gather,
    resolved,
    threads,
    without_fsdp,
)
from titan_rl.config.sections import CompileSection, Config, Switch, TrainingSection
from titan_rl.config.toml import as_text, find, load, schema, shipped, to_toml


def at(config: Config, section: str, key: str) -> object:
    return getattr(getattr(config, section), key)


def of_device(config: Config, device: str) -> dict[str, object]:
    """Return the keys that a device decides, with their values."""
    found = on_device(config, device)
    sections = {
        "lora": ["base_dtype"],
        "training": ["mixed_precision_param"],
        "activation_checkpoint": ["mode"],
        "checkpoint": ["async_mode"],
        "generator": ["dtype", "max_num_batched_tokens", "kv_cache_memory_mb", "enforce_eager", "async_scheduling"],
        "weight_sync": ["in_flight"],
    }
    return {f"{section}.{key}": at(found, section, key) for section, keys in sections.items() for key in keys}


@pytest.mark.parametrize(
    ("enable", "device", "compute", "expected"),
    [
        ("auto", "cuda", "bfloat16", True),
        ("auto", "cuda", "float32", False),
        ("auto", "cpu", "bfloat16", False),
        ("auto", "cpu", "float32", False),
        (False, "cuda", "bfloat16", False),
        (True, "cuda", "bfloat16", True),
    ],
)
def test_blocks_are_compiled_where_their_attention_can_be(
    enable: Switch, device: str, compute: Any, expected: bool
) -> None:
    config = Config(
        compile=CompileSection(enable=enable), training=replace(TrainingSection(), mixed_precision_param=compute)
    )
    assert compiles(config, device) is expected
    assert resolved(config, device).compile.enable is expected


def test_gradients_are_synced_once_per_update_if_their_memory_allows_it() -> None:
    assert gradient_sync(Config(), fits=True) == "update"
    assert gradient_sync(Config(), fits=False) == "microbatch"
    for chosen in ("update", "microbatch"):
        config = Config(training=TrainingSection(gradient_sync=chosen))
        assert {gradient_sync(config, fits=fits) for fits in (True, False)} == {chosen}


def test_parameters_are_gathered_once_per_update_if_their_memory_allows_it() -> None:
    assert parameter_gather(Config(), fits=True) == "update"
    assert parameter_gather(Config(), fits=False) == "microbatch"
    for chosen in ("update", "microbatch"):
        config = Config(training=TrainingSection(parameter_gather=chosen))
        assert {parameter_gather(config, fits=fits) for fits in (True, False)} == {chosen}


def test_fsdp_stays_where_one_rank_needs_it() -> None:
    def without(world_size: int = 1, **keys: Any) -> bool:
        section = replace(TrainingSection(parameter_gather="update"), **keys)
        return without_fsdp(Config(training=section), world_size)

    assert without()
    assert not without(2)
    assert not without(parameter_gather="microbatch")
    assert not without(enable_cpu_offload=True)
    assert not without(dtype="bfloat16"), "FSDP2 adds up gradients in float32"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", shipped())
def test_a_resolved_config_resolves_to_itself_and_has_no_auto(name: str, device: str, tmp_path: Path) -> None:
    config = load(find(name))
    once = on_device(config, device)
    assert on_device(once, device) == once
    once = resolved(config, device, gradients_fit=False, rows=3, cache_mb=512)
    assert resolved(once, device) == once
    (tmp_path / "config.toml").write_text(to_toml(once))
    assert load(tmp_path / "config.toml") == once
    left = {(section, key) for section, keys in schema().items() for key in keys if at(once, section, key) == "auto"}
    models = {("model", "name"), ("lora", "sync")}  # the model decides them (preflight/added_parameters.py)
    places = {("weight_sync", "transport"), ("weight_sync", "relay")}  # where the ranks are
    assert left <= models | places | {("hosts", "device"), ("hosts", "isolation")}


def test_a_device_decides_what_an_expert_would_write() -> None:
    config = load(find("grpo_llama"), [("rollout.max_staleness_steps", "1"), ("training.seq_len", "4096")])
    assert of_device(config, "cpu") == {
        "lora.base_dtype": "float32",
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "none",
        "checkpoint.async_mode": "disabled",
        "generator.dtype": "float32",
        "generator.max_num_batched_tokens": 0,
        "generator.kv_cache_memory_mb": 256,
        "generator.enforce_eager": True,
        "generator.async_scheduling": False,
        "weight_sync.in_flight": "swap",
    }
    assert of_device(config, "cuda") == {
        "lora.base_dtype": "bfloat16",
        "training.mixed_precision_param": "bfloat16",
        "activation_checkpoint.mode": "auto",  # memory and time decide
        "checkpoint.async_mode": "async_with_pinned_mem",
        "generator.dtype": "bfloat16",
        "generator.max_num_batched_tokens": 8192,
        "generator.kv_cache_memory_mb": 0,
        "generator.enforce_eager": False,
        "generator.async_scheduling": True,
        "weight_sync.in_flight": "keep",
    }
    assert on_device(config, "cuda").training.dtype == "float32"


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        ({"training.mixed_precision_param": "float32"}, "generator.dtype", "float32"),
        ({"generator.dtype": "float32"}, "training.mixed_precision_param", "float32"),
        ({"training.seq_len": 2**14}, "generator.max_num_batched_tokens", 2**14),
        ({"training.seq_len": 2**14, "generator.max_model_len": 512}, "generator.max_num_batched_tokens", 8192),
        ({"rollout.top_p": 0.9}, "generator.async_scheduling", False),
        ({"rollout.min_p": 0.1}, "generator.async_scheduling", False),
        ({"algorithm.routing_replay": True}, "generator.async_scheduling", False),
        ({"rollout.max_staleness_steps": 0}, "weight_sync.in_flight", "swap"),
        ({"placement.kind": "colocated"}, "weight_sync.in_flight", "swap"),
        ({"algorithm.proximal": "trainer", "algorithm.correction": "none"}, "weight_sync.in_flight", "swap"),
        ({"algorithm.proximal": "generator", "algorithm.correction": "none"}, "weight_sync.in_flight", "keep"),
    ],
)
def test_other_keys_change_what_a_gpu_decides(keys: dict[str, object], key: str, expected: object) -> None:
    given = {"rollout.max_staleness_steps": 1, **keys}
    config = load(find("grpo_llama"), [(name, str(value)) for name, value in given.items()])
    assert of_device(config, "cuda")[key] == expected


def test_what_a_file_sets_wins() -> None:
    given: dict[str, Any] = {
        "lora.base_dtype": "bfloat16",
        "training.mixed_precision_param": "float32",
        "activation_checkpoint.mode": "full",
        "checkpoint.async_mode": "async",
        "generator.dtype": "bfloat16",
        "generator.max_num_batched_tokens": 4096,
        "generator.kv_cache_memory_mb": 64,
        "generator.enforce_eager": True,
        "generator.async_scheduling": True,
        "weight_sync.in_flight": "drain",
    }
    config = load(find("grpo_llama"), [(name, as_text(value)) for name, value in given.items()])
    for device in ("cpu", "cuda"):
        assert on_device(config, device) == config
        assert resolved(config, device, cache_mb=512).generator == config.generator


@pytest.mark.parametrize(
    ("name", "keys", "models", "engines"),
    [
        ("grpo_llama", {}, 4, 8),  # two trainers, then one generator
        ("grpo_llama", {"training.stream_groups": 4}, 2, 2),
        ("grpo_llama", {"hosts.threads": 3}, 3, 3),
        ("grpo_llama_async", {}, 4, 4),
        ("grpo_llama_fsdp_tp", {}, 2, 4),
        ("grpo_llama_replicas", {}, 8, 4),
        ("grpo_llama_replicas", {"generator.replicas": 9}, 8, 1),
        ("ppo_llama", {}, 4, 8),  # one trainer and the critic
        ("ppo_reward_model_llama", {}, 2, 4),  # the reward model judges while others are sampled
        ("sft_llama", {"rollout.max_staleness_steps": 1}, 4, 8),
        ("sft_llama", {"eval.size": 0}, 4, 8),  # titan_rl serve starts a generator
    ],
)
def test_threads_are_the_cores_of_those_that_compute_at_the_same_time(
    name: str, keys: dict[str, object], models: int, engines: int
) -> None:
    config = load(find(name), [(key, str(value)) for key, value in keys.items()])
    assert threads(config, "model", "cpu", 8) == models
    assert threads(config, "generator", "cpu", 8) == engines


def test_a_small_model_is_not_spread_over_all_cores_of_a_large_machine() -> None:
    config = load(find("grpo_llama"))
    assert threads(config, "model", "cpu", 96) == threads(config, "generator", "cpu", 96) == 8
    offloaded = replace(config, training=replace(config.training, enable_cpu_offload=True))
    assert threads(offloaded, "model", "cuda", 96) == 48  # an optimizer of billions of parameters


def test_ranks_on_gpus_have_one_thread_unless_they_compute_in_host_memory() -> None:
    config = load(find("grpo_llama"))
    assert threads(config, "model", "cuda", 8) == threads(config, "generator", "cuda", 8) == 1
    offloaded = replace(config, training=replace(config.training, enable_cpu_offload=True))
    assert threads(offloaded, "model", "cuda", 8) == 4
    assert threads(offloaded, "generator", "cuda", 8) == 1
