"""Hostile command lines, files, data sets, rewards and model folders: each is refused with exit code 2 by a line that
names the key or the file. Odd but usable ones are accepted."""

import importlib
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import hostile_files, hostile_keys
from support.checked_configs import edit
from support.folders import write_hf
from titan_rl.config.sections import EnvironmentSection, ModelSection
from titan_rl.preflight import probe
from titan_rl.preflight.checks import checked_run
from titan_rl.preflight.plan import prepare
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.run_names import FOLDERS
from titan_rl.wire.types import Prompt

JSONL = "--task.name jsonl --eval.size 0 --training.seq_len 256"


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own folder, a small run in it, and what its dump folder must not be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "small.toml").write_text('[hosts]\ndevice = "cpu"\n')
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "no_such")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "checkpoint").touch()
    (tmp_path / "swapped" / "metrics.jsonl").mkdir(parents=True)
    return tmp_path


def check(*argv: str) -> None:
    invocation = checked_run(["--config", "small.toml", "--dry-run", *argv])
    prepare(invocation.config_name, invocation.config, device="cpu", scratch=Path("scratch"))


@pytest.fixture
def refused(world: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    def refused(message: str, *argv: str) -> None:
        before = sorted(world.rglob("*"))
        with pytest.raises(SystemExit) as stop:
            check(*argv)
        out, err = capsys.readouterr()
        assert (stop.value.code, out) == (2, "")
        assert message in err
        assert "Traceback" not in err
        assert "input that can be checked" not in err, "no check foresaw it"
        begins = ("titan_rl: ", "  ", "shipped configs:", "variants of them ", "planned, ")
        assert all(line.startswith(begins) for line in err.splitlines())
        assert sorted(path for path in world.rglob("*") if "__pycache__" not in path.parts) == before

    return refused


@pytest.mark.parametrize(("flags", "message"), hostile_keys.FLAGS)
def test_a_flag(refused: Any, world: Path, flags: str, message: str) -> None:
    refused(message, *shlex.split(flags.replace("{world}", str(world))))


@pytest.mark.parametrize(("text", "message"), hostile_keys.TOMLS)
def test_a_config_file(refused: Any, world: Path, text: str | bytes, message: str) -> None:
    (world / "small.toml").unlink()
    (world / "small.toml").symlink_to("run.toml")
    (world / "run.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(message.replace("run.toml", "small.toml"))


@pytest.mark.parametrize(("rows", "flags", "message"), hostile_files.ROWS)
def test_a_data_set(refused: Any, world: Path, rows: bytes, flags: str, message: str) -> None:
    (world / "train.jsonl").write_bytes(rows)
    refused(message, *shlex.split(f"{JSONL} --task.path train.jsonl {flags}"))


def problem_of(world: Path, source: str) -> str:
    """Probe a reward in this process, as the child does: a process each takes 0.4 s."""
    (world / "judge.py").write_text(source)
    sys.modules.pop("judge", None)
    importlib.invalidate_caches()
    prompt = Prompt(0, "00+00=", [], "000", {"a": 0, "b": 0})
    question = probe.Question("task.reward", "judge:f", prompt, None, EnvironmentSection())
    return probe.problem_of(question, lambda stage, within: None)


@pytest.mark.parametrize(("source", "message"), hostile_files.REWARDS)
def test_a_reward(world: Path, source: str, message: str) -> None:
    message = message.replace("{file}", str(world / "judge.py"))
    assert message in problem_of(world, source)


@pytest.mark.parametrize(("source", "message"), [hostile_files.REWARDS[0], *hostile_files.FATAL_REWARDS])
def test_a_reward_in_its_process(
    refused: Any, world: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    if "within 2 s" in message:
        monkeypatch.setattr(probe, "PROBE_SECONDS", 2)
    (world / "judge.py").write_text(source)
    refused(message, "--task.reward=judge:f")


def test_a_reward_leaves_no_process(world: Path) -> None:
    forked = "import os, time\nif os.fork() == 0:\n  os.setsid()\n"
    forked += f"  open({str(world / 'pid')!r}, 'w').write(str(os.getpid()))\n  time.sleep(100)\n"
    wait = f"while not os.path.exists({str(world / 'pid')!r}): time.sleep(0.01)\n"
    (world / "judge.py").write_text(f"{forked}{wait}def f(completion): return 1.0")
    check("--task.reward=judge:f")
    assert not Path("/proc", (world / "pid").read_text()).exists()


def test_no_folder_that_a_run_writes_is_its_input(refused: Any, world: Path) -> None:
    """The first better evaluation would remove the weights that it began with from best/."""
    for name in FOLDERS:
        (world / "run" / name / "step-20").mkdir(parents=True, exist_ok=True)
        refused("because a run writes there", f"--model.hf_assets_path=run/{name}/step-20", "--job.dump_folder=run")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--task.path data --job.dump_folder data", 'task.path = "data", because a run writes there'),
        ("--task.path run/rollouts.jsonl --job.dump_folder run", "because a run writes there"),
        ("--task.path run/mine.jsonl --job.dump_folder run --job.fresh", "which job.fresh moves away"),
        (
            "--task.path data --job.dump_folder run --job.fresh --eval.sets '{a = {path = \"run/mine.jsonl\"}}'",
            'without eval.sets.a.path = "run/mine.jsonl", which job.fresh moves away',
        ),
        ("--task.path data --job.dump_folder run/hf --model.hf_assets_path run/hf", "because a run writes there"),
        ("--task.path data --job.dump_folder run --model.hf_assets_path run/hf", "because a run writes there"),
    ],
)
def test_a_dump_folder_with_what_the_run_reads(refused: Any, world: Path, flags: str, message: str) -> None:
    write_hf(world / "run" / "hf", shape_of(ModelSection()))
    for path in (world / "data" / "a.jsonl", world / "run" / "rollouts.jsonl", world / "run" / "mine.jsonl"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(hostile_files.lines(hostile_files.GOOD))
    refused(message, *shlex.split(f"{JSONL} {flags}"))


@pytest.mark.parametrize("name", hostile_files.NAMES)
def test_the_name_of_a_reward(refused: Any, name: str) -> None:
    refused("task.reward", f"--task.reward={name}")


@pytest.mark.parametrize(("broken", "message"), hostile_files.MODELS)
def test_a_model_folder(refused: Any, world: Path, broken: Callable[[Path], Any], message: str) -> None:
    broken(write_hf(world / "assets", shape_of(ModelSection())))
    refused(message, "--model.hf_assets_path=assets")


@pytest.mark.parametrize("flags", hostile_keys.ODD_FLAGS)
def test_an_odd_but_good_flag(world: Path, flags: str) -> None:
    check(*shlex.split(flags.replace("{world}", str(world))))
    assert not (world / "run").exists()


@pytest.mark.parametrize(("rows", "flags"), hostile_files.ODD_ROWS)
def test_an_odd_but_good_data_set(world: Path, rows: bytes, flags: str) -> None:
    (world / "train.jsonl").write_bytes(rows)
    check(*shlex.split(f"{JSONL} --task.path train.jsonl {flags}"))


@pytest.mark.parametrize("source", hostile_files.ODD_REWARDS)
def test_an_odd_but_good_reward(world: Path, source: str) -> None:
    assert problem_of(world, source) == ""


@pytest.mark.parametrize("source", [hostile_files.ODD_REWARDS[0], *hostile_files.ODD_PROCESSES])
def test_an_odd_but_good_reward_in_its_process(world: Path, source: str) -> None:
    (world / "judge.py").write_text(source)
    check("--task.reward=judge:f")


def test_odd_but_good_model_folders(world: Path) -> None:
    folder = write_hf(world / "größe 数", shape_of(ModelSection()))
    edit(folder / "config.json", rms_norm_eps=1e-5, torch_dtype="bfloat16", unknown={"a": [1]})
    (world / "link").symlink_to(folder)
    check("--model.hf_assets_path=link")


def test_all_bad_rows_are_named_at_once_up_to_a_bound(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "train.jsonl").write_bytes(hostile_files.lines(*[hostile_files.GOOD, b"{"] * 30))
    with pytest.raises(SystemExit):
        check(*shlex.split(f"{JSONL} --task.path train.jsonl"))
    heading, *lines = capsys.readouterr().err.splitlines()
    assert heading == "titan_rl: 21 problems in small.toml"
    assert [line.split(":")[1] for line in lines[:20]] == [str(row) for row in range(2, 42, 2)]
    assert lines[20] == "  - train.jsonl: 10 more bad rows"


def test_a_long_check_says_how_far_it_is(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("titan_rl.tasks.announced.SILENT_SECONDS", 0.0)
    (world / "train.jsonl").write_bytes(hostile_files.lines(*[hostile_files.GOOD] * 300))
    check(*shlex.split(f"{JSONL} --task.path train.jsonl"))
    err = capsys.readouterr().err
    for what in (
        "reading task.path: 300 rows",
        "checking task.path: 300 of 300",
        "measuring training rows: 300 of 300",
    ):
        assert f"titan_rl: {what}" in err
