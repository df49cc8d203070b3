"""A run is warned about a KV cache with too little room for the sequences of its batch, or refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from support.checked_configs import config
from support.shapes import QWEN_600M
from titan_rl.config.auto import on_device
from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load
from titan_rl.preflight.checks import problems, warnings
from titan_rl.preflight.checks.machine import cache_warning, check_cache_room, check_gpu_memory
from titan_rl.preflight.memory import GIB, cache_room, on_gpus

ROOT = Path(__file__).parents[3]


@pytest.fixture
def of_readme(tmp_path: Path) -> Config:
    """The config for own data that README.md shows."""
    (block,) = [
        text for text in (ROOT / "README.md").read_text().split("```") if text.startswith("toml\n# my_run.toml")
    ]
    return config(tmp_path, block.removeprefix("toml\n"))


@pytest.mark.parametrize(
    ("gib", "kind", "rows"),
    [(79, "disaggregated", 26), (79, "colocated", 25), (24, "disaggregated", 3), (24, "colocated", 3)],
)
def test_the_config_of_the_readme_is_a_good_one_on_a_gpu(
    of_readme: Config, tmp_path: Path, gib: int, kind: str, rows: int
) -> None:
    (tmp_path / "base.toml").write_text((tmp_path / "run.toml").read_text())
    given = config(tmp_path, f'base = "base.toml"\n[placement]\nkind = "{kind}"\n[hosts]\ngpu_memory_gb = {gib}')
    nbytes = int(given.hosts.gpu_memory_gb) * GIB
    found = on_gpus(given, QWEN_600M, nbytes)
    assert (found.training.dtype, found.training.mixed_precision_param) == ("float32", "bfloat16")
    assert (found.generator.dtype, found.generator.enforce_eager) == ("bfloat16", False)
    assert found.compile.enable is True
    assert found.generator.max_num_batched_tokens >= 8192
    assert found.training.local_batch_size == rows
    room = cache_room(on_device(given, "cuda"), QWEN_600M, nbytes)
    assert room is not None
    assert room.longest == 1024
    assert room.whole >= 16
    assert (found.generator.kv_cache_memory_mb > 0) == (kind == "colocated")
    assert list(check_gpu_memory(given, QWEN_600M, nbytes, most=2)) == []


def test_a_planned_cache_leaves_a_waiting_trainer_its_memory() -> None:
    given = load(find("grpo_qwen3_0_6b_1gpu"))
    sizes = [on_gpus(given, QWEN_600M, gib * GIB).generator.kv_cache_memory_mb for gib in (16, 24, 79)]
    assert sizes == sorted(set(sizes))
    found = on_gpus(given, QWEN_600M, 24 * GIB)
    assert on_gpus(found, QWEN_600M, 24 * GIB) == found


def test_too_small_a_cache_is_refused_with_the_size_that_would_do(tmp_path: Path) -> None:
    toml = "[training]\nseq_len = 256\n[generator]\nkv_cache_memory_mb = {}"
    (problem,) = problems(config(tmp_path, toml.format(1)))
    assert problem == (
        "generator.kv_cache_memory_mb: expected at least 3, the KV cache of 4 sequences of 256 tokens, found 1"
    )
    small = config(tmp_path, toml.format(3))
    assert problems(small) == []
    (warning,) = warnings(small)
    assert "holds 5 sequences of 256 tokens, of the 256 that an engine samples at once" in warning
    enough = warning.rpartition("generator.kv_cache_memory_mb = ")[2].split()[0]
    assert warnings(config(tmp_path, toml.format(enough))) == []
    assert warnings(config(tmp_path, toml.format(int(enough) - 1))) != []


def test_one_sequence_is_enough_where_one_is_sampled_at_a_time(tmp_path: Path) -> None:
    toml = "[training]\nseq_len = 256\n[generator]\nmax_num_seqs = 1\nkv_cache_memory_mb = 1"
    assert problems(config(tmp_path, toml)) == warnings(config(tmp_path, toml)) == []


def test_a_gpu_without_room_for_four_sequences_is_refused_with_the_length_that_fits(of_readme: Config) -> None:
    own_gpu = replace(of_readme, placement=replace(of_readme.placement, kind="disaggregated"))
    long = replace(own_gpu, training=replace(own_gpu.training, seq_len=2**15, local_batch_size=1))
    (problem,) = check_cache_room(on_device(long, "cuda"), QWEN_600M, 12 * GIB)
    key, _, length = problem.partition(": expected at most ")
    assert key == "generator.max_model_len"
    assert "of which the KV cache of" in problem
    mended = replace(long, generator=replace(long.generator, max_model_len=int(length.split(",")[0])))
    assert list(check_cache_room(on_device(mended, "cuda"), QWEN_600M, 12 * GIB)) == []
    assert len(list(cache_warning(on_device(mended, "cuda"), QWEN_600M, 12 * GIB))) == 1
