import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_rl.config.toml import find, load, planned, schema, shipped, variants
from titan_rl.preflight.checks import checked_run
from titan_rl.preflight.help import SECTIONS
from titan_rl.preflight.load import Invocation

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No earlier run lies in the shipped configs' dump folders."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the same everywhere


def test_a_renamed_key_is_read_with_a_note() -> None:
    run = checked_run(["--config", "grpo_llama", "--rollout.lag", "2"])
    assert run.config.rollout.max_staleness_steps == 2
    assert "--rollout.lag: its name is now rollout.max_staleness_steps = 2" in run.warnings


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    with pytest.raises(SystemExit) as left:
        checked_run(argv)
    out, err = capsys.readouterr()
    assert (left.value.code, out) == (2, "")
    return err.splitlines()


def test_a_shipped_config_by_name() -> None:
    path = find("grpo_llama")
    invocation = Invocation(config_name="grpo_llama", config=load(path), dry_run=False)
    assert checked_run(["--config", "grpo_llama"]) == checked_run(["--config=grpo_llama.toml"]) == invocation
    assert checked_run(["--dry-run", "--config", "grpo_llama"]) == replace(invocation, dry_run=True)


@pytest.mark.parametrize(
    ("argv", "section", "key", "value"),
    [
        (["--training.steps", "20"], "training", "steps", 20),
        (["--training.steps=20"], "training", "steps", 20),
        (["--training.steps=20", "--training.steps=30"], "training", "steps", 30),
        (["--model.n-layers", "3"], "model", "n_layers", 3),
        (["--lr-scheduler.decay-ratio", "0.5"], "lr_scheduler", "decay_ratio", 0.5),
        (["--job.fresh"], "job", "fresh", True),
        (["--job.fresh", "--training.steps", "20"], "job", "fresh", True),
        (["--job.fresh", "false"], "job", "fresh", False),
        (["--checkpoint.enable=false"], "checkpoint", "enable", False),
        (["--job.description", "-3"], "job", "description", "-3"),
        (["--job.description=--a=b"], "job", "description", "--a=b"),
        (["--job.description="], "job", "description", ""),
    ],
)
def test_overrides(argv: list[str], section: str, key: str, value: object) -> None:
    config = checked_run(["--config", "grpo_llama", *argv]).config
    assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "3"], "--steps: unknown flag; did you mean --cold_start.steps or --training.steps?"),
        (["--dry-rum"], "--dry-rum: unknown flag; did you mean --dry-run?"),
        (["--seq-length", "3"], "--seq-length: unknown flag; did you mean --training.seq_len?"),
        (["--"], "--: unknown flag"),
        (["-c=3"], 'expected a flag, such as --training.steps 20, found "-c=3"'),
        (
            ["--training.steps", "--dry-run"],
            "--training.steps: expected an integer >= 0 and <= 1000000000, found no value",
        ),
        (["--training.steps", "-3"], "--training.steps: expected an integer >= 0 and <= 1000000000, found -3"),
        (["--optimizer.lr", "-1e-3"], "--optimizer.lr: expected a number > 0 and <= 10, found -0.001"),
        (["--training.step", "3"], "--training.step: [training] has no key 'step'; did you mean 'steps'?"),
        (["--rollout.group_size", "1"], "rollout.group_size: expected at least 2"),
        (
            ["--model.hf_assets_path", "fetch:smollm3"],
            'model.hf_assets_path: expected a folder or "fetch:smollm2" or "fetch:tiny_vision", found "smollm3"; did',
        ),
    ],
)
def test_messages(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    heading, problem = refused(capsys, "--config", "grpo_llama", *argv)
    assert heading == "titan_rl: 1 problem in grpo_llama"
    assert problem.startswith(f"  - {message}")


def test_a_run_that_cannot_start_leaves_with_2_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titan_rl.run", "--config", "grpo_llama", "--algorithm.name=ppo"]
    command.append(f"--job.dump_folder={tmp_path / 'run'}")  # the checkout may hold a run of this config
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    heading, problem = run.stderr.splitlines()
    assert (run.returncode, run.stdout, heading) == (2, "", "titan_rl: 1 problem in grpo_llama")
    assert problem.startswith('  - critic.lr: expected a value above 0, because algorithm.name = "ppo" trains')


def test_all_problems_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[job]\nfresh = 1\n[task]\nreward = "{"x" * 300}"\nanswer = 3\n')
    heading, *problems = refused(capsys, "--config", str(file), "--training.steps", "x", "foo", "--oops")
    assert heading == f"titan_rl: 5 problems in {file}"
    assert len(problems) == 5
    file.write_text(f'[task]\nreward = "{"x" * 300}"\n')
    heading, *problems = refused(capsys, "--config", str(file), "foo", "--training.seq_len", "3")
    assert [problem.split(":")[0] for problem in problems] == [
        '  - expected a flag, such as --training.steps 20, found "foo"',
        "  - task.reward",
        "  - training.seq_len",
    ]


def test_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    heading, problem, *names = refused(capsys, "--dry-run")
    assert heading == "titan_rl: 1 problem in the command line"
    assert problem == "  - --config: expected a TOML file or a shipped config, found none"
    assert names[0] == "shipped configs:"
    few = names.index("variants of them (variants.toml):")
    unproven = names.index("planned, never run on the hardware that they are for:")
    assert sorted(" ".join(names[few + 1 : unproven]).split()) == sorted(variants())
    assert sorted(" ".join(names[unproven + 1 :]).split()) == planned()
    headings = (names[0], names[few], names[unproven])
    assert sorted(" ".join(line for line in names if line not in headings).split()) == shipped()
    assert max(map(len, names)) <= 80
    assert "did you mean 'grpo_llama'" in refused(capsys, "--config", "grpo_lama")[1]
    assert "found none" in refused(capsys, "--config")[1]


def test_flags_of_other_projects_are_answered_with_our_key(capsys: pytest.CaptureFixture[str]) -> None:
    theirs = (
        "--max_steps",
        "3",
        "--actor_rollout_ref.rollout.n=8",
        "--algorithm.adv_estimator",
        "grpo",
        "data.val_files=x",
    )
    steps, group, name, files = refused(capsys, "--config", "grpo_llama", *theirs)[1:]
    assert steps == "  - --max_steps: unknown flag; here it is --training.steps (docs/environments.md)"
    assert group.endswith("here it is --rollout.group_size (docs/environments.md)")
    assert name.endswith("here it is --algorithm.name (docs/environments.md)")
    assert files.endswith('found "data.val_files=x"; here it is --task.eval_path (docs/environments.md)')


def test_what_another_host_could_run_is_a_dry_runs_warning(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--config", "grpo_llama", "--hosts.device", "cuda", "--parallelism.data_parallel_shard_degree", "64")
    assert len(refused(capsys, *argv)) == 3
    device, slots = checked_run([*argv, "--dry-run"]).warnings
    assert device.startswith("hosts.device: ")
    assert slots.startswith("hosts.slots: expected room for 65 processes")


def test_what_no_host_could_run_on_a_cpu_is_refused_in_a_dry_run_too(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--config", "grpo_llama", "--dry-run", "--compile.enable", "--profiling.enable_memory_snapshot")
    argv += ("--activation_checkpoint.mode", "offload")
    assert [warning.split(":")[0] for warning in checked_run(argv).warnings] == [
        "activation_checkpoint.mode",
        "compile.enable",
        "profiling.enable_memory_snapshot",
    ]
    _, *problems = refused(capsys, *argv, "--hosts.device=cpu")
    assert [problem.split(":")[0] for problem in problems] == [
        "  - activation_checkpoint.mode",
        "  - compile.enable",
        "  - profiling.enable_memory_snapshot",
    ]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        checked_run(["--config", "no such file", "--help", "all"])
    assert left.value.code == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line != line.rstrip()] == []  # a pager would wrap the spaces
    lines = [line.strip() for line in printed]
    for section, keys in schema().items():
        assert any(line.startswith(f"[{section}]") for line in lines)
        for name, key in keys.items():  # whole on one line, for grep
            default = json.dumps(key.default)
            assert any(
                line.split()[:1] == [name] and f"{key.doc} ({key.kind}; default {default})" in line for line in lines
            )


def helped(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as left:
        checked_run(argv)
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    overview = helped(capsys, "-h")
    assert list(SECTIONS) == list(schema())
    assert all(f"[{section}] " in overview for section in schema())
    assert "beta1" not in overview
    assert "--help all" in overview
    one = helped(capsys, "--config", "x", "--help", "optimizer")
    assert [line.split()[0] for line in one.splitlines()] == ["[optimizer]", *schema()["optimizer"]]
    assert helped(capsys, "--help", "[optimizer]", "--job.fresh") == helped(capsys, "--help", "optimizer.lr") == one
    assert refused(capsys, "--help", "optimiser")[1].endswith(
        "--help: there is no section \"optimiser\"; did you mean 'optimizer'?"
    )


@pytest.mark.parametrize("program", ["titan_rl", "titan_rl.run"])
def test_without_arguments_the_program_says_how_to_use_it(program: str) -> None:
    done = subprocess.run([sys.executable, "-m", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"titan_rl: RL post-training of language models\n\nusage: python -m {program} ")


words = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["--config", "grpo_llama", "--dry-run", "--job.fresh", "--training.steps", "--optimizer.lr=", "-1"]
    ),
    st.builds("--{}.{}={}".format, st.sampled_from(list(schema())), st.text(max_size=6), st.text(max_size=6)),
)


@given(st.lists(words, max_size=5))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_command_line_ends_in_a_traceback(argv: list[str]) -> None:
    try:
        checked_run(["--config", "grpo_llama", *argv])
        code = 0
    except SystemExit as left:
        code = left.code
    assert code in (0, 2)


INSTALLED = (
    "import sys; sys.argv[0] = 'titan_rl'; sys.path.append(sys.argv.pop(1)); import titan_rl.__main__ as m; m.entry()"
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
    assert "task.reward: expected 'mine:f' to be imported, found that its process" in ran.stderr


def test_a_missing_path_names_the_folder_in_which_it_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/my.toml").write_text('[task]\nname = "jsonl"\npath = "train.jsonl"\nreward = "mine:f"\n')
    *_, last = refused(capsys, "--config", "own/my.toml")
    where = f"{tmp_path.resolve()}; the config is in {tmp_path.resolve() / 'own'}"
    assert last == f"paths and modules are relative to the current folder, {where}"
    monkeypatch.chdir(tmp_path / "own")
    problems = refused(capsys, "--config", "my.toml")
    assert problems[-1].startswith("  - ")
    assert any(f"No module named 'mine' in the current folder ({Path.cwd()})" in problem for problem in problems)
