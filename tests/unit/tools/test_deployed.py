"""Which weights and which sets a command line chooses or refuses, before anything is started."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.config.presets import preset
from titan_rl.config.sections import (
    Config,
    CurriculumSection,
    EvalSection,
    HostsSection,
    TaskSection,
)
from titan_rl.config.toml import to_toml
from titan_rl.preflight.checks.rollouts import check_evaluation
from titan_rl.preflight.plan import write_model_folder
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.terminal import Terminal
from titan_rl.tasks.task import load_task
from titan_rl.tools import audit, ctl, export
from titan_rl.tools import eval as eval_program
from titan_rl.tools import serve as serve_program
from titan_rl.tools.deployed import Chosen, choose, overrides_of, setup_of
from titan_rl.tools.refused_input import UsageError
from titan_rl.wire.seeds import derive


def weights(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model-00001-of-00001.safetensors").touch()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a cold start, two checkpoints of ten steps, and its best weights."""
    folder = tmp_path / "run"
    for step in ("cold_start/step-7", "step-2", "step-4"):
        (folder / "checkpoint" / step).mkdir(parents=True)
        (folder / "checkpoint" / step / ".metadata").touch()
    best = weights(folder / "best" / "step-2")
    (best / "evaluation.json").write_text(json.dumps({"step": 2, "metric": "eval/score", "value": 0.5}))
    write(folder, 10)
    return folder


def write(folder: Path, steps: int) -> None:
    config = Config()
    (folder / "config.toml").write_text(to_toml(replace(config, training=replace(config.training, steps=steps))))


def chosen(target: Path, step: str | None = None, config: str | None = None) -> Chosen:
    return choose(target, step, config, [])


def test_a_run_stands_for_its_newest_weights(run: Path) -> None:
    assert (chosen(run).folder, chosen(run).step) == (None, "4")
    weights(run / "hf")
    assert chosen(run).step == "4"  # hf/ is older: the run was continued
    write(run, 4)
    assert chosen(run).folder == run / "hf"
    assert chosen(run, "2").step == "2"
    assert chosen(run, "cold_start/7").step == "cold_start/7"


def test_a_checkpoint_names_its_step(run: Path) -> None:
    for path, step in (("step-2", "2"), ("cold_start/step-7", "cold_start/7")):
        found = chosen(run / "checkpoint" / path)
        assert (found.run, found.step) == (run, step)


def test_a_folder_of_a_run_has_the_config_of_the_run(run: Path) -> None:
    for path in (weights(run / "hf"), run / "best", run / "best" / "step-2"):
        found = chosen(path)
        assert found.config.training.steps == 10
        assert found.folder == (run / "best" / "step-2" if "best" in path.parts else path)


def test_any_folder_needs_a_config(tmp_path: Path) -> None:
    folder = weights(tmp_path / "model")
    assert chosen(folder, config="grpo_llama").folder == folder
    with pytest.raises(UsageError, match="--config: expected the config with the task"):
        chosen(folder)


def test_what_is_refused(run: Path, tmp_path: Path) -> None:
    (run / "tb").mkdir()
    for target in (tmp_path / "none", run / "tb", run / "config.toml", tmp_path):
        with pytest.raises(UsageError, match=r"expected the dump folder of a run .* found none of them at"):
            chosen(target, config="grpo_llama")
    for step in ("3", "x", "cold_start/2"):
        with pytest.raises(UsageError, match=r"--step: expected one of cold_start/7, 2, 4 \(in .*\), found"):
            chosen(run, step)
    with pytest.raises(UsageError, match="--step: expected none, or 2, with the checkpoint"):
        chosen(run / "checkpoint" / "step-2", "4")
    with pytest.raises(UsageError, match="--step: expected none with a Hugging Face folder, found 4"):
        chosen(run / "best", "4")
    (run / "config.toml").write_text(to_toml(replace(Config(), algorithm=replace(Config().algorithm, name="sft"))))
    assert chosen(run).step == "4"
    (run / "config.toml").write_text('[algorithm]\nname = "reward_model"\n')
    with pytest.raises(UsageError, match="expected a policy, found a reward model"):
        chosen(run)
    (run / "config.toml").write_text("[algorithm]\nnames = 3\n")
    with pytest.raises(UsageError, match=r"\[algorithm\] has no key 'names'"):
        chosen(run)


def test_flags_of_the_config() -> None:
    assert overrides_of(["--a.b", "3", "--c.d=x=y"]) == [("a.b", "3"), ("c.d", "x=y")]
    for words in (["stray"], ["--nope", "3"], ["--a.b"]):
        with pytest.raises(UsageError):
            overrides_of(words)


def sets(config: Config, *argv: str) -> tuple[Config, bool]:
    return eval_program.with_sets(config, eval_program.parser().parse_args(["RUN", *argv]))


HARD = replace(Config(), eval=EvalSection(size=8, sets={"hard": {"path": "h.jsonl", "samples": 2, "temperature": 0.5}}))


def test_all_sets_of_the_config_are_the_default() -> None:
    config, heldout = sets(HARD)
    assert (config.eval.sets, heldout) == (HARD.eval.sets, True)
    config, heldout = sets(HARD, "--set", "hard")
    assert (config.eval.sets, heldout) == (HARD.eval.sets, False)


