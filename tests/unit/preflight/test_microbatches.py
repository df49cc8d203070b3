"""Microbatches sized by tokens: by the caches and the memory of a CPU, by the estimate of a GPU's memory."""

from dataclasses import replace

import pytest

from support.shapes import LLAMA_8B, QWEN_600M
from titan_rl.config.sections import Config, ModelSection, TrainingSection
from titan_rl.config.toml import find, load
from titan_rl.preflight.memory import GIB, needs, on_cpu, on_gpus
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.model_shape import ModelShape


def sized(rows: int = 0, *, seq_len: int) -> Config:
    return Config(training=TrainingSection(local_batch_size=rows, seq_len=seq_len))


def rows_on_cpu(config: Config, host_bytes: int = 16 * GIB, *, hidden_dim: int) -> int:
    shape = shape_of(ModelSection(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=hidden_dim))
    return on_cpu(config, shape, host_bytes).training.local_batch_size


def test_a_microbatch_on_a_cpu_has_the_tokens_that_were_measured_fastest() -> None:
    assert rows_on_cpu(sized(seq_len=128), hidden_dim=384) == 32
    assert rows_on_cpu(sized(seq_len=512), hidden_dim=384) == 8
    assert rows_on_cpu(sized(seq_len=512), hidden_dim=1024) == 3
    assert rows_on_cpu(sized(seq_len=2**20), hidden_dim=1024) == 1
    assert rows_on_cpu(sized(7, seq_len=128), hidden_dim=384) == 7


def test_the_memory_of_a_small_host_bounds_a_microbatch() -> None:
    config = sized(seq_len=128)
    assert 1 < rows_on_cpu(config, 256 * 2**20, hidden_dim=384) < 32
    assert rows_on_cpu(config, 1, hidden_dim=384) == 1
    sharded = replace(config, parallelism=replace(config.parallelism, data_parallel_shard_degree=4))
    assert rows_on_cpu(sharded, 256 * 2**20, hidden_dim=384) < rows_on_cpu(config, 256 * 2**20, hidden_dim=384)


def test_gathered_parameters_stay_on_a_cpu_with_the_memory_for_them() -> None:
    shape, config = shape_of(ModelSection(dim=128, n_layers=4, n_heads=4, n_kv_heads=2)), sized(seq_len=128)
    two = replace(config, parallelism=replace(config.parallelism, data_parallel_shard_degree=2))
    least = 8 * 2 * 4 * shape.parameters
    assert on_cpu(two, shape, least).training.parameter_gather == "update"
    assert on_cpu(two, shape, least - 1).training.parameter_gather == "microbatch"
    assert on_cpu(config, shape, 1).training.parameter_gather == "update"  # one rank needs no copy


@pytest.mark.parametrize("gib", [16, 24, 40, 79, 141])
@pytest.mark.parametrize(("name", "shape"), [("grpo_llama3_8b", LLAMA_8B), ("grpo_qwen3_0_6b_1gpu", QWEN_600M)])
def test_a_microbatch_on_a_gpu_is_the_largest_that_fits_by_estimate(name: str, shape: ModelShape, gib: int) -> None:
    config = load(find(name))
    config = replace(config, training=replace(config.training, local_batch_size=0))
    found = on_gpus(config, shape, gib * GIB)
    rows, most = found.training.local_batch_size, 2**15 // config.training.seq_len
    more = replace(found, training=replace(found.training, local_batch_size=rows + 1))
    if rows > 1:
        assert needs(found, shape, gib * GIB)["trainer"].fits
    if rows < most:
        assert not needs(more, shape, int(0.9 * gib * GIB))["trainer"].fits
    assert rows <= most


def test_a_microbatch_has_one_row_on_a_gpu_of_unknown_memory() -> None:
    assert on_gpus(sized(seq_len=128), QWEN_600M, 0).training.local_batch_size == 1
    assert on_gpus(sized(4, seq_len=128), QWEN_600M, 0).training.local_batch_size == 4
