import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.checked_configs import config
from support.folders import write_header, write_hf
from titan_rl.config.sections import ModelSection
from titan_rl.preflight.checks import problems
from titan_rl.preflight.shapes import shape_of

ROLES = {
    "teacher": '[algorithm]\nname = "opd"\n[teacher]\nhf_assets_path = "{}"\n',
    "critic": '[algorithm]\nname = "ppo"\n[critic]\nlr = 1e-3\nhf_assets_path = "{}"\n',
    "reward_model": '[task]\nreward = "model"\neval_reward = "exact"\n[reward_model]\nhf_assets_path = "{}"\n',
}
roles = pytest.mark.parametrize("role", ROLES)


def role_folder(tmp_path: Path, role: str, **changes: Any) -> Path:
    shape = replace(shape_of(ModelSection()), **changes)
    return write_hf(tmp_path / role, shape.with_value_head() if role == "reward_model" else shape)


@roles
def test_a_role_of_the_policys_shape_and_tokenizer_fits(tmp_path: Path, role: str) -> None:
    assert problems(config(tmp_path, ROLES[role].format(role_folder(tmp_path, role)))) == []


def test_a_critic_may_start_from_a_reward_model(tmp_path: Path) -> None:
    folder = role_folder(tmp_path, "reward_model")
    assert problems(config(tmp_path, ROLES["critic"].format(folder))) == []


@pytest.mark.parametrize(
    ("role", "wanted"),
    [("teacher", "a language model"), ("reward_model", "a reward model (*ForSequenceClassification)")],
)
def test_a_role_of_another_kind_is_refused(tmp_path: Path, role: str, wanted: str) -> None:
    other = "reward_model" if role == "teacher" else "teacher"
    (problem,) = problems(config(tmp_path, ROLES[role].format(role_folder(tmp_path, other))))
    assert problem.startswith(f"{role}.hf_assets_path: expected {wanted}, found another kind of model in ")


@pytest.mark.parametrize("algorithm", ["grpo", "sft", "dpo"])
def test_a_reward_model_is_no_policy(tmp_path: Path, algorithm: str) -> None:
    folder = role_folder(tmp_path, "reward_model")
    toml = f'[model]\nhf_assets_path = "{folder}"\n[algorithm]\nname = '
    (problem,) = problems(config(tmp_path, toml + f'"{algorithm}"'))
    assert problem == (
        f"model.hf_assets_path: expected a language model (*ForCausalLM), found a reward model in {folder}"
    )
    assert problems(config(tmp_path, toml + '"reward_model"')) == [], "it begins with a new head"


def test_weights_without_the_head_that_is_read_are_refused(tmp_path: Path) -> None:
    """config.json names one kind of model, the weights are of another."""
    whole, reward = shape_of(ModelSection()), shape_of(ModelSection()).with_value_head()
    body, head = whole.hf_tensors(head=False), {"lm_head.weight": (whole.vocab_size, whole.dim)}
    folder = role_folder(tmp_path, "teacher")
    toml = f'[model]\nhf_assets_path = "{folder}"\n'
    missing = f"model.hf_assets_path: expected lm_head.weight in the weights of {folder}, because tie_word_embeddings"
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    write_header(folder / "model-1.safetensors", reward.hf_tensors())
    (problem,) = problems(config(tmp_path, toml))
    assert problem == missing + " is false, found none"
    assert problems(config(tmp_path, toml + '[algorithm]\nname = "reward_model"')) == []
    (teacher,) = problems(config(tmp_path, ROLES["teacher"].format(folder)))
    assert teacher.startswith(f"teacher.hf_assets_path: expected lm_head.weight in the weights of {folder}")
    assert problems(config(tmp_path, ROLES["critic"].format(folder))) == [], "a critic has its own head"
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(body | head, "model-1.safetensors")}))
    (problem,) = problems(config(tmp_path, toml))
    assert problem == (
        f"model.hf_assets_path: expected the tensors listed in {index}, found no lm_head.weight in model-1.safetensors"
    )
    index.write_text(json.dumps({"weight_map": dict.fromkeys(body, "model-1.safetensors")}))
    (problem,) = problems(config(tmp_path, toml))
    assert problem.startswith(missing)
    index.unlink()
    write_header(folder / "model-1.safetensors", body)
    write_header(folder / "more.safetensors", head)
    assert problems(config(tmp_path, toml)) == []

    judge = role_folder(tmp_path, "reward_model")
    write_header(judge / "model.safetensors", body | head)
    (problem,) = problems(config(tmp_path, ROLES["reward_model"].format(judge)))
    assert problem.startswith(f"reward_model.hf_assets_path: expected score.weight in the weights of {judge}")


def test_a_tied_model_needs_no_head_of_its_own(tmp_path: Path) -> None:
    folder = role_folder(tmp_path, "teacher", tied=True)
    assert not (folder / "model.safetensors").read_bytes().count(b"lm_head")
    assert problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"')) == []


@roles
def test_a_role_with_another_tokenizer_is_refused(tmp_path: Path, role: str) -> None:
    folder = role_folder(tmp_path, role)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["+"], vocabulary["-"] = vocabulary["-"], vocabulary["+"]  # the same ids, but other texts
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    (problem,) = problems(config(tmp_path, ROLES[role].format(folder)))
    assert problem.startswith(f"{role}.hf_assets_path: expected the policy's tokenizer, found another in {folder}")


