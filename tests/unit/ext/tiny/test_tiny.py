"""--scale tiny: what changes, what stays, and that the result is ready to run."""

import json
import re
from pathlib import Path

import pytest

from support.folders import write_header, write_hf
from support.shapes import LLAMA_8B, QWEN_600M
from support.shipped_configs import REPRESENTATIVES, slow_except
from titan_rl.config.changes import valued
from titan_rl.config.sections import Config, ModelSection
from titan_rl.config.toml import find, load, shipped
from titan_rl.ext.tiny.shrink import AT_MOST, DEGREES, TINY_PARAMETERS, shrunk
from titan_rl.preflight.pretrained import with_models
from titan_rl.preflight.shapes import shape_of
from titan_rl.run import main
from titan_rl.text import tokenizer as characters

CLUSTER = "grpo_llama3_70b"


def tiny(config: Config, folder: Path, *given: str) -> Config:
    return shrunk(config, given, folder)[0]


def changes(printed: str) -> dict[str, str]:
    """Return what --scale printed, by key."""
    return dict(re.findall(r"^  ([a-z_]+\.[a-z0-9_]+): (.* -> .*)$", printed, re.MULTILINE))


@pytest.mark.parametrize("name", slow_except(REPRESENTATIVES, shipped()))
def test_every_shipped_config_is_ready_at_tiny_scale(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On this machine, with none of the files that it names."""
    monkeypatch.chdir(tmp_path)
    assert main(["--config", name, "--dry-run", "--scale", "tiny"]) == 0
    out = capsys.readouterr().out
    assert "dry run" in out
    assert "no effect" not in out  # of keys that --scale sets
    assert changes(out)["job.dump_folder"].endswith('_tiny"')
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", shipped())
def test_the_structure_stays(name: str, tmp_path: Path) -> None:
    before = load(find(name))
    after = tiny(before, tmp_path)
    assert after.roles.keys() == before.roles.keys()
    assert after.rollout_code == before.rollout_code
    assert after.placement.kind == before.placement.kind
    assert (after.hosts.number > 1) == (before.hosts.number > 1)
    for was, now in ((before.algorithm, after.algorithm), (before.optimizer, after.optimizer)):
        kept = {key for key in type(was).__dataclass_fields__ if getattr(was, key) == getattr(now, key)}
        assert set(type(was).__dataclass_fields__) - kept <= {"max_dead_steps", "overlong_buffer", "minibatches"}
    meshes = [(before.parallelism, after.parallelism)]
    meshes += [(role.parallelism, after.roles[mesh].parallelism) for mesh, role in before.roles.items()]
    for was, now in meshes:
        assert [getattr(now, key) for key in DEGREES] == [min(2, getattr(was, key)) for key in DEGREES]
    assert after.generator.tensor_parallel_degree == min(2, before.generator.tensor_parallel_degree)
    assert shape_of(with_models(after).model).parameters <= TINY_PARAMETERS
    assert after.training.steps == before.training.steps
    assert all(valued(after, key) <= most for key, most in AT_MOST.items())


def test_a_model_that_sees_and_its_rows_have_stand_ins_that_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "charts.toml").write_text("""
        task = {name = "jsonl", path = "a.parquet", eval_path = "b.parquet", prompt_key = "chart", template = "chat"}
        model = {hf_assets_path = "SmolVLM-256M-Instruct", vision = "all"}
        algorithm.name = "gspo"
    """)
    run = ["--config", "charts.toml", "--dry-run", "--scale", "tiny"]
    assert main(run) == 0
    printed = changes(capsys.readouterr().out)
    assert printed["model.hf_assets_path"] == '"SmolVLM-256M-Instruct" -> "fetch:tiny_vision"'
    assert printed["task.images_key"] == '"" -> "image"'
    assert printed["task.name"].endswith('squares:counted"')


def test_what_is_given_stays_and_what_changes_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--generator.replicas", "3", "--rollout.group_size=8", "--job.dump_folder", "here"]
    assert main(["--config", CLUSTER, "--dry-run", "--scale=tiny", *given]) == 0
    printed = changes(capsys.readouterr().out)
    assert printed.keys().isdisjoint({"generator.replicas", "rollout.group_size", "job.dump_folder", "training.steps"})
    assert printed["hosts.count"] == "8 -> 2"
    assert printed["hosts.kind"] == '"attach" -> "processes"'
    assert printed["parallelism.tensor_parallel_degree"] == "8 -> 2"
    assert printed["task.name"] == '"jsonl" -> "addition"'


def test_another_scale_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--scale", "huge"], ["--scale"], ["--scale="]):
        with pytest.raises(SystemExit) as stop:
            main(["--config", "grpo_llama", "--dry-run", *argv])
        assert stop.value.code == 2
        assert '--scale: expected "tiny", found "' in capsys.readouterr().err


def test_a_folder_says_which_family_is_shrunk(tmp_path: Path) -> None:
    characters.build(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_600M.hf_config(bos=1, eos=2, pad=0)))
    write_header(tmp_path / "model.safetensors", QWEN_600M.hf_tensors(), "BF16")
    config = load(find("grpo_llama3_8b"), [("model.hf_assets_path", str(tmp_path)), ("model.name", "auto")])
    model = tiny(config, tmp_path).model
    assert (model.name, model.enable_weight_tying, model.hf_assets_path) == ("qwen3", True, "")


def test_a_tiny_model_and_rows_that_exist_are_used(tmp_path: Path) -> None:
    folder = str(write_hf(tmp_path / "model", shape_of(ModelSection())))
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 20)
    flags = [
        ("model.hf_assets_path", folder),
        *((f"task.{key}", f"{tmp_path}/rows.jsonl") for key in ("path", "eval_path")),
    ]
    after = tiny(load(find("grpo_llama3_8b"), flags), tmp_path)
    assert after.model.hf_assets_path == folder
    assert (after.task.name, after.task.path, after.task.bad_rows) == ("jsonl", f"{tmp_path}/rows.jsonl", "drop")


def test_a_model_that_cannot_run_is_not_replaced_by_one_that_can(tmp_path: Path) -> None:
    """A mixture of experts is refused at any scale."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    config = load(find("grpo_llama3_8b"), [("model.hf_assets_path", str(tmp_path))])
    assert tiny(config, tmp_path).model == config.model


def test_large_dimensions_are_shrunk_too(tmp_path: Path) -> None:
    flags = [("model.dim", "4096"), ("model.n_heads", "32"), ("model.n_layers", "32"), ("model.hidden_dim", "14336")]
    after = tiny(load(find("grpo_llama"), flags), tmp_path)
    assert shape_of(with_models(after).model).parameters <= TINY_PARAMETERS
    assert tiny(load(find("grpo_llama")), tmp_path).model == load(find("grpo_llama")).model


def test_a_role_without_its_folder_gets_a_random_model_that_is_the_same_each_time(tmp_path: Path) -> None:
    config = load(find("ppo_reward_model_llama"))
    for number in "12":
        after = tiny(config, tmp_path / number)
        assert after.reward_model.hf_assets_path == str(tmp_path / number / "reward_model")
        assert after.critic.hf_assets_path == ""
    first, second = ((tmp_path / number / "reward_model/model.safetensors").read_bytes() for number in "12")
    assert first == second
    assert LLAMA_8B.parameters > TINY_PARAMETERS
