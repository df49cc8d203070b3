"""A run that does not fit its GPUs by estimate is refused, with a setting that fits."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checked_configs import config as config_from
from support.shapes import LLAMA_8B, LLAMA_70B, QWEN_600M
from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load
from titan_rl.preflight.checks import problems
from titan_rl.preflight.checks.machine import check_gpu_memory
from titan_rl.preflight.memory import (
    GIB,
    Need,
    beside_engine,
    by_formula,
    cache_bytes_per_token,
    engine_weights,
    measured_trainer,
    needs,
    offloaded,
    on_gpus,
    saved_bytes,
)
from titan_rl.wire.model_shape import ModelShape, ShardedModel

EIGHT, ONE = "grpo_llama3_8b", "grpo_qwen3_0_6b_1gpu"


def refused(config: Config, shape: ModelShape, gib: float, gpus: int = 8) -> list[str]:
    return list(check_gpu_memory(config, shape, int(gib * GIB), most=gpus))


@pytest.mark.parametrize("gib", [14, 16, 20, 24, 32, 40, 48, 60])
@pytest.mark.parametrize("mode", ["none", "selective", "offload"])
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


def test_a_moving_average_is_one_copy_of_what_is_trained() -> None:
    """Also on disk and in snapshots: four tensors per parameter instead of three."""
    one, averaged = (
        on_gpus(load(find(EIGHT), [("algorithm.name", name), ("algorithm.teacher_context", "answer")]), LLAMA_8B, 0)
        for name in ("opsd", "sdpo")
    )
    before, after = (needs(each, LLAMA_8B, 0)["trainer"].own.kept for each in (one, averaged))
    assert after["teacher's average"].nbytes * 2 == after["optimizer"].nbytes == before["optimizer"].nbytes
    assert "teacher's average" not in before  # it lends the reference, a copy of all weights
    assert [saved_bytes(each, "trainer") for each in (one, averaged)] == [12, 16]
    assert [saved_bytes(each, "critic") for each in (one, averaged)] == [12, 12]


def test_moments_in_bfloat16_take_four_bytes_per_parameter_less() -> None:
    """On ranks, on disk and in host memory."""
    own, rounded = (
        on_gpus(load(find(EIGHT), [("optimizer.moments", moments)]), LLAMA_8B, 0) for moments in ("master", "bfloat16")
    )
    parts = [needs(each, LLAMA_8B, 0)["trainer"].own.kept for each in (own, rounded)]
    assert parts[1]["optimizer"].nbytes * 2 == parts[0]["optimizer"].nbytes
    assert [saved_bytes(each, "trainer") for each in (own, rounded)] == [12, 8]
    cut = ShardedModel(held=1000, whole=8000, block=1, last=1)
    assert [offloaded(each, cut) for each in (own, rounded)] == [16_000, 12_000]


def test_betas_with_which_rounded_moments_never_decay_are_refused(tmp_path: Path) -> None:
    for beta2, decays in ((0.996, True), (0.9961, False), (0.999, False)):
        found = problems(config_from(tmp_path, f'[optimizer]\nbeta2 = {beta2}\nmoments = "bfloat16"'))
        assert bool(found) != decays
        assert not found or found[0].startswith("optimizer.beta2: expected at most 0.996094 with optimizer.moments")
        moment = torch.ones((), dtype=torch.bfloat16)
        assert ((moment.float() * beta2).bfloat16() < moment) or not decays
    assert problems(config_from(tmp_path, "[optimizer]\nbeta2 = 0.999")) == []


def test_fp8_halves_an_engines_linear_weights() -> None:
    config = on_gpus(load(find(EIGHT)), LLAMA_8B, 0)
    fp8 = replace(config, generator=replace(config.generator, quantization="fp8"))
    linear = LLAMA_8B.parameters - 2 * LLAMA_8B.vocab_size * LLAMA_8B.dim  # and norms, which are few
    saved = engine_weights(config, LLAMA_8B).nbytes - engine_weights(fp8, LLAMA_8B).nbytes
    assert linear * 0.99 < saved < linear
    assert "fp8 codes" in engine_weights(fp8, LLAMA_8B).formula


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_a_row_of_32k_tokens_takes_half_of_each_of_two_ranks(mode: str) -> None:
    """Keys and values of whole rows stay on each rank; the weights are cut as by FSDP2."""
    flags = [("training.seq_len", "32768"), ("training.local_batch_size", "1"), ("activation_checkpoint.mode", mode)]
    degrees = {"data_parallel_shard_degree": (8, 4), "context_parallel_degree": (1, 2)}

    def parts(at: int) -> dict[str, int]:
        layout = [(f"parallelism.{key}", str(degree[at])) for key, degree in degrees.items()]
        need = needs(on_gpus(load(find(EIGHT), [*flags, *layout]), LLAMA_8B, 0), LLAMA_8B, 79 * GIB)["trainer"]
        return {name: part.nbytes for name, part in need.own.parts.items()}

    whole, half = parts(0), parts(1)
    assert 0.5 <= half["activations"] / whole["activations"] < (0.53 if mode == "none" else 0.51)
    assert 0.5 <= half["head"] / whole["head"] < 0.55
    per_row = {"activations", "head"}
    assert {k: v for k, v in half.items() if k not in per_row} == {k: v for k, v in whole.items() if k not in per_row}


def test_some_models_are_too_large_for_a_node_to_train_whole() -> None:
    trainer, engine = refused(load(find(EIGHT)), LLAMA_70B, 79)
    assert re.search(r"; training.enable_cpu_offload = true needs [\d.]+ GiB \(.*\) or lora.rank = 16 needs", trainer)
    assert engine.endswith("generator.tensor_parallel_degree = 4, generator.replicas = 1 needs 71.1 GiB"), engine


def test_colocated_meshes_take_turns_on_a_gpu() -> None:
    """The engine samples next to the trainer's weights and optimizer; its KV cache is freed while the trainer works."""
    config = load(find(ONE), [("generator.kv_cache_memory_mb", "3072")])
    apart = replace(config, placement=replace(config.placement, kind="disaggregated"))
    together, alone = (needs(on_gpus(c, QWEN_600M, 0), QWEN_600M, 15 * GIB) for c in (config, apart))
    kept = 12 * QWEN_600M.parameters
    assert together["generator"].nbytes - alone["generator"].nbytes > kept
    allowed = config.memory
    asleep = allowed.cuda_context_mb + allowed.cuda_graphs_mb << 20
    assert together["trainer"].nbytes - alone["trainer"].nbytes == asleep


