"""The `cuda` extra installs, imports and decides what the GPU presets need, on a machine without a GPU. Minutes and ten
gigabytes: slow."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.nvidia_smi import two_gpus
from support.shapes import LLAMA_8B, QWEN_600M
from titan_rl.wire.model_shape import ModelShape

ROOT = Path(__file__).parents[2]
PRESETS = {"grpo_llama3_8b": LLAMA_8B, "grpo_qwen3_0_6b_1gpu": QWEN_600M}
DRIVER = """
cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetErrorString cuGetProcAddress_v2
cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease cuMemSetAccess
cuMemUnmap cuPointerGetAttribute cuTensorMapEncodeTiled
"""  # that vLLM's libraries link to

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of this checkout, which its own script installs for CUDA."""
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
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def run(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [checkout / ".venv/bin/python", *arguments]
    env = {**os.environ, "PYTHONPATH": str(checkout), **environment}
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=600)


def test_what_is_installed_is_the_cuda_stack(checkout: Path) -> None:
    program = """
import importlib, json
from importlib.metadata import version
for name in ("torchtitan", "monarch", "torchvision", "torchaudio", "torchcodec", "transformers"):
    importlib.import_module(name)
import torch
on_cuda = [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA") for name in (
    "_flash_attention_forward", "_flash_attention_backward", "_fused_adamw_", "_fused_rms_norm", "addmm.dtype")]
print(json.dumps([version("torch"), torch.version.cuda, version("triton"), version("vllm"), on_cuda]))
"""
    done = run(checkout, "-c", program)
    assert done.returncode == 0, done.stderr
    torch, cuda, triton, vllm, on_cuda = json.loads(done.stdout.splitlines()[-1])
    assert (torch.partition("+")[0], cuda[:2], triton, vllm) == ("2.13.0", "13", "3.7.1", "0.32.0")
    assert "cpu" not in torch
    assert all(on_cuda)


def test_a_run_that_finds_no_gpu_after_all_ends_by_name(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus(tmp_path, monkeypatch)
    dump = tmp_path / "run"
    flags = ["--config", "sft_llama", "--eval.size=0", f"--job.dump_folder={dump}"]
    done = run(checkout, "-m", "titan_rl.run", *flags)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "expected a GPU, because the run was planned for CUDA, found none that torch can use" in done.stderr
    assert not (dump / "metrics.jsonl").exists() or not (dump / "metrics.jsonl").read_text()


def test_vllm_takes_the_presets(checkout: Path, tmp_path: Path) -> None:
    """With a driver that only has the right names, and an NVML that answers for H100s."""
    stub = tmp_path / "driver.c"
    stub.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER.split()))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", stub], check=True)
    arguments = []
    for name, shape in PRESETS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
        arguments += [name, str(tmp_path / name)]
    program = str(checkout / "tests/support/cuda_platform.py")
    done = run(checkout, program, *arguments, LD_LIBRARY_PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for facts, shape in zip(found, PRESETS.values(), strict=True):
        check(facts, shape)


def check(facts: dict[str, object], shape: ModelShape) -> None:
    from titan_rl.preflight.memory import PREFILL_TOKENS

    assert facts["attention"] == "FLASH_ATTN"
    assert facts["graphs"] == "FULL_AND_PIECEWISE"
    assert facts["batch"] == PREFILL_TOKENS
    assert facts["parameters"] == shape.parameters
    assert facts["contiguous"]
