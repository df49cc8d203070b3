"""--dry-run resolves and checks everything, prints the plan, and leaves the disk as it was."""

import json
import re
from pathlib import Path

import pytest

from support.folders import write_header, write_hf, write_models
from titan_rl.config.sections import ModelSection
from titan_rl.config.toml import find, load, shipped, to_toml
from titan_rl.preflight.shapes import shape_of
from titan_rl.run import main
from titan_rl.tasks import tokenizer as characters
from titan_rl.wire.model_shape import ModelShape

LLAMA_8B = ModelShape(
    family="llama3",
    vocab_size=128256,
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    hidden_dim=14336,
    max_seq_len=131072,
    rope_theta=500000.0,
    norm_eps=1e-5,
    tied=False,
)


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """What the 8B config expects on disk, less the weights' bytes: a dry run reads none of them."""
    folder = tmp_path / "Llama-8B"
    characters.build(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B.hf_config(bos=1, eos=2, pad=0)))
    write_header(folder / "model.safetensors", LLAMA_8B.hf_tensors(), "BF16")
    rows = [{"question": f"{i} + {i}?", "answer": f"#### {2 * i}"} for i in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_8b_config_is_checked_whole(assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(assets.parent / "data.jsonl")
    flags = ["--model.hf_assets_path", str(assets), "--task.path", data, "--task.eval_path", data]
    dump = tmp_path / "dump"
    code = main(["--config", "grpo_llama3_8b.toml", "--dry-run", "--job.dump_folder", str(dump), *flags])
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert code == 0
    assert "8.03B parameters" in out
    assert "FSDP2 4" in out
    assert "vLLM x 2, TP 2" in out
    assert "15 GiB per version and replica" in out
    assert not dump.exists()


@pytest.mark.parametrize("name", [name for name in shipped() if "8b" not in name])
def test_every_tiny_config_is_ready(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where a role's folder is not that of an earlier run
    config = load(find(name))
    write_models(config)
    dump = tmp_path / "dump"
    assert main(["--config", name, "--dry-run", "--job.dump_folder", str(dump)]) == 0
    out = capsys.readouterr().out
    assert "dry run" in out
    assert config.algorithm.name in out
    assert [role for role in config.roles if not re.search(rf"^ *{role} +\d", out, re.MULTILINE)] == []
    assert bool(re.search(r"^ *generator +\d", out, re.MULTILINE)) == config.samples_rollouts
    assert not dump.exists()


@pytest.mark.parametrize(
    ("name", "section"),
    [("ppo_reward_model_llama", "reward_model"), ("opd_llama", "teacher"), ("reward_model_llama", "model")],
)
def test_a_model_that_another_config_is_yet_to_train_is_named(
    name: str, section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["--config", name, "--dry-run"])
    assert stop.value.code == 2
    problems = capsys.readouterr().err.splitlines()[1:]
    expected = f"  - {section}.hf_assets_path: expected a Hugging Face folder, found none at outputs/"
    assert any(problem.startswith(expected) for problem in problems)
    assert all(".hf_assets_path: " in problem for problem in problems)


def test_a_reward_model_may_judge_a_run_that_evaluates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_hf(tmp_path / "judge", shape_of(ModelSection()).with_value_head())
    flags = ["--task.reward=model", "--reward_model.hf_assets_path=judge", "--eval.size=0", "--cold_start.stop_at=0"]
    assert main(["--config", "grpo_llama", "--dry-run", *flags]) == 0
    assert "reward_model" in capsys.readouterr().out


def test_a_resumed_run_says_which_keys_are_no_longer_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = tmp_path / "dump"
    (dump / "checkpoint" / "step-3").mkdir(parents=True)
    (dump / "checkpoint" / "step-3" / ".metadata").write_text("whole")
    run = ["--config", "grpo_llama", "--dry-run", "--job.dump_folder", str(dump)]
    (dump / "config.toml").write_text(to_toml(load(find("grpo_llama"))))

    def said(*flags: str) -> str:
        assert main([*run, *flags]) == 0
        return re.sub(r"\s+", " ", capsys.readouterr().out)

    assert "resume from RL step 3" in said()
    assert "changed" not in said()
    lr = load(find("grpo_llama")).optimizer.lr
    said_so = said("--optimizer.lr=0.123", "--optimizer.name=Adam", "--job.description=other")
    assert f'changed optimizer.name = "Adam" (was "AdamW"), optimizer.lr = 0.123 (was {lr}) ' in said_so
    assert "changed" not in said("--optimizer.lr=0.123", "--job.fresh")
    (dump / "config.toml").write_text("[no_such_section]")
    assert "changed" not in said("--optimizer.lr=0.123")


def test_what_is_missing_is_said_all_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--config", "grpo_llama3_8b", "--dry-run", "--training.stepz", "3", "--rollout.group_size", "many"])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "did you mean" in err
    assert "steps" in err
    assert "rollout.group_size" in err
    assert "Traceback" not in err