@roles
def test_a_role_without_weights_or_tokenizer_is_refused(tmp_path: Path, role: str) -> None:
    folder = role_folder(tmp_path, role)
    found = config(tmp_path, ROLES[role].format(folder))
    (folder / "model.safetensors").unlink()
    assert problems(found) == [f"{role}.hf_assets_path: expected *.safetensors in {folder}, found none"]
    (folder / "tokenizer.json").unlink()
    (problem,) = problems(found)
    assert problem.startswith(f"{role}.hf_assets_path: expected a tokenizer, found ")


def test_a_role_is_held_against_the_policys_own_folder(tmp_path: Path, folder: Path) -> None:
    toml = ROLES["teacher"].format(role_folder(tmp_path, "teacher")) + f'[model]\nhf_assets_path = "{folder}"'
    assert problems(config(tmp_path, toml)) == []


def test_a_teacher_of_another_shape_needs_a_mesh_of_its_own(tmp_path: Path) -> None:
    toml = ROLES["teacher"].format(role_folder(tmp_path, "teacher", n_layers=9))
    assert problems(config(tmp_path, toml)) == []
    (problem,) = problems(config(tmp_path, toml + 'mesh = "trainer"'))
    expected = 'teacher.mesh: expected "own", because teacher and policy differ in shape, found "trainer"'
    assert problem == expected


def test_a_critic_of_another_shape_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(config(tmp_path, ROLES["critic"].format(role_folder(tmp_path, "critic", n_layers=9))))
    assert problem.startswith("critic.hf_assets_path: expected the policy's shape, found another shape in ")


@pytest.mark.parametrize("role", ["teacher", "reward_model"])
def test_a_role_is_cut_by_its_own_dimensions(tmp_path: Path, role: str) -> None:
    """The policy has two kv heads; a larger model beside it may have more, or fewer."""
    larger = ROLES[role].format(role_folder(tmp_path, role, n_kv_heads=4))
    assert problems(config(tmp_path, larger + "tensor_parallel_degree = 4")) == []
    smaller = ROLES[role].format(role_folder(tmp_path, role, n_kv_heads=1))
    (problem,) = problems(config(tmp_path, smaller + "tensor_parallel_degree = 2"))
    assert problem == f"{role}.tensor_parallel_degree: expected a divisor of the model's n_kv_heads = 1, found 2"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('kl_coef = 0.1\nkl_in = "reward"', 'algorithm.kl_in: expected "loss", because'),
        ("overlong_buffer = 8", "algorithm.overlong_buffer: expected 0, because"),
        ('length_reward = "kimi"', 'algorithm.length_reward: expected "none", because'),
    ],
)
def test_a_teacher_leaves_no_reward_to_change(tmp_path: Path, keys: str, message: str) -> None:
    toml = ROLES["teacher"].format(role_folder(tmp_path, "teacher"))
    for harmless in (
        'kl_coef = 0.1\nkl_in = "loss"',
        'kl_in = "reward"',
    ):
        assert problems(config(tmp_path, toml.replace('name = "opd"', f'name = "opd"\n{harmless}'))) == []
    (problem,) = problems(config(tmp_path, toml.replace('name = "opd"', f'name = "opd"\n{keys}')))
    assert problem.startswith(f'{message} algorithm.advantage = "teacher" uses no rewards, found ')


WHOLE = "because algorithm.distill_top_k trains on a divergence over the whole vocabulary"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('distill_top_k = 4\nclip = "ppo"', f'algorithm.clip: expected "none" or "cispo", {WHOLE}, found "ppo"'),
        ('distill_top_k = 4\nnormalize = "batch"', f'algorithm.normalize: expected "none", {WHOLE}, found "batch"'),
        (
            "distill_top_k = 4\n[rollout]\ntop_p = 0.9",
            f"algorithm.distill_top_k: expected 0 with rollout.top_p, top_k or min_p, {WHOLE}, found 4",
        ),
        ("distill_top_k = 9999", "algorithm.distill_top_k: expected at most the vocabulary, 64, found 9999"),
        ("distill_beta = 1.0", "algorithm.distill_beta: expected 0.5, because algorithm.distill_top_k is 0, found 1"),
    ],
)
def test_a_divergence_needs_the_whole_vocabulary(tmp_path: Path, keys: str, message: str) -> None:
    toml = ROLES["teacher"].format(role_folder(tmp_path, "teacher"))
    fine = toml.replace('name = "opd"', 'name = "opd"\ndistill_top_k = 64\ndistill_beta = 0.0\nclip = "cispo"')
    assert problems(config(tmp_path, fine)) == []
    assert problems(config(tmp_path, toml.replace('name = "opd"', f'name = "opd"\n{keys}'))) == [message]


def test_a_divergence_replaces_no_rewards(tmp_path: Path) -> None:
    toml = ROLES["teacher"].format(role_folder(tmp_path, "teacher"))
    toml = toml.replace('name = "opd"', 'teacher_coef = 0.5\ndistill_top_k = 4\nnormalize = "none"')
    found = problems(config(tmp_path, toml.replace("normalize", 'clip = "none"\nnormalize')))
    assert found == ['algorithm.distill_top_k: expected 0 unless algorithm.advantage = "teacher", found 4']
