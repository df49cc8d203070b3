"""The `cuda` extra installs, imports and decides what the GPU presets need, on a machine without a GPU; engines sample,
sleep and take weights on vLLM's CUDA build with CPU tensors (support/cuda_on_cpu.py). Minutes and ten gigabytes: slow.
CUDA_PYTHON=/path/to/python names an install that exists, to be used instead."""

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from support.loaded_weights import models, write_models
from support.nvidia_smi import two_gpus
from support.shapes import LLAMA_8B, QWEN_30B_A3B, QWEN_600M
from titan_rl.config.auto import BATCHED_TOKENS

ROOT = Path(__file__).parents[2]
# First the one with experts: vLLM makes their group of ranks only where it knows of any.
PRESETS = {"grpo_qwen3_30b_a3b": QWEN_30B_A3B, "grpo_llama3_8b": LLAMA_8B, "grpo_qwen3_0_6b_1gpu": QWEN_600M}
DRIVER = """
cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetErrorString cuGetProcAddress_v2
cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease cuMemSetAccess
cuMemUnmap cuPointerGetAttribute cuTensorMapEncodeTiled
"""  # that vLLM's libraries link to

SECONDS = 900.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Python of a copy of this checkout, which its own script installs for CUDA."""
    if installed := os.environ.get("CUDA_PYTHON"):
        yield Path(installed)
        return
    folder = tmp_path_factory.mktemp("cuda") / "titan_rl"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().strip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (folder / name).symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            (folder / name).write_bytes((ROOT / name).read_bytes())
            (folder / name).chmod((ROOT / name).stat().st_mode)
    command = ["./scripts/run", "--extra", "cuda", "--config", "sft_llama", "--eval.size", "0", "--dry-run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder / ".venv/bin/python"
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def run(python: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'scripts'}", **environment}
    return subprocess.run([python, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a driver that only has the right names."""
    folder = tmp_path_factory.mktemp("driver")
    stub = folder / "driver.c"
    stub.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER.split()))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", stub], check=True)
    return {"LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "1"}


def on_cpu(python: Path, driver: dict[str, str], function: str, *arguments: object) -> str:
    """Return the output of a function of tests/support that runs on vLLM's CUDA build with CPU tensors."""
    module, _, name = function.rpartition(".")
    done = run(python, "-m", "support.cuda_on_cpu", f"support.{module}", name, *map(str, arguments), **driver)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def test_what_is_installed_is_the_cuda_stack(python: Path) -> None:
    program = """
import importlib, json
from importlib.metadata import version
for name in ("torchtitan", "monarch", "torchvision", "torchaudio", "torchcodec", "transformers", "flashinfer"):
    importlib.import_module(name)
import torch
on_cuda = [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA") for name in (
    "_flash_attention_forward", "_flash_attention_backward", "_fused_adamw_", "_fused_rms_norm", "addmm.dtype")]
print(json.dumps([version("torch"), torch.version.cuda, version("triton"), version("vllm"), on_cuda]))
"""
    done = run(python, "-c", program)
    assert done.returncode == 0, done.stderr
    torch, cuda, triton, vllm, on_cuda = json.loads(done.stdout.splitlines()[-1])
    assert (torch.partition("+")[0], cuda[:2], triton, vllm) == ("2.13.0", "13", "3.7.1", "0.32.0")
    assert "cpu" not in torch
    assert all(on_cuda)


def test_a_run_that_finds_no_gpu_after_all_ends_by_name(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus(tmp_path, monkeypatch)
    dump = tmp_path / "run"
    flags = ["--config", "sft_llama", "--eval.size=0", f"--job.dump_folder={dump}"]
    done = run(python, "-m", "titan_rl.run", *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "expected a GPU, because the run was planned for CUDA, found none that torch can use" in done.stderr
    assert not (dump / "metrics.jsonl").exists() or not (dump / "metrics.jsonl").read_text()


def test_vllm_takes_the_presets(python: Path, driver: dict[str, str], tmp_path: Path) -> None:
    arguments = []
    for name, shape in PRESETS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
        arguments += [name, tmp_path / name]
    output = on_cpu(python, driver, "cuda_platform.print_facts", *arguments)
    decided = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    for facts, (name, shape) in zip(decided, PRESETS.items(), strict=True):
        assert facts.pop("parameters") == shape.parameters
        assert facts == {
            "v2": True,
            "attention": "FLASH_ATTN",
            "graphs": "FULL_AND_PIECEWISE",
            "batch": BATCHED_TOKENS,
            "moe": "triton",
            "memory": 0.9,
            "sleep": ["1gpu" in name, "cumem"],
            "async": True,
            "logprobs": "processed_logprobs",
            "contiguous": True,
            "dtypes": ["torch.bfloat16"],
        }


@pytest.mark.parametrize("tp", [1, 2])
def test_the_plan_equals_what_vllm_loads_for_a_gpu(
    tp: int, python: Path, driver: dict[str, str], tmp_path: Path
) -> None:
    write_models(str(tmp_path), tp)
    with ThreadPoolExecutor() as ranks:
        compare = partial(on_cpu, python, driver, "loaded_weights.compare_with_vllm", tmp_path, tp)
        assert all(f"{len(models(tp))} models equal" in output for output in ranks.map(compare, range(tp)))


@pytest.mark.parametrize(
    ("scheduling", "scheduler"),
    [("synchronous", "scheduler.Scheduler"), ("asynchronous", "async_scheduler.AsyncScheduler")],
)
def test_an_engine_samples_sleeps_and_takes_weights(
    scheduling: str, scheduler: str, python: Path, driver: dict[str, str], tmp_path: Path
) -> None:
    output = on_cpu(python, driver, "cuda_engine.main", tmp_path, scheduling)
    assert json.loads(output.splitlines()[-1]) == {
        "classes": [
            f"vllm.v1.core.sched.{scheduler}",
            "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            "vllm.v1.worker.gpu_worker.Worker",
            "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
            "vllm.v1.worker.gpu.states.RequestState",
            "vllm.v1.worker.gpu.sample.sampler.Sampler",
            "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend",
        ],
        "backed_up": ["runtime"],
        "discarded": ["kv_cache", "weights"],
    }


def test_an_engine_returns_the_routes_of_every_token(python: Path, driver: dict[str, str], tmp_path: Path) -> None:
    output = on_cpu(python, driver, "cuda_routes.main", tmp_path)
    assert output.splitlines()[-4:] == [
        "a group whose prompt is cached",
        "withdrawn and resumed samples",
        "samples over a weight update",
        "preempted samples",
    ]
