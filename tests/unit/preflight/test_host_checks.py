from dataclasses import replace
from pathlib import Path

import pytest

from support.checked_configs import config
from support.nvidia_smi import driver_of_slices, two_gpus
from titan_rl.preflight.checks import host_problems, judged, machine, problems
from titan_rl.preflight.checks.machine import CPU_HEAD_DIMS
from titan_rl.preflight.load import load
from titan_rl.wire.gpus import Gpus, found_gpus, visible_gpus


def test_colocated_meshes_share_gpus(tmp_path: Path) -> None:
    toml = "[parallelism]\ndata_parallel_shard_degree = 2\n"
    (problem,) = problems(config(tmp_path, toml), gpus=Gpus(2))
    assert "hosts.slots" in problem
    toml += '[placement]\nkind = "colocated"\n'
    (problem,) = problems(config(tmp_path, toml), gpus=Gpus(2))
    assert problem.startswith("generator.kv_cache_memory_mb: expected a size, because ")
    toml += "[generator]\nkv_cache_memory_mb = 256"
    assert problems(config(tmp_path, toml), gpus=Gpus(2)) == []
    (problem,) = problems(config(tmp_path, toml), gpus=Gpus(1))
    assert "2 GPUs (2 of the trainer, 1 of the generators; trainer and generators share GPUs)" in problem
    (problem,) = problems(config(tmp_path, f'{toml}\n[weight_sync]\ntransport = "broadcast"'), gpus=Gpus(2))
    assert problem.startswith(
        'weight_sync.transport: expected "auto" or another value with placement.kind = "colocated"'
    )


@pytest.mark.parametrize(
    ("toml", "most", "images"), [("", 40, ""), ('vision = "frozen"', 20, ", 20 of which read images")]
)
def test_an_environment_process_that_reads_images_takes_more(
    toml: str, most: int, images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: 40 * machine.PROCESS_BYTES)
    monkeypatch.setattr(machine, "IMAGES_BYTES", machine.PROCESS_BYTES)
    of = config(tmp_path, f'[model]\n{toml}\n[environment]\nname = "hunt"\nprocesses = 20\n[hosts]\nslots = 99')
    found = machine._check_capacity(of, None, 1, most + 1)
    expected = f"hosts.slots: expected at most {most} processes in this host's 10 GiB, found {most + 1}{images}"
    assert list(found) == [expected]
    assert not list(machine._check_capacity(of, None, 1, most))


def test_gpus_are_slots(tmp_path: Path) -> None:
    two = config(tmp_path, "[parallelism]\ndata_parallel_shard_degree = 2")
    assert problems(two, gpus=Gpus(3)) == []
    (problem,) = host_problems(two, gpus=Gpus(2))
    assert "room for 3 processes (2 of the trainer, 1 of the generators), found 2" in problem
    (problem,) = host_problems(replace(two, hosts=replace(two.hosts, slots=8)), gpus=Gpus(2))
    assert problem.startswith("hosts.slots: expected a GPU for each of 3 processes")
    on_cpu = replace(two, hosts=replace(two.hosts, device="cpu"))
    assert problems(on_cpu, gpus=Gpus(2)) == []


def test_float32_attention_is_not_compiled_on_a_gpu(tmp_path: Path) -> None:
    toml = "[compile]\nenable = {}\n[training]\nmixed_precision_param = {}\n"
    (problem,) = host_problems(config(tmp_path, toml.format("true", '"float32"')), gpus=Gpus(2))
    assert problem == (
        'compile.enable: expected false or "auto" with training.mixed_precision_param = "float32", '
        "whose attention cannot be compiled, found true"
    )
    for enable, compute in (("true", '"bfloat16"'), ('"auto"', '"float32"'), ("false", '"float32"')):
        assert host_problems(config(tmp_path, toml.format(enable, compute)), gpus=Gpus(2)) == []


