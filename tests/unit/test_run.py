"""The program that a user starts, before it starts anything itself."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.nvidia_smi import two_gpus
from titan_rl.preflight.torch_build import torch_cuda

ROOT = Path(__file__).parents[2]
POLL = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"


def test_importing_the_command_line_imports_neither_monarch_nor_torch() -> None:
    """Monarch reads its environment as it is imported, and `run` sets that from the config: fault.detect_seconds."""
    program = (
        "import sys, titan_rl.run; print(*sorted({'monarch', 'torch', 'torchtitan', 'vllm'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert found == []


@pytest.mark.parametrize(
    ("detect_seconds", "meshes", "expected"),
    [(0.5, 2, "250ms"), (0.5, 512, "16000ms"), (0.5, 4096, "20000ms"), (60.0, 4096, "30000ms")],
)
def test_monarch_asks_many_meshes_rarely_and_few_of_them_twice_in_detect_seconds(
    detect_seconds: float, meshes: int, expected: str
) -> None:
    program = (
        "import os, sys, titan_rl.run as run; assert 'monarch' not in sys.modules; "
        f"run.prepare_environment({detect_seconds}, meshes={meshes}); "
        f"import monarch.actor; print(os.environ['{POLL}'])"
    )
    env = {name: value for name, value in os.environ.items() if name != POLL}  # conftest.py sets it for the tests
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=env).stdout
    assert out.split() == [expected]


def test_a_controller_imports_no_engine_for_a_whole_run() -> None:
    """Import every module above the ranks; an extension's modules for ranks are in its folder ranks. torch alone would
    take 1.2 CPU seconds and 160 MB.
    tests/system/test_loop.py looks at a running controller, which covers imports inside functions too."""
    paths = [path.relative_to(ROOT / "titan_rl") for path in (ROOT / "titan_rl").rglob("*.py")]
    own = [
        path
        for path in paths
        if not {*path.parts} & {"actors", "kernels", "meshes", "ranks"} and path.stem != "__main__"
    ]
    meshes = [path.relative_to(ROOT) for path in (ROOT / "meshes").glob("*.py")]
    modules = [".".join(("titan_rl", *path.with_suffix("").parts)).removesuffix(".__init__") for path in own + meshes]
    assert {"titan_rl.session", "titan_rl.train.weight_sync", "titan_rl.meshes.replica"} <= set(modules)
    program = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules}]; "
        "print(*sorted({'torch', 'torchdata', 'torchtitan', 'transformers', 'vllm', 'triton'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert found == []


def test_models_to_fetch_are_known_before_the_network_is_left() -> None:
    from titan_rl.run import MODELS, early_config

    words = [word for name in MODELS for word in (f"--{name}.hf_assets_path", "fetch:smollm2")]
    config = early_config(["--config", "grpo_llama", *words])
    assert {getattr(config, name).hf_assets_path for name in MODELS} == {"fetch:smollm2"}


def test_a_run_that_is_planned_for_gpus_never_trains_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is too old, or none that torch can use: torch finds no GPU then, without an error."""
    two_gpus(tmp_path, monkeypatch, cuda="12.4")
    command = [sys.executable, "-m", "titan_rl.run", "--config", "sft_llama", "--eval.size", "0"]
    done = subprocess.run(
        [*command, f"--job.dump_folder={tmp_path / 'run'}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert ("found 580.65.06, which runs CUDA up to 12.4" if torch_cuda() else "found a CPU build") in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def start(*argv: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *argv]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("program", ["audit", "export", "lint"])
def test_a_reader_that_has_ended_is_no_error(program: str) -> None:
    """As in `... | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = start("titan_rl", program, "--help", stdout=writing)
    os.close(writing)
    assert (ended.communicate(timeout=120)[1], ended.returncode) == ("", 0)


def test_an_audit_that_is_stopped_prints_no_traceback(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_bytes(b"no event\n" * 3_000_000)  # seconds to read
    audit = start("titan_rl.tools.audit", str(tmp_path))
    deadline = time.monotonic() + 60
    while str(ledger) not in opened_by(audit.pid):
        assert time.monotonic() < deadline
        assert audit.poll() is None
    audit.send_signal(signal.SIGTERM)  # a shell may have SIGINT ignored
    assert (audit.communicate(timeout=120)[1], audit.returncode) == ("", 130)


def opened_by(pid: int) -> set[str]:
    """Return the files that a process has open."""
    found = set[str]()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it is closed again
            found.add(os.readlink(descriptor))
    return found
