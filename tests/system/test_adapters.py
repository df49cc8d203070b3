"""Environments out of other packages, unmodified, to a training step. check_env installs each package into a separate
virtual environment, so the tests need a package index."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import install
import pytest

from support.running import Run, Runs
from titan_rl.tools.inspect.audit_rules import audit

ROOT = Path(__file__).parents[2]
LOOKALIKES = "lookalikes"  # in tests/support, which the processes find
ROWS = [{"question": f"{a}*7=", "answer": str(7 * a), "expected": str(7 * a)} for a in range(8)]


def checked(*flags: str, code: int = 0) -> str:
    """Return the output of check_env."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    command = [sys.executable, "-m", "titan_rl", "check_env", *flags]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def trained(runs: Runs, folder: Path, name: str, python: Path | str = "", **more: object) -> tuple[Run, dict[str, Any]]:
    """Train a step; return the run and its metrics. Every sampled token is trained on, and nothing else."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run = runs.finish(
        folder / "run",
        "calc_llama",
        **{
            "task__name": "jsonl",
            "task__path": rows,
            "environment__name": name,
            "environment__python": python,
            "environment__lockstep": False,
            "environment__max_turns": 3,
            "environment__max_tokens": 0,
            "environment__concurrency": 4,
            "cold_start__steps": 0,
            "rollout__groups_per_step": 2,
            "rollout__group_size": 2,
            "rollout__max_new_tokens": 8,
            "training__seq_len": 2048,
            "training__steps": 1,
            "eval__size": 0,
            **more,
        },
    )
    assert audit(run.folder)[0] == []
    lines, (step,) = run.lines("rollouts.jsonl"), run.lines("metrics.jsonl")
    assert len(lines) == 4
    assert {line["status"] for line in lines} <= {"completed", "max_turns"}, lines
    for line in lines:
        assert sum(line["mask"]) == sum(turn["sampled"] for turn in line["turns"])
    assert step["tokens/trained"] == sum(sum(line["mask"]) for line in lines) > 0
    assert step["loss"] is not None
    return run, step


def test_check_env_plays_shows_and_names_what_fails() -> None:
    said = checked(f"{LOOKALIKES}:Walk", "--environment.python", sys.executable, "--rollouts", "3")
    assert "⟦" in said
    assert "repeats    yes" in said
    assert "speed      3 rollouts" in said
    again = checked(f"{LOOKALIKES}:Walk", "--rollouts", "3")
    assert [line for line in again.splitlines() if line.startswith("<s>")] == [
        line for line in said.splitlines() if line.startswith("<s>")
    ], "the same seed plays the same in another Python"
    failed = checked(f"{LOOKALIKES}:Raises", "--rollouts", "2", code=1)
    assert "wrong: 2 of 2 rollouts failed: LookupError: as asked (" in failed
    assert "lookalikes.py:" in failed


@pytest.fixture(scope="module")
def gyms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with four packages, made by check_env."""
    folder = tmp_path_factory.mktemp("gyms") / "venv"
    packages = ("gymnasium==1.4.0", "skyrl-gym==0.4.0", "textarena==0.7.4", "open_spiel==2.0.2")
    said = checked("gymnasium:FrozenLake-v1", "--environment.python", str(folder), "--install", *packages)
    assert "--model.hf_assets_path FOLDER takes your model's" in said, "the built-in tokenizer has no capitals"
    return folder


@pytest.mark.slow
def test_gymnasiums_frozen_lake_is_trained_on(runs: Runs, tmp_path: Path, gyms: Path) -> None:
    flags = {"environment__args": "{is_slippery = false}", "rollout__max_new_tokens": 2}
    run, step = trained(runs, tmp_path, "gymnasium:FrozenLake-v1", gyms, **flags)
    assert step["environment/unreadable"] >= 0
    assert any("expected an action from 0 to 3" in json.dumps(line) for line in run.lines("rollouts.jsonl"))


@pytest.mark.slow
def test_skyrls_gsm8k_is_trained_on(runs: Runs, tmp_path: Path, gyms: Path) -> None:
    _, step = trained(runs, tmp_path, "skyrl:gsm8k_multi_turn", gyms, environment__max_turns=5)
    assert step["environment/steps"] == 5