def test_head_dims_are_those_of_the_cpu_kernels() -> None:
    """vLLM's own tensors, no model: the kernels refuse a size by name."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is built for a GPU")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

    def runs(size: int) -> bool:
        key, cache = torch.zeros(1, 1, size), torch.zeros(1, 1, 32, size)
        slot = torch.zeros(1, dtype=torch.int64)
        try:
            ops.cpu_attn_reshape_and_cache(key, key, cache, cache.clone(), slot, _get_attn_isa(key.dtype, 32, size))
        except RuntimeError as error:
            if "Unsupported CPU attention configuration" not in str(error):
                raise
            return False
        return True

    supported = CPUAttentionBackend.get_supported_head_sizes()  # without 48, which only the kernels take
    assert tuple(size for size in range(8, 520, 8) if runs(size) and size in supported) == CPU_HEAD_DIMS


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 2), ("", 0), ("-1", 0), ("0", 1), ("1, 0", 2), ("0,7,1", 1), ("GPU-1a2b", 1), ("x", 0)],
)
def test_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int) -> None:
    two_gpus(tmp_path, monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == expected


@pytest.mark.parametrize(
    ("visible", "count", "mib"),
    [(None, 2, 15360), ("0", 1, 81559), ("GPU-2", 1, 15360), ("MIG-1", 1, 0), ("0,GPU-x", 2, 0), ("", 0, 0)],
)
def test_the_smallest_gpu_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, mib: int
) -> None:
    two_gpus(tmp_path, monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = found_gpus()
    assert (gpus.count, gpus.nbytes) == (count, mib << 20)
    assert (gpus.driver, gpus.cuda) == (("580.65.06", "13.0") if count else ("", ""))


def test_a_slice_has_the_memory_that_the_driver_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(tmp_path, monkeypatch)
    driver_of_slices(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert found_gpus().nbytes == 20 * 2**30
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert found_gpus().nbytes == 81559 << 20


def test_gpus_of_unknown_memory_are_refused_by_the_key_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    run = load(["--config", "grpo_llama", "--dry-run"])
    (refused,) = (each for each in judged(run)[0] if each.startswith("hosts.gpu_memory_gb"))
    assert refused.startswith("hosts.gpu_memory_gb: expected the memory of one GPU in GiB, because neither nvidia-smi")
    run = load(["--config", "grpo_llama", "--dry-run", "--hosts.gpu_memory_gb", "20"])
    assert (run.gpus.nbytes, run.gpus.here, run.problems) == (20 * 2**30, True, ())
    assert load(["--config", "grpo_llama", "--dry-run", "--hosts.device", "cpu"]).problems == ()


@pytest.mark.parametrize(
    ("torch", "cuda", "expected"),
    [
        ("", "13.0", "expected a CUDA build of torch for this host's 2 GPUs, found a CPU build"),
        ("13.0", "12.4", "found 580.65.06, which runs CUDA up to 12.4"),
        ("13.0", "13.0", ""),
        ("13.2", "13.0", ""),  # NVIDIA: minor versions are compatible
        ("12.8", "13.0", ""),
    ],
)
def test_a_run_on_gpus_needs_a_torch_and_a_driver_that_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, cuda: str, expected: str
) -> None:
    two_gpus(tmp_path, monkeypatch, cuda)
    monkeypatch.setattr(machine, "torch_cuda", lambda: torch)
    found = host_problems(config(tmp_path, ""), gpus=found_gpus())
    assert len(found) == bool(expected)
    assert all(expected in problem for problem in found)
    assert host_problems(config(tmp_path, '[hosts]\ndevice = "cpu"'), gpus=found_gpus()) == []


def test_vllm_for_gpus_samples_on_no_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed_vllm", lambda: {"vllm"})
    (found,) = host_problems(config(tmp_path, '[hosts]\ndevice = "cpu"'), gpus=Gpus(1))
    assert "expected a GPU, because vLLM's CUDA build is installed" in found
    assert host_problems(config(tmp_path, '[algorithm]\nname = "sft"\n[eval]\nsize = 0'), gpus=Gpus()) == []
    assert host_problems(config(tmp_path, ""), gpus=Gpus(2)) == []


def test_an_install_without_an_extra_cannot_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed_vllm", set)
    expected = "installed packages: expected vLLM, which samples, found none: pip install 'titan-rl[{}]'"
    assert host_problems(config(tmp_path, ""), gpus=Gpus()) == [expected.format("cpu")]
    assert host_problems(config(tmp_path, ""), gpus=Gpus(2)) == [expected.format("cuda")]
    assert host_problems(config(tmp_path, '[algorithm]\nname = "sft"\n[eval]\nsize = 0'), gpus=Gpus()) == []
    assert host_problems(config(tmp_path, '[hosts]\nkind = "processes"\ncount = 3'), gpus=Gpus()) == []


def test_media_packages_for_cuda_next_to_torchs_cpu_build_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cuda_media", lambda: ("torchvision", "torchcodec"))
    (found,) = host_problems(config(tmp_path, '[hosts]\ndevice = "cpu"'), gpus=Gpus())
    assert "found torchvision torchcodec, which vLLM and transformers fail to import" in found
    assert found.endswith("pip uninstall -y torchvision torchcodec")
