"""The report of a machine with GPUs: every part runs within its limit, also if others fail."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_visit import model_folder, visit
from gpu_visit.visit import Part, Plan, execute, longer, report, ten_minutes
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from bench.gpu.measured import device_events
from titan_rl.config.toml import find, load
from titan_rl.preflight.checks import problems
from titan_rl.wire.gpus import Gpus

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/gpu_visit/visit.py"


def part(program: str, seconds: int = 60) -> Part:
    return Part("a part", "something", [[sys.executable, "-c", program]], seconds)


def plan(folder: Path, gpus: Gpus, device: str = "cuda") -> Plan:
    return Plan(device, folder / "out", folder, sys.executable, gpus)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the part "models" makes, in the tiny shape: on the others only the sizes of a batch depend."""
    folder = tmp_path_factory.mktemp("models")
    model_folder.write_rows(folder / "rows.jsonl")
    (folder / "smollm2").mkdir()
    model_folder.write_model("tiny", folder / "smollm2")
    (folder / "qwen3-0.6b").symlink_to(folder / "smollm2")
    return folder


def test_a_part_that_fails_or_hangs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(visit, "GRACE", 0.2)
    hang = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    row = """print('{"seqs": 64, "ms": 1.5}'); print('{"seqs": 256, "ms": 2}'); print('{"cut')"""
    parts = [part(row), part("import sys; sys.exit('no such GPU')"), part(hang, 1)]
    began = time.monotonic()
    for i, one in enumerate(parts):
        execute(one, tmp_path / str(i), {}, one.seconds)
    assert time.monotonic() - began < 60
    assert [one.ended for one in parts] == ["passed", "failed with exit code 1", "stopped by its limit of 1 s"]
    assert (tmp_path / "2/output.txt").read_text().splitlines()[1:] == ["up"]
    text = report(parts, plan(tmp_path, Gpus(1, 80 << 30, driver="580.65", cuda="13.0")))
    for line in (
        *("no such GPU", "driver 580.65 for CUDA up to 13.0", "| seqs | ms |", "| 64 | 1.5 |", "| 256 | 2 |"),
        "## a part: stopped by its limit of 1 s",
    ):
        assert line in text.splitlines() or line in text


def test_the_visit_ends_in_time_and_names_parts_that_did_not_run(tmp_path: Path) -> None:
    parts = [part("import time; time.sleep(600)"), part("print('never')")]
    parts[0].name = "first"
    began = time.monotonic()
    assert visit.visit(plan(tmp_path, Gpus(0, 0), "cpu"), parts, began + 2) == 1
    assert time.monotonic() - began < 30
    assert parts[0].ended.startswith("stopped by its limit")
    assert "| a part | something | not run: no time was left |" in (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_runs_start_on_any_node(count: int, models: Path, tmp_path: Path) -> None:
    gpus = Gpus(count, 141 << 30)
    made = plan(models, gpus)
    runs = {part.name: part for part in [*ten_minutes(made), *longer(made)] if part.run}
    alone = {"race_large", "race_small", "adapter", "fp8", "killed", "one_gpu", "float32"}
    assert set(runs) == alone | ({"node", "lag"} if count > 1 else set())
    for run in runs.values():
        (command,) = run.commands
        flags = [word.removeprefix("--").split("=", 1) for word in command if word.startswith("--") and "=" in word]
        keys = dict(flags) | {"job.dump_folder": str(tmp_path / "run")}
        if keys.get("model.hf_assets_path", "").startswith("fetch:"):
            keys["model.hf_assets_path"] = str(models / "smollm2")
        name = command[command.index("--config") + 1]
        assert problems(load(find(name), list(keys.items())), gpus=gpus) == [], run.name


def test_the_script_names_what_it_needs(tmp_path: Path) -> None:
    script = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
    none = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert none.returncode == 2
    assert "expected a GPU that nvidia-smi shows, found none" in none.stderr
    other = subprocess.run([*script, "--device", "cpu", "--only", "haeds"], capture_output=True, text=True, timeout=60)
    assert other.returncode == 2
    assert "found ['haeds']" in other.stderr


def test_launches_count_what_the_device_did() -> None:
    """Not the runtime's calls, of which each kernel has one, nor names of stretches on the device's timeline."""

    def event(id: int, name: str, device: DeviceType, microseconds: int, annotation: bool = False) -> FunctionEvent:
        return FunctionEvent(
            id=id,
            name=name,
            thread=0,
            start_us=1000 * id,
            end_us=1000 * id + microseconds,
            device_type=device,
            use_device="cuda",
            is_user_annotation=annotation,
            stack=[],
        )

    events = EventList(
        [
            *(event(i, "cudaLaunchKernel", DeviceType.CPU, 5) for i in range(3)),
            *(event(3 + i, "gemm", DeviceType.CUDA, 40) for i in range(2)),
            event(5, "copy", DeviceType.CUDA, 90),
            event(6, "FSDP::all_gather", DeviceType.CUDA, 200, annotation=True),
        ],
        use_device="cuda",
    )
    events._build_tree()
    found = device_events(events.key_averages())
    assert [(each.key, each.count) for each in found] == [("copy", 1), ("gemm", 2)]