def estimated(name: str, shape: ModelShape, **allowances: float) -> dict[str, Need]:
    keys = [("generator.kv_cache_memory_mb", "3072"), *((f"memory.{key}", str(v)) for key, v in allowances.items())]
    return needs(on_gpus(load(find(name), keys), shape, 0), shape, 79 * GIB)


@pytest.mark.parametrize(
    ("key", "value", "trainer", "generator"),
    [
        ("cuda_context_mb", 2304, GIB, GIB),
        ("nccl_buffers_mb", 2048, GIB, 0),  # an engine of one process has no peers
        ("cuda_graphs_mb", 2048, 0, 1.08 * GIB),
        ("sleeping_engine_mb", 4096, 0, 0),
    ],
)
def test_a_measured_allowance_changes_the_estimate(key: str, value: int, trainer: float, generator: float) -> None:
    before, after = estimated(EIGHT, LLAMA_8B), estimated(EIGHT, LLAMA_8B, **{key: value})
    assert after["trainer"].nbytes - before["trainer"].nbytes == pytest.approx(trainer, abs=2)
    assert after["generator"].nbytes - before["generator"].nbytes == pytest.approx(generator, abs=2)


def test_the_plan_shows_the_allowances_in_force() -> None:
    overhead = estimated(EIGHT, LLAMA_8B, fragmentation=0.2, cuda_context_mb=600)["trainer"].own.overhead
    assert overhead.formula == "[memory] cuda_context_mb 600 + nccl_buffers_mb 1024 + fragmentation 0.2"
    beside = estimated("grpo_llama3_8b_colocated", LLAMA_8B, sleeping_engine_mb=4096)["trainer"].others
    assert beside == {"sleeping engine": 4 * GIB}


def test_what_a_sleeping_engine_leaves_is_compared_with_the_estimates() -> None:
    config = on_gpus(load(find(ONE), [("generator.kv_cache_memory_mb", "3072")]), QWEN_600M, 15 * GIB)
    enough = beside_engine(config, QWEN_600M, 16 * GIB - (2350 << 20), 16 * GIB)
    assert re.match(r"a sleeping engine leaves 13\.7 of 16\.0 GiB of its GPU \(estimated 13\.8\) for a trainer", enough)
    assert "lower" not in enough
    assert "memory." not in enough
    scarce = beside_engine(config, QWEN_600M, 9 * GIB, 16 * GIB)
    assert "set memory.sleeping_engine_mb = 7168; lower training.local_batch_size" in scarce


def gib_metrics(reserved: float, outside: float) -> dict[str, float]:
    return {"memory/max_reserved_gib": reserved, "memory/outside_gib": outside}