@pytest.mark.slow
def test_a_game_of_textarena_is_trained_on(runs: Runs, tmp_path: Path, gyms: Path) -> None:
    run, _ = trained(runs, tmp_path, "textarena:GuessTheNumber-v0", gyms)
    assert all("ou have to guess the number" in json.dumps(line) for line in run.lines("rollouts.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["textarena:KuhnPoker-v0", "openspiel:leduc_poker"])
def test_games_of_two_players_are_trained_on(runs: Runs, tmp_path: Path, gyms: Path, name: str) -> None:
    flags = {"environment__seats": '["first", "second"]', "environment__max_turns": 6}
    run, _ = trained(runs, tmp_path, name, gyms, **flags)
    lines = run.lines("rollouts.jsonl")
    assert {seat for line in lines for seat in line["seats"]} <= {"first", "second"}
    assert all(line["seats"] for line in lines)


@pytest.fixture(scope="module")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The environment that OpenEnv's own command writes, on its own server."""
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "openenv==0.10.0"], check=True)
    subprocess.run([str(folder / "venv" / "bin" / "openenv"), "init", "echo_one"], cwd=folder, check=True)
    app = folder / "echo_one" / "server" / "app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=4"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(python), "-m", "echo_one.server.app", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, cwd=folder)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.2)
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_an_openenv_server_is_trained_on_and_too_many_rollouts_are_refused(
    runs: Runs, tmp_path: Path, echo_server: str
) -> None:
    _, step = trained(runs, tmp_path, f"openenv:{echo_server}", hosts__isolation="off")
    assert step["reward/mean"] > 0, "an echo is rewarded by its length"
    said = checked(f"openenv:{echo_server}", "--environment.concurrency", "4", code=2)
    most = "environment.processes x environment.concurrency: expected at most 4"
    assert (
        f"{most}, the sessions that {echo_server} takes (its max_concurrent_envs), found 8 rollouts in flight" in said
    )


@pytest.mark.slow
def test_a_message_environment_of_tinkers_cookbook_is_trained_on(runs: Runs, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    packages = ("tinker-cookbook==0.5.8", "torch==2.13.0+cpu")
    subprocess.run([str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages], check=True)
    name = "tinker_cookbook.eval.benchmarks.gsm8k:GSM8KMessageEnv"
    _, step = trained(runs, tmp_path, name, venv, task__template="chat")
    assert step["environment/correct"] >= 0


def test_trls_environment_factory_is_trained_on(runs: Runs, tmp_path: Path) -> None:
    rows = tmp_path / "starts.jsonl"
    rows.write_text("".join(json.dumps({**row, "start": 3}) + "\n" for row in ROWS))
    run, step = trained(
        runs, tmp_path, f"{LOOKALIKES}:Increment", sys.executable, task__path=rows, task__template="chat"
    )
    assert step["reward/mean"] == 3.0
    assert all(" from 3" in line["messages"][0]["content"] for line in run.lines("rollouts.jsonl"))


ROWS_OF_TASKSET = """
import itertools, json
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

config = taskset_config_type("textarena").model_validate({"id": "textarena", "game": "Hangman-v0"})
for task in itertools.islice(load_taskset(config).load(), 4):
    print(json.dumps({"question": str(task.data.prompt), "answer": "", **task.data.model_dump(mode="json")}))
"""


@pytest.mark.slow
def test_a_taskset_of_verifiers_is_trained_on(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hangman takes its words from a corpus of nltk, which this test writes: its own would be downloaded."""
    for name, value in install.uv_environment(install.pip_settings(), os.environ).items():
        monkeypatch.setenv(name, value)  # the harness installs its program's packages with uv
    words = tmp_path / "nltk" / "corpora" / "words"
    words.mkdir(parents=True)
    for corpus in ("en", "en-basic"):
        (words / corpus).write_text("apple\nhouse\nplant\ngreen\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "verifiers[ta]==0.4.0", "uv"], check=True)
    rows = tmp_path / "hangman.jsonl"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    rows.write_text(
        subprocess.run([str(python), "-c", ROWS_OF_TASKSET], env=env, check=True, text=True, stdout=-1).stdout
    )
    flags = {
        "task__agent": "verifiers:textarena",
        "task__template": "chat",
        "task__path": rows,
        "environment__args": '{"taskset.game" = "Hangman-v0"}',
        "environment__processes": 1,
        "environment__turn_seconds": 300,
        "hosts__isolation": "off",
    }
    run, step = trained(runs, tmp_path, "", venv, **flags)
    assert step["environment/requests"] >= 1
    several = [line for line in run.lines("rollouts.jsonl") if len(line["turns"]) > 1]
    assert several, "a guess that is no letter is answered"
    assert step["environment/requests"] > 1
