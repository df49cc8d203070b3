"""`titan_rl COMMAND`: every program of the package by its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_rl.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
INSTALLED = "import sys; sys.argv[0] = '/venv/bin/titan_rl'; from titan_rl.__main__ import entry; entry()"


def typed(*words: str, start: tuple[str, ...] = ("-c", INSTALLED), **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *start, *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"} | env
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)


def test_the_table_has_every_program() -> None:
    folders = [ROOT / "titan_rl", ROOT / "titan_rl/tools"]
    files = [path for folder in folders for path in folder.glob("*.py")]
    modules = [path for path in files if '__name__ == "__main__"' in path.read_text()]
    packages = [path.parent for folder in folders for path in folder.glob("*/__main__.py")]
    assert {path.stem for path in modules + packages} - {"__main__"} == set(COMMANDS)


def test_help_has_a_line_for_each() -> None:
    for words in (["--help"], ["-h"], ["help"]):
        done = typed(*words)
        assert (done.returncode, done.stderr) == (0, "")
        for name in COMMANDS:
            assert f"\n  {name} " in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "usage: titan_rl COMMAND" in done.stdout


@pytest.mark.parametrize("name", ["audit", "fetch"])
def test_usage_names_what_was_typed(name: str) -> None:
    assert typed(name, "--help").stdout.split("\n")[0].startswith(f"usage: titan_rl {name} ")


def test_usage_names_other_ways_to_start() -> None:
    assert typed("--help", start=("-m", "titan_rl", "audit")).stdout.startswith("usage: python -m titan_rl audit ")
    assert typed("audit", "-h", start=("-m", "titan_rl")).stdout.startswith("usage: python -m titan_rl audit ")
    script = typed("run", "-h", TITAN_RL_COMMAND="./scripts/run").stdout
    assert "\nusage: ./scripts/run --config" in script


def test_flags_are_those_of_a_run() -> None:
    done, named = typed("--help", "optimizer"), typed("run", "--help", "optimizer")
    assert done.stdout == named.stdout
    assert done.stdout.startswith("[optimizer] ")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("audti", "did you mean 'audit'?"),
        ("check-env", "did you mean 'check_env'?"),
        ("my.toml", "a config needs its flag: titan_rl --config my.toml"),
        ("zzz", "titan_rl --help lists all"),
    ],
)
def test_an_unknown_command_names_the_nearest(word: str, hint: str) -> None:
    done = typed(word)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"titan_rl: there is no command {word!r}; {hint}\n"


def test_only_the_programs_module_is_imported() -> None:
    loaded = (
        "import sys, atexit; atexit.register(lambda: print(sorted(m for m in sys.modules if m[:9] == 'titan_rl.')));"
    )
    done = typed("doctor", "--help", start=("-c", loaded + INSTALLED))
    assert done.stdout.splitlines()[-1] == str(
        ["titan_rl.__main__", "titan_rl.tools", "titan_rl.tools.doctor", "titan_rl.wire", "titan_rl.wire.program"]
    )


def test_exit_codes_pass() -> None:
    done = typed("audit", "/no/such/run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("titan_rl audit: RUN: ")
