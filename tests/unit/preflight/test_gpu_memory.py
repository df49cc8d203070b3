"""A run that does not fit its GPUs by estimate is refused, with a setting that fits."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from support.shapes import LLAMA_8B, LLAMA_70B, QWEN_600M
from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load
from titan_rl.preflight.checks.machine import check_gpu_memory
from titan_rl.preflight.memory import (
    CONTEXT,
    GIB,
    GRAPHS,
    beside_sleeping_engine,
    cache_bytes_per_token,
    needs,
    on_gpus,
)
from titan_rl.wire.model_shape import ModelShape

EIGHT, ONE = "grpo_llama3_8b", "grpo_qwen3_0_6b_1gpu"


def refused(config: Config, shape: ModelShape, gib: float, gpus: int = 8) -> list[str]:
    return list(check_gpu_memory(config, shape, int(gib * GIB), most=gpus))


@pytest.mark.parametrize("gib", [14, 16, 20, 24, 32, 40, 48, 60])
@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize(("name", "shape"), [(EIGHT, LLAMA_8B), (ONE, QWEN_600M)])
def test_what_is_suggested_fits(name: str, shape: ModelShape, mode: str, gib: int) -> None:
    before = ("--training.local_batch_size", "4"), ("--activation_checkpoint.mode", mode)
    flags = [(key.removeprefix("--"), value) for key, value in before]
    for problem in refused(load(find(name), flags), shape, gib):
        mesh, advice = problem.split("]", 1)[0], problem.rsplit("; ", 1)[1]
        if advice.startswith("no value of"):
            continue
        settings = re.findall(r'([a-z_]+\.[a-z_]+) = "?([^,"]+?)"?(?:,| needs|$)', advice)
        assert settings, advice
        after = refused(load(find(name), [*flags, *settings]), shape, gib)
        assert not any(other.startswith(mesh) for other in after), (problem, after)


def test_some_models_are_too_large_for_a_node() -> None:
    trainer, engine = refused(load(find(EIGHT)), LLAMA_70B, 79)
    assert "parallelism.data_parallel_shard_degree is enough: take larger GPUs, more of them" in trainer
    assert engine.endswith("generator.tensor_parallel_degree = 4, generator.replicas = 1 needs 71.1 GiB")


def test_colocated_meshes_take_turns_on_a_gpu() -> None:
    """The engine samples next to the trainer's weights and optimizer; its KV cache is freed while the trainer works."""
    config = load(find(ONE), [("generator.kv_cache_memory_mb", "3072")])
    apart = replace(config, placement=replace(config.placement, kind="disaggregated"))
    together, alone = (needs(on_gpus(c, QWEN_600M, 0), QWEN_600M, 15 * GIB) for c in (config, apart))
    kept = 12 * QWEN_600M.parameters
    assert together["generator"].nbytes - alone["generator"].nbytes > kept
    assert together["trainer"].nbytes - alone["trainer"].nbytes == CONTEXT + GRAPHS


def test_what_a_sleeping_engine_leaves_is_compared_with_the_estimates() -> None:
    config = on_gpus(load(find(ONE), [("generator.kv_cache_memory_mb", "3072")]), QWEN_600M, 15 * GIB)
    enough = beside_sleeping_engine(config, QWEN_600M, 15 * GIB, 16 * GIB)
    assert re.match(
        r"a sleeping engine leaves 15\.0 of 16\.0 GiB of its GPU \(estimated 1[34]\.\d\) for a trainer", enough
    )
    assert "lower" not in enough
    assert "lower training.local_batch_size" in beside_sleeping_engine(config, QWEN_600M, 9 * GIB, 16 * GIB)


def test_a_cache_without_a_size_takes_what_is_left_but_holds_the_longest_sequence() -> None:
    config = load(find(EIGHT))
    found = needs(on_gpus(config, LLAMA_8B, 0), LLAMA_8B, 79 * GIB)["generator"]
    assert found.fits
    assert 0.99 * found.limit < found.nbytes <= found.limit <= 0.9 * 79 * GIB
    long = replace(config, generator=replace(config.generator, max_model_len=2**20))
    assert cache_bytes_per_token(on_gpus(long, LLAMA_8B, 0), LLAMA_8B) == 2**17
    assert not needs(on_gpus(long, LLAMA_8B, 0), LLAMA_8B, 79 * GIB)["generator"].fits


def test_gradients_stay_whole_where_they_fit() -> None:
    config = load(find(EIGHT), [("activation_checkpoint.mode", "none")])
    assert on_gpus(config, LLAMA_8B, 79 * GIB).training.gradient_sync == "microbatch"
    assert on_gpus(config, LLAMA_8B, 141 * GIB).training.gradient_sync == "update"
    assert on_gpus(config, LLAMA_8B, 0).training.gradient_sync == "microbatch"  # unknown size


def test_every_model_of_a_run_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "ppo.toml"
    file.write_text(
        f'base = "{EIGHT}"\n[algorithm]\nname = "ppo"\nkl_coef = 0.1\n[critic]\nlr = 1e-6\n[reference]\nmesh = "own"'
    )
    found = refused(load(file), LLAMA_8B, 79, 16)
    assert [problem.split("]")[0] for problem in found] == ["[critic"]  # on one GPU
    assert found[0].endswith("critic.data_parallel_shard_degree = 2 needs 76.9 GiB") or "critic." in found[0]