def test_flags_change_the_chosen_sets() -> None:
    config, heldout = sets(HARD, "--samples", "8", "--reward", "last_number")
    assert not heldout
    assert config.eval.sets == {
        "heldout": {"samples": 8, "reward": "last_number", "temperature": HARD.rollout.temperature},
        "hard": {"path": "h.jsonl", "samples": 8, "temperature": 0.5, "reward": "last_number"},
    }
    config, _ = sets(HARD, "--set", "mine=x.jsonl", "--size", "3")
    assert config.eval.sets == {"mine": {"path": "x.jsonl", "size": 3}}


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--set", "nope"], "--set: expected one of heldout, hard, or NAME=FILE, found nope"),
        (["--samples", "0"], "eval.sets.hard.samples: expected an integer >= 1"),
        (["--temperature", "3"], "eval.sets.hard.temperature: expected a number >= 0 and <= 2, found 3"),
        (["--samples", "4", "--temperature", "0"], "greedy answers would be the same"),
        (["--set", "a b=x"], "eval.sets: expected a name of letters"),
        (["--set", "hard", "--set", "hard=x"], "--set: expected each set once, found hard again"),
    ],
)
def test_sets_that_cannot_be(argv: list[str], problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        sets(HARD, *argv)
    assert problem in str(refused.value)


def test_a_reward_model_does_not_judge_its_own_policy() -> None:
    by_model = replace(Config(), task=replace(Config().task, reward="model"))
    with pytest.raises(UsageError, match="--reward: expected one for the held-out problems"):
        sets(by_model)


def test_a_server_reads_no_data() -> None:
    task = replace(HARD.task, name="jsonl", path="/gone", eval_path="/gone", reward="gone:f", template="chat")
    task = replace(task, images_key="image")
    config = serve_program.without_task(replace(HARD, task=task))
    assert list(check_evaluation(config)) == []
    assert (config.task.template, config.task.name, config.task.images_key) == ("chat", "addition", "")


def test_a_server_of_a_model_that_cannot_see_is_refused() -> None:
    setup: Any = SimpleNamespace(config=Config(), shape=SimpleNamespace(family="llama"), device="cpu")
    assert serve_program.images_of(setup, Terminal()) is None
    setup.config = replace(Config(), model=replace(Config().model, vision="frozen"))
    with pytest.raises(UsageError, match='expected "none", because only folders of'):
        serve_program.images_of(setup, Terminal())


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 99999), ("256.0.0.1", 0), ("no host", 0), ("\udcff", 0), ("é" * 300, 0)]
)
def test_an_address_that_cannot_be_listened_on(host: str, port: int) -> None:
    with pytest.raises(UsageError, match="--host, --port: expected an address to listen on, found"):
        serve_program.bound_socket(host, port)


def test_a_deployment_checks_the_rewards_of_its_sets_and_needs_no_other_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model_folder(folder, shape_of(Config().model))
    by_model = replace(HARD, task=replace(HARD.task, reward="model"), algorithm=preset("ppo"))
    with pytest.raises(UsageError, match=r"eval\.sets\.again\.reward: expected a reward other than"):
        setup_of(replace(by_model, eval=EvalSection(size=8, sets={"again": {}})), folder, tmp_path)
    own = replace(by_model, eval=EvalSection(size=8, sets={"again": {"reward": "exact", "size": 3}}))
    setup = setup_of(replace(own, hosts=replace(own.hosts, device="cpu")), folder, tmp_path)
    assert setup.config.roles == {}
    assert [len(each.prompts) for each in setup.eval_sets] == [3]
    seed = derive(Config().debug.seed, "task")
    problems = load_task(Config().task, seed=seed, eval_size=8).heldout  # as in the run
    assert [prompt.text for prompt in setup.heldout.prompts] == [example.prompt for example in problems]


def test_a_deployment_of_a_mixture_reads_its_evaluation_data_or_the_sources(tmp_path: Path) -> None:
    folder, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    folder.mkdir()
    write_model_folder(folder, shape_of(Config().model))
    rows.write_text('{"problem": "1+1=", "answer": "2"}\n')
    mixed = TaskSection(name="jsonl", sources={"a": {"path": str(rows)}, "b": {"path": str(rows), "weight": 2}})
    config = Config(task=mixed, curriculum=CurriculumSection(solved_visits=2), hosts=HostsSection(device="cpu"))
    for eval_path, parts in (("", 2), (str(rows), 0)):
        found = replace(config, task=replace(mixed, eval_path=eval_path))
        setup = setup_of(found, folder, tmp_path)
        assert (len(setup.task.parts), len(setup.heldout.prompts)) == (parts, 1 - parts // 2)


@pytest.mark.parametrize("program", [eval_program, serve_program, export, audit, ctl])
def test_a_path_that_no_file_can_have(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["x" * 5000, *(["status"] if program is ctl else [])]
    with pytest.raises(SystemExit) as stop:
        program.main(words)
    assert stop.value.code == 2
    assert "expected a path, found 'xxx" in capsys.readouterr().err


@pytest.mark.parametrize(("program", "target"), [("eval", "run"), ("serve", "run"), ("check_env", "hunt")])
def test_programs_have_one_thread_until_they_are_isolated(program: str, target: str, run: Path) -> None:
    """numpy starts threads, and a process with several cannot enter a user namespace."""
    code = f"""
import os, sys, titan_rl.tools.{program} as program
program.in_own_network = lambda *_, **__: len(os.listdir("/proc/self/task")) - 1
sys.exit(program.main([{(str(run) if target == "run" else target)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
