"""Where a reward's module is found, by the installed command and by `python -m`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INSTALLED = (
    "import sys; sys.argv[0] = 'titan_rl'; sys.path.append(sys.argv.pop(1)); import titan_rl.run as r; r.entry()"
)


@pytest.mark.parametrize("start", [["-m", "titan_rl.run"], ["-P", "-c", INSTALLED, str(ROOT)]], ids=["-m", "titan_rl"])
def test_a_reward_is_found_in_the_current_folder_and_replaces_nothing(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completion): return len(completion)")
    for name in ("json", "asyncio", "numpy", "rich", "tomli"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray module of the current folder')")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    if start[0] == "-P":
        env.pop("PYTHONPATH")
    flags = ["--config", "grpo_llama", "--dry-run", "--task.reward=mine:f"]
    ran = subprocess.run(
        [sys.executable, *start, *flags], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "reward mine:f" in " ".join(ran.stdout.split())


def test_a_reward_that_exits_as_it_is_imported_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os; os._exit(0)")
    command = [sys.executable, "-m", "titan_rl.run", "--config", "grpo_llama", "--dry-run", "--task.reward=mine:f"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "task.reward: expected 'mine:f' to be imported, found that it ends the process" in ran.stderr
