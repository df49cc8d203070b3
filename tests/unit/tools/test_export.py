"""What `python -m titan_rl export` refuses, before it imports an engine. tests/system/test_export.py exports."""

import subprocess
import sys
from pathlib import Path

import pytest

from titan_rl.config.sections import Config, TaskSection
from titan_rl.config.toml import to_toml
from titan_rl.tools.export import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a cold start, two whole checkpoints, and one that was not finished."""
    folder = tmp_path / "run"
    for step in ("cold_start/step-7", "step-2", "step-10"):
        (folder / "checkpoint" / step).mkdir(parents=True)
        (folder / "checkpoint" / step / ".metadata").touch()
    (folder / "checkpoint" / "step-12").mkdir()
    (folder / "config.toml").write_text(to_toml(Config()))
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one line that is printed."""
    assert main(argv) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.count("\n") == 1
    return error.removeprefix("titan_rl export: ").removesuffix("\n")


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, found in ((tmp_path, "none in"), (tmp_path / "none", "no folder")):
        expected = f"RUN: expected the dump folder of a run, with its config.toml, found {found} {folder}"
        assert refusal(capsys, str(folder)) == expected


@pytest.mark.parametrize("step", ["12", "3", "cold_start/2", "x", "-1"])
def test_a_step_without_a_whole_checkpoint(run: Path, capsys: pytest.CaptureFixture[str], step: str) -> None:
    expected = f"--step: expected one of cold_start/7, 2, 10 (in {run / 'checkpoint'}), found {step}"
    assert refusal(capsys, str(run), f"--step={step}") == expected


def test_a_run_without_checkpoints_or_without_a_critic(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = refusal(capsys, str(run), "--critic")
    assert found == f"RUN: expected a whole checkpoint in {run / 'checkpoint' / 'critic'}, found none"
    for path in (run / "checkpoint").rglob(".metadata"):
        path.unlink()
    assert refusal(capsys, str(run)) == f"RUN: expected a whole checkpoint in {run / 'checkpoint'}, found none"


def test_a_folder_that_exists(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = "--out: expected a folder that does not exist yet, found"
    assert refusal(capsys, str(run), "--out", str(tmp_path)) == f"{expected} {tmp_path}"
    own = run / "hf-cold_start-7-bfloat16"
    own.mkdir()
    found = refusal(capsys, str(run), "--step", "cold_start/7", "--dtype", "bfloat16")
    assert found == f"{expected} {own}"


def test_a_folder_that_cannot_be_written_is_refused_before_weights_are_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = "--out: expected a folder that can be written, found /proc: "
    assert refusal(capsys, str(run), "--out", "/proc/of/mine").startswith(expected)


def test_a_config_that_cannot_be_read_or_whose_files_are_gone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.toml").write_text(to_toml(Config(task=TaskSection(name="jsonl", path="gone.jsonl"))))
    assert "task.path: expected a JSONL or Parquet file, found none at 'gone.jsonl'" in refusal(capsys, str(run))
    (run / "config.toml").write_text("[model]\ndims = 3\n[eval]\nsiz = 3\n")
    found = refusal(capsys, str(run))
    assert found.startswith(f"{run}: config.toml: [model] has no key 'dims'")
    assert "; config.toml: [eval] has no key 'siz'" in found


def test_an_unknown_dtype(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(run), "--dtype", "int8"])
    assert "--dtype: invalid choice: 'int8' (choose from" in capsys.readouterr().err


def test_refusing_imports_no_engine(run: Path) -> None:
    code = (
        f"import sys; from titan_rl.tools.export import main; code = main([{str(run)!r}, '--step', '1']); "
        "sys.exit(bool({'torch', 'torchtitan', 'transformers', 'monarch', 'vllm'} & sys.modules.keys()) or code)"
    )
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 2
