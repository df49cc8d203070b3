"""[policies]: each policy's config, refusals, and the plan of a run of several."""

from pathlib import Path

import pytest

from titan_rl.config.toml import ConfigError, find, load, load_of_run, policies_of, problems_of_names, to_toml
from titan_rl.ext.policies.checks import merged
from titan_rl.run import main

SMALL = """
base = "grpo_llama"
cold_start.steps = 0
eval.size = 8
job.dump_folder = "RUN"
lora = {rank = 8, sync = "adapter"}
"""
TWO = (
    SMALL
    + """
[policies.sums.optimizer]
lr = 1e-3
[policies.sums.training]
steps = 7
[policies.pairs.algorithm]
name = "gspo"
"""
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(TWO.replace("RUN", str(tmp_path / "run")))
    return path


def test_a_policy_is_the_file_with_its_tables_over_it(file: Path, tmp_path: Path) -> None:
    assert policies_of(file) == ["sums", "pairs"]
    assert policies_of(find("grpo_llama")) == []
    shared, sums, pairs = (load(file, policy=name) for name in ("", "sums", "pairs"))
    assert (sums.optimizer.lr, pairs.optimizer.lr, shared.optimizer.lr) == (1e-3, 8e-4, 8e-4)
    assert (sums.training.steps, pairs.training.steps) == (7, 140)
    assert (sums.algorithm.name, pairs.algorithm.name) == ("grpo", "gspo")
    assert pairs.algorithm.ratio == "sequence"  # the preset's
    assert [c.job.dump_folder for c in (shared, sums)] == [str(tmp_path / "run"), str(tmp_path / "run/policies/sums")]
    written = tmp_path / "config.toml"
    written.write_text(to_toml(sums))
    assert load_of_run(tmp_path) == load(written) == sums


def test_flags_of_all_and_of_one(file: Path) -> None:
    flags = [("training.steps", "3"), ("policies.sums.optimizer.lr", "0.5"), ("optimizer.lr", "0.25")]
    sums, pairs = (load(file, flags, policy=name) for name in ("sums", "pairs"))
    assert (sums.training.steps, pairs.training.steps) == (3, 3)
    assert (sums.optimizer.lr, pairs.optimizer.lr) == (0.5, 0.25)


def test_a_file_over_a_base_adds_policies(file: Path, tmp_path: Path) -> None:
    over = tmp_path / "over.toml"
    over.write_text('base = "two.toml"\n[policies.third.optimizer]\nlr = 2e-3\n[policies.sums.training]\nsteps = 9\n')
    assert policies_of(over) == ["sums", "pairs", "third"]
    assert load(over, policy="sums").training.steps == 9
    assert load(over, policy="sums").optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[policies.a.model]\ndim = 3",
            "[policies.a.model] dim: all policies of a run share this key: set it in [model]",
        ),
        ("[policies.a.job]\ndump_folder = 'x'", "[policies.a.job] dump_folder: all policies of a run share this key"),
        ("[policies.a.optimizer]\nrate = 3", "[policies.a.optimizer]: [optimizer] has no key 'rate'"),
        ("[policies.a.optimizer]\nlr = 'x'", "[policies.a.optimizer] lr: expected a number"),
        ("[policies.a]\noptimizer = 3", "[policies.a.optimizer]: expected a table"),
        ("[policies]\na = 3", "[policies]: expected tables such as [policies.sums.task]"),
    ],
)
def test_what_a_policy_cannot_have(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(f"{SMALL}{text}\n")
    with pytest.raises(ConfigError) as raised:
        load(path, policy="a")
    assert message in str(raised.value)


def test_names(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text("[policies.'../x'.task]\n[policies.Ab.task]\n")
    assert len(list(problems_of_names(policies_of(path), []))) == 2
    (problem,) = problems_of_names(policies_of(file), [("policies.sum.optimizer.lr", "1")])
    assert problem.endswith("the config has no policy 'sum'; did you mean 'sums'?")


def test_problems_of_all_policies_and_of_what_they_share_are_refused_at_once(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--policies.sum.optimizer.lr=1", "--policies.sums.optimizer.lrr=1", "--policies.pairs.training.seq_len=9"]
    with pytest.raises(SystemExit) as left:
        main(["--config", str(file), *flags, "--algorithm.clipp=3"])
    assert left.value.code == 2
    assert [line.split(":")[0].strip(" -") for line in capsys.readouterr().err.splitlines()[1:]] == [
        "policies.sum.optimizer.lr",
        "algorithm.clipp",
        "policies.sums.optimizer.lrr",
        "policies.pairs.training.seq_len",
    ]


def test_all_that_cannot_be_yet_is_refused_at_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {
        "lora.sync": "merge",
        "model.vision": "frozen",
        "cold_start.steps": "5",
        "placement.kind": "colocated",
        "weight_sync.in_flight": "drain",
        "weight_sync.transport": "rdma",
        "fault.on_bad_steps": "rollback",
        "policies.sums.algorithm.name": "ppo",
        "policies.pairs.rollout.top_p": "0.9",
        "policies.pairs.debug.seed": "7",
    }
    with pytest.raises(SystemExit):
        main(
            [
                "--config",
                str(file),
                "--dry-run",
                *(word for key, value in flags.items() for word in (f"--{key}", value)),
            ]
        )
    err = capsys.readouterr().err
    for key in flags:
        line = f"- {key.removeprefix('policies.pairs.')}: expected"
        if "algorithm" in key:
            line = "[policies.sums] algorithm.name: expected an algorithm"
        if "vision" in key:
            line = 'model.vision: expected "none" of a run with [policies]'
        assert line in err


def test_the_plan_names_the_policies_and_what_they_cost(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(file), "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for part in (
        "policies 2 over one base, 77.8K parameters each",
        "values and gradients of those not in use, 608 KiB",
        "Engines have a slot of 304 KiB for each; a sync of one policy moves as much",
        "sums task: addition",
        "grpo: 7 steps",
        "gspo: 140 steps",
    ):
        assert part in out
    assert not (tmp_path / "run").exists()


def test_lines_of_all_policies_are_printed_once() -> None:
    assert merged({"a": ["x", "y"], "b": ["y", "z"]}) == ["y", "[policies.a] x", "[policies.b] z"]