@pytest.mark.parametrize(
    ("name", "key", "was"), [(EIGHT, "nccl_buffers_mb", 1024), (ONE, "sleeping_engine_mb", 1280 + 1024)]
)
def test_a_trainers_memory_names_the_allowances_that_differ(name: str, key: str, was: int) -> None:
    shape = QWEN_600M if name == ONE else LLAMA_8B
    config = on_gpus(load(find(name), [("generator.kv_cache_memory_mb", "3072")]), shape, 0)
    need = needs(config, shape, 0)["trainer"]
    beside = need.own.outside + sum(need.others.values())
    by_allocator, outside = (need.own.total - need.own.outside) / GIB, beside / GIB
    equal = measured_trainer(config, shape, gib_metrics(by_allocator, outside))
    assert f"(estimated {need.nbytes / GIB:.1f})" in equal
    assert "set" not in equal
    fewer = measured_trainer(config, shape, gib_metrics(by_allocator / 2, outside))
    assert "set" not in fewer  # the parts are upper bounds
    less = measured_trainer(config, shape, gib_metrics(by_allocator, outside - 1))
    assert less.endswith(f"; set memory.{key} = {was - 1024}")
    more = measured_trainer(config, shape, gib_metrics(by_allocator * 1.2, outside + 1))
    settings = dict(re.findall(r"(memory\.\w+) = ([\d.]+)", more))
    assert settings["memory.fragmentation"] == f"{1.2 * 1.08 - 1:.2f}"
    assert settings[f"memory.{key}"] == str(was + 1024)
    again = load(find(name), [("generator.kv_cache_memory_mb", "3072"), *settings.items()])
    mended = measured_trainer(on_gpus(again, shape, 0), shape, gib_metrics(by_allocator * 1.2, outside + 1))
    assert "set" not in mended


def test_a_cache_without_a_size_takes_what_is_left_but_holds_the_longest_sequence() -> None:
    config = load(find(EIGHT))
    found = needs(on_gpus(config, LLAMA_8B, 0), LLAMA_8B, 79 * GIB)["generator"]
    assert found.fits
    assert 0.99 * found.limit < found.nbytes <= found.limit <= 0.9 * 79 * GIB
    long = replace(config, generator=replace(config.generator, max_model_len=2**20))
    assert cache_bytes_per_token(on_gpus(long, LLAMA_8B, 0), LLAMA_8B) == 2**17
    assert not needs(on_gpus(long, LLAMA_8B, 0), LLAMA_8B, 79 * GIB)["generator"].fits


def test_gradients_stay_whole_where_they_fit() -> None:
    keys = [("activation_checkpoint.mode", "none"), ("training.parameter_gather", "microbatch")]
    config = load(find(EIGHT), keys)
    assert on_gpus(config, LLAMA_8B, 79 * GIB).training.gradient_sync == "microbatch"
    assert on_gpus(config, LLAMA_8B, 141 * GIB).training.gradient_sync == "update"
    assert on_gpus(config, LLAMA_8B, 0).training.gradient_sync == "microbatch"  # unknown size


@pytest.mark.parametrize(
    ("name", "shape", "gib", "expected"),
    [
        (EIGHT, LLAMA_8B, 48, "microbatch"),
        (EIGHT, LLAMA_8B, 141, "update"),
        (EIGHT, LLAMA_8B, 0, "microbatch"),  # unknown size
        (ONE, QWEN_600M, 79, "update"),
    ],
)
def test_gathered_parameters_are_kept_where_they_fit(name: str, shape: ModelShape, gib: int, expected: str) -> None:
    config = load(find(name))
    found = on_gpus(config, shape, gib * GIB)
    assert found.training.parameter_gather == expected
    other: Any = replace(found, training=replace(found.training, parameter_gather="microbatch"))
    kept, blocks = (needs(each, shape, gib * GIB)["trainer"] for each in (found, other))
    if expected == "update":
        assert kept.own.parts["gathered weights"].nbytes == 2 * by_formula(shape, config.parallelism).whole
        assert kept.fits
    if name == ONE:  # without FSDP2 no second set of gradients
        assert (
            kept.own.parts["gradients before reduction"].nbytes < blocks.own.parts["gradients before reduction"].nbytes
        )
        assert kept.nbytes < blocks.nbytes


@pytest.mark.parametrize(
    ("flags", "copied"),
    [
        ([], 596),
        ([("training.mixed_precision_param", "float32")], 0),
        ([("lora.rank", "8")], 5),
        ([("lora.rank", "8"), ("lora.base_dtype", "float32")], 601),
        ([("lora.rank", "8"), ("training.mixed_precision_param", "float32")], 0),
    ],
)
def test_one_rank_copies_parameters_of_another_dtype_only(flags: list[tuple[str, str]], copied: int) -> None:
    """Millions of parameters."""
    config = on_gpus(load(find(ONE), flags), QWEN_600M, 141 * GIB)
    part = needs(config, QWEN_600M, 141 * GIB)["trainer"].own.parts["gathered weights"]
    assert part.nbytes / 2e6 == pytest.approx(copied, abs=1)


def test_every_model_of_a_run_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "ppo.toml"
    file.write_text(
        f'base = "{EIGHT}"\n[algorithm]\nname = "ppo"\nkl_coef = 0.1\n[critic]\nlr = 1e-6\n[reference]\nmesh = "own"'
    )
    found = refused(load(file), LLAMA_8B, 79, 16)
    assert [problem.split("]")[0] for problem in found] == ["[critic"]  # on one GPU
    assert found[0].endswith("critic.data_parallel_shard_degree = 2 needs 76.9 GiB") or "critic." in found[0]
