"""What "auto" means, by config and device."""

from dataclasses import replace
from typing import Any

import pytest

from titan_rl.config.auto import compiles, gradient_sync, resolved, threads
from titan_rl.config.sections import CompileSection, Config, Switch, TrainingSection
from titan_rl.config.toml import find, load


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


def test_a_resolved_config_resolves_to_itself() -> None:
    for device in ("cpu", "cuda"):
        once = resolved(Config(), device, gradients_fit=False)
        assert resolved(once, device) == once
        assert once == replace(Config(), compile=once.compile, training=once.training)


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
        ("sft_llama", {"rollout.lag": 1}, 4, 8),
        ("sft_llama", {"eval.size": 0}, 4, 8),  # titan_rl.serve starts a generator
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
