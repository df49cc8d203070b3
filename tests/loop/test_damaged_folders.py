"""A run's folder in which something else than the run's files lies: each command ends at once with a message."""

import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from support.running import RunFiles
from titan_rl.config.plain_files import NotAFile
from titan_rl.tools.inspect.audit_rules import audit
from titan_rl.tools.view.page import page_data

SEED, SECONDS = 20261128, 120
FILES = (
    *(
        "config.toml",
        "summary.json",
        "metrics.jsonl",
        "rollouts.jsonl",
        "evaluations.jsonl",
        "evaluation_answers.jsonl",
    ),
    *("ledger.jsonl", "faults.jsonl", "trackers.json", "timeline.json"),
    *("model/tokenizer.json", "hf/config.json"),
)
LINES = (
    "[" * 5000 + "]" * 5000,
    '{"kind":"rl","step":' + "9" * 5000 + "}",
    "null",
    '{"kind":"rl","step":"x"}',
    '"\\ud800"',
)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def deep(path: Path) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in LINES)


def harm(run: Path, seed: int) -> str:
    """Harm a file, or all, in one of three ways, and return a line about it."""
    draw = random.Random(SEED + seed)
    how = draw.choice([fifo, fifo, folder, deep])
    names = draw.sample(FILES, k=draw.choice([1, 1, 2, len(FILES)]))
    for name in names:
        how(run / name)
    return f"{how.__name__} {names}"


@pytest.mark.parametrize(
    ("command", "seed"),
    [(command, 10 * i + n) for i, command in enumerate(["view", "compare", "look", "why", "replay", "audit", "rewards"])
     for n in range(2)],
)  # fmt: skip
def test_a_command_ends_and_has_no_traceback(whole: RunFiles, tmp_path: Path, command: str, seed: int) -> None:
    run = shutil.copytree(whole.folder, tmp_path / "run")
    done = harm(run, seed)
    words = {
        "view": ["view", str(run), "--out", str(tmp_path / "view.html")],
        "compare": ["compare", str(whole.folder), str(run)],
        "rewards": ["audit", "--rewards", str(run)],
    }.get(command, [command, str(run)])
    found = subprocess.run(
        [sys.executable, "-m", f"titan_rl.{words[0]}", *words[1:]],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
        check=False,
    )
    assert "Traceback" not in found.stdout + found.stderr, (done, found.stderr)
    assert found.returncode in (0, 1, 2), done
    assert found.stdout or found.stderr, done


def test_an_emptied_config_is_named(whole: RunFiles, tmp_path: Path) -> None:
    """Its defaults are no settings of the run."""
    run = shutil.copytree(whole.folder, tmp_path / "run")
    (run / "config.toml").write_text("# grpo_llama\n")
    assert any("expected every key of a run, found none" in problem for problem in audit(run)[0])


@pytest.mark.parametrize("name", FILES)
def test_a_page_of_a_folder_with_a_fifo(whole: RunFiles, tmp_path: Path, name: str) -> None:
    run = shutil.copytree(whole.folder, tmp_path / "run")
    fifo(run / name)
    with suppress(NotAFile):  # a log that a page is made of
        assert page_data([run], sample_bytes=1000)["runs"]
