import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.folders import write_hf
from titan_rl.config.sections import Config, ModelSection
from titan_rl.config.toml import find, load, shipped, to_toml
from titan_rl.preflight.checks import host_problems, problems, warnings
from titan_rl.preflight.checks.host import CPU_HEAD_DIMS, visible_gpus
from titan_rl.preflight.shapes import shape_of
from titan_rl.tasks import tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder; nothing reads the weights themselves."""
    folder = tmp_path / "model"
    tokenizer.build(folder)
    (folder / "config.json").write_text(json.dumps(shape_of(ModelSection()).hf_config(bos=1, eos=2, pad=0)))
    (folder / "model.safetensors").touch()
    return folder


def config(tmp_path: Path, toml: str) -> Config:
    file = tmp_path / "run.toml"
    file.write_text(toml)
    return load(file)


def rows(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_the_defaults_run() -> None:
    assert (problems(Config()), warnings(Config())) == ([], [])


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[parallelism]\ntensor_parallel_degree = 4", "a divisor of the model's n_kv_heads = 2, found 4"),
        ("[model]\nn_heads = 8\nhead_dim = 16", "model.head_dim: expected a size that vLLM supports on a CPU"),
        (
            '[checkpoint]\nasync_mode = "async_with_pinned_mem"',
            'expected "disabled" or "async" on a CPU',
        ),
        ("[profiling]\nenable_memory_snapshot = true", "enable_memory_snapshot: expected false on a CPU, found true"),
        ("[profiling]\nprofile_freq = 3", "expected at least profiler_warmup + profiler_active = 4, found 3"),
        ('[override]\nimports = ["no_such.module.f"]', 'of a module that can be imported, found "no_such.module.f"'),
        ('[override]\nimports = ["function"]', 'override.imports: expected "module.function"'),
        ("[model]\nhidden_dim = 387\n[parallelism]\ntensor_parallel_degree = 2", "hidden_dim = 387, found 2"),
        ("[model]\nvocab_size = 65\n[parallelism]\ntensor_parallel_degree = 2", "vocab_size = 65, found 2"),
        (
            "[training]\nseq_len = 255\n[parallelism]\ntensor_parallel_degree = 2",
            "training.seq_len: expected a multiple of parallelism.tensor_parallel_degree = 2 (sequence parallelism)",
        ),
        (
            "[generator]\ntensor_parallel_degree = 8",
            "generator.tensor_parallel_degree: expected a divisor of the model's n_heads = 4, found 8",
        ),
        ("[model]\nhidden_dim = 386\n[generator]\ntensor_parallel_degree = 4", "hidden_dim = 386, found 4"),
        (
            "[model]\ndim = 192\nn_heads = 6\nn_kv_heads = 3\n[generator]\ntensor_parallel_degree = 2",
            "a divisor or a multiple of the model's n_kv_heads = 3, found 2",
        ),
        (
            "[hosts]\nslots = 3\n[parallelism]\ndata_parallel_shard_degree = 2\n[generator]\nreplicas = 2",
            "hosts.slots: expected room for 4 processes (2 of the trainer, 2 of the generators), found 3",
        ),
        ("[generator]\nreplicas = 16", "found 16; raise it, or lower the parallel degrees"),
        (
            "[eval]\nsize = 0\n[cold_start]\nsteps = 9\nstop_at = 0.5",
            "cold_start.stop_at: expected 0, because eval.size = 0 leaves no problems to measure it on, found 0.5",
        ),
        ('[hosts]\ndevice = "cuda"', 'hosts.device: expected "auto" or "cpu" on a host without GPUs, found "cuda"'),
        (
            "[rollout]\nmax_new_tokens = 250",
            "training.seq_len: expected at least 257 (a prompt of 7 and rollout.max_new_tokens = 250), found 256",
        ),
        ("[generator]\nmax_model_len = 70", "generator.max_model_len: expected at least 71"),
        (
            "[generator]\nmax_model_len = 4096",
            "generator.max_model_len: expected at most the model's max_seq_len = 2048",
        ),
        ("[training]\nseq_len = 4096", "training.seq_len: expected at most the model's max_seq_len = 2048, found 4096"),
        (
            "[rollout]\ngroup_size = 1",
            'rollout.group_size: expected at least 2, because algorithm.advantage = "group" compares the samples of a '
            "group, found 1",
        ),
        ('[model]\nname = "qwen3"\ndim = 130', "model.dim: expected a multiple of n_heads = 4, because head_dim is 0"),
        ("[model]\ndim = 130", "model.dim: expected head_dim x n_heads"),
        ("[model]\nhead_dim = 64", "head_dim x n_heads = 64 x 4, as TorchTitan's Llama 3 requires, found 128"),
        ('[model]\nname = "qwen3"\nhead_dim = 33', "model.head_dim: expected an even number"),
        ("[model]\nn_kv_heads = 3", "model.n_kv_heads: expected a divisor of the model's 4 heads, found 3"),
        ("[model]\nvocab_size = 10", "model.vocab_size: expected at least the built-in tokenizer's 52, found 10"),
        ('[model]\nflavor = "8"', "model.flavor: expected a dense llama3 (debugmodel, 1B,"),
        ('[model]\nname = "qwen3"\nflavor = "30B-A3B"', "model.flavor: expected a dense qwen3 (debugmodel,"),
        ('[model]\nhf_assets_path = "/no/such"', "model.hf_assets_path: expected a Hugging Face folder, found none at"),
        ("[checkpoint]\nkeep_latest_k = 1", "checkpoint.keep_latest_k: expected 0 (all) or at least 2"),
        ("[training]\nsteps = 0", "training.steps: expected at least 1, because cold_start.steps is 0 too, found 0"),
        ("[eval]\nsize = 2001", "eval.size: expected at most 2000 of addition's 10,000 sums, found 2001"),
        ("[generator]\nblock_size = 16", "generator.block_size: expected a multiple of 32 on a CPU, found 16"),
        (
            "[model]\nn_layers = 64\n[training]\nseq_len = 2048\n[generator]\nkv_cache_memory_mb = 32",
            "generator.kv_cache_memory_mb: expected at least 65, the KV cache of one sequence of 2048 tokens, found 32",
        ),
        (
            '[task]\nreward = "exct"',
            'task.reward: expected "exact", "last_number", "model" or "package.module:function"',
        ),
        ('[task]\nreward = "no_such:f"', "No module named 'no_such'"),
        ('[task]\nreward = "json:no_such"', "module 'json' has no attribute 'no_such'"),
        (
            '[task]\nname = "jsonl"\n[eval]\nsize = 0',
            'task.path: expected a JSONL file for task.name = "jsonl", found ""',
        ),
    ],
)
def test_one_problem(tmp_path: Path, toml: str, message: str) -> None:
    (problem,) = problems(config(tmp_path, toml))
    assert message in problem


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            'name = "rloo"\n[rollout]\ngroup_size = 1',
            'rollout.group_size: expected at least 2, because algorithm.advantage = "leave_one_out" compares',
        ),
        (
            'advantage = "leave_one_out"',
            'algorithm.normalize: expected "none" or "batch", because algorithm.advantage = "leave_one_out" is not '
            'relative to the group, found "group"',
        ),
        ('advantage = "return"', 'because algorithm.advantage = "return" is not relative to the group, found "group"'),
        (
            'name = "reinforce_pp"\ndynamic_sampling = true\n[rollout]\ngroup_size = 1',
            "algorithm.dynamic_sampling: expected false, because all rewards of a group are equal with "
            "rollout.group_size = 1, found true",
        ),
        (
            "dual_clip = 1.25\nclip_high = 0.28",
            "algorithm.dual_clip: expected a value above 1 + clip_high = 1.28, or 0 for off, found 1.25",
        ),
        (
            'name = "cispo"\ndual_clip = 6',
            'algorithm.dual_clip: expected 0, because algorithm.clip is "cispo", found 6',
        ),
        (
            "correction_low = 2",
            "algorithm.correction_low: expected a value below algorithm.correction_high = 2, found 2",
        ),
        (
            "rejection_high = 0.25",
            "algorithm.rejection_low: expected a value below algorithm.rejection_high = 0.25, found 0.5",
        ),
        (
            'correction = "token_tis"',
            'algorithm.proximal: expected "trainer", because with algorithm.correction = "token_tis" the ratio would',
        ),
        ("minibatches = 3", "algorithm.minibatches: expected a divisor of rollout.groups_per_step = 16, found 3"),
        (
            "overlong_buffer = 65",
            "algorithm.overlong_buffer: expected at most rollout.max_new_tokens = 64, found 65",
        ),
        (
            'name = "reward_model"\n[cold_start]\nsteps = 5',
            "cold_start.steps: expected 0, because a reward model generates no answers, found 5",
        ),
        (
            'kl_coef = 0.5\n[reference]\nmesh = "none"',
            'reference.mesh: expected "trainer" or "own", because algorithm.kl_coef = 0.5 needs a reference, '
            'found "none"',
        ),
        (
            'name = "dpo"\n[reference]\nmesh = "none"',
            'reference.mesh: expected "trainer" or "own", because algorithm.name = "dpo" needs a reference, '
            'found "none"',
        ),
        (
            'name = "ppo"',
            'critic.lr: expected a value above 0, because algorithm.name = "ppo" trains a critic, found 0',
        ),
        (
            'name = "opd"',
            'teacher.hf_assets_path: expected a Hugging Face folder, required by algorithm.name = "opd", found ""',
        ),
        (
            'name = "opd"\n[teacher]\nhf_assets_path = "/no/such"',
            "teacher.hf_assets_path: expected a Hugging Face folder, found none at /no/such",
        ),
        (
            '[task]\nreward = "model"\neval_reward = "exact"',
            'reward_model.hf_assets_path: expected a Hugging Face folder, required by task.reward = "model", found ""',
        ),
        (
            '[task]\neval_reward = "model"',
            'task.eval_reward: expected a reward other than "model", because a reward model',
        ),
        ('[task]\neval_reward = "exct"', 'task.eval_reward: expected "exact", "last_number"'),
        ('[task]\neval_reward = "no_such:f"', "task.eval_reward = 'no_such:f': No module named 'no_such'"),
        (
            'name = "sft"\n[task]\nreward = "model"',
            'task.eval_reward: expected a reward for the held-out answers, because task.reward is "model"',
        ),
        (
            'kl_coef = 0.5\n[reference]\nmesh = "own"\ntensor_parallel_degree = 4',
            "reference.tensor_parallel_degree: expected a divisor of the model's n_kv_heads = 2, found 4",
        ),
        (
            'name = "ppo"\n[critic]\nlr = 1e-3\ndata_parallel_shard_degree = 15',
            "hosts.slots: expected room for 17 processes (1 of the trainer, 1 of the generators, 15 of the critic)",
        ),
    ],
)
def test_one_problem_of_an_algorithm_or_its_roles(tmp_path: Path, toml: str, message: str) -> None:
    (problem,) = problems(config(tmp_path, f"[algorithm]\n{toml}"))
    assert message in problem


def test_every_problem_of_an_algorithm_at_once(tmp_path: Path) -> None:
    toml = """
        [algorithm]
        name = "ppo"
        normalize = "group"
        dynamic_sampling = true
        dual_clip = 1.125
        clip = "none"
        correction = "token_mask"
        correction_low = 3
        rejection_low = 3
        minibatches = 5
        overlong_buffer = 100
        kl_coef = 0.1
        [rollout]
        group_size = 1
        [reference]
        mesh = "none"
        [task]
        reward = "model"
    """
    keys = [problem.split(":")[0] for problem in problems(config(tmp_path, toml))]
    assert keys == [
        "algorithm.normalize",
        "algorithm.dynamic_sampling",
        "algorithm.dual_clip",
        "algorithm.dual_clip",
        "algorithm.correction_low",
        "algorithm.rejection_low",
        "algorithm.proximal",
        "algorithm.minibatches",
        "algorithm.overlong_buffer",
        "reference.mesh",
        "critic.lr",
        "reward_model.hf_assets_path",
        "task.eval_reward",
    ]


@pytest.mark.parametrize(
    "toml",
    [
        'name = "ppo"\n[critic]\nlr = 1e-3\n[rollout]\ngroup_size = 1',  # its baseline is the critic
        'name = "reinforce_pp"\n[rollout]\ngroup_size = 1',
        'correction = "token_tis"\nproximal = "trainer"',
        'rejection = "geometric"',
        "dual_clip = 3",
        "minibatches = 4\nepochs = 3",
        "overlong_buffer = 64",
        '[reference]\nmesh = "none"',  # nothing needs one
        'name = "sft"\nminibatches = 3\ndual_clip = 0.5',  # keys of RL
        'name = "reward_model"\n[task]\nreward = "model"',  # it is judged by the order of pairs
        'name = "reward_model"\n[hosts]\nslots = 1',  # it has no generators
        'name = "dpo"\n[eval]\nsize = 0\n[hosts]\nslots = 1',
    ],
)
def test_no_problem_of_an_algorithm(tmp_path: Path, toml: str) -> None:
    assert problems(config(tmp_path, f"[algorithm]\n{toml}")) == []


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


@roles
def test_a_role_with_another_tokenizer_is_refused(tmp_path: Path, role: str) -> None:
    folder = role_folder(tmp_path, role)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["+"], vocabulary["-"] = vocabulary["-"], vocabulary["+"]  # as many ids, but other texts
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


def test_k1_in_the_loss_is_warned_of(tmp_path: Path) -> None:
    (warning,) = warnings(config(tmp_path, '[algorithm]\nkl_coef = 0.1\nkl = "k1"'))
    assert warning.startswith('algorithm.kl is "k1" in the loss: its gradient is zero on average')
    for silent in ('kl = "k1"', 'kl_coef = 0.1\nkl = "k1"\nkl_in = "reward"', 'kl_coef = 0.1\nkl = "k2"'):
        assert warnings(config(tmp_path, f"[algorithm]\n{silent}")) == []


@pytest.mark.parametrize(
    "toml",
    [
        "[generator]\ntensor_parallel_degree = 4",  # twice as many ranks as kv heads: each kv head on two of them
        "[model]\nn_kv_heads = 4\n[generator]\ntensor_parallel_degree = 2",
        "[training]\nseq_len = 255\n[parallelism]\ntensor_parallel_degree = 2\nenable_sequence_parallel = false",
        "[training]\nseq_len = 71",
        "[generator]\nmax_model_len = 71\nkv_cache_memory_mb = 1",
        '[model]\nname = "qwen3"\nhead_dim = 64',
        '[task]\ntemplate = "chat"\n[training]\nseq_len = 65',  # what a chat template adds is not known yet
        '[model]\nflavor = "debugmodel"\n[hosts]\nslots = 2\ndevice = "cuda"',
        "[eval]\nsize = 0",
        "[training]\nsteps = 0\n[cold_start]\nsteps = 1",
    ],
)
def test_no_problem(tmp_path: Path, toml: str) -> None:
    assert problems(config(tmp_path, toml), gpus=2 if "cuda" in toml else 0) == []


def test_a_window_needs_something_to_overtake_and_fixed_places(tmp_path: Path) -> None:
    (problem,) = problems(config(tmp_path, "[rollout]\nwindow = 2"))
    assert problem == "rollout.window: expected 0, because rollout.lag = 0 leaves nothing to overtake, found 2"
    (problem,) = problems(config(tmp_path, '[rollout]\nlag = 1\nwindow = 2\n[algorithm]\nname = "dapo"'))
    assert problem.startswith("rollout.window: expected 0 with algorithm.dynamic_sampling, because replaced groups")


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ('[algorithm]\nname = "reinforce_pp"', 'algorithm.normalize is "batch"'),
        ("[algorithm]\nminibatches = 2", "a step has several updates"),
        ('[algorithm]\nname = "dapo"', "algorithm.dynamic_sampling replaces groups"),
        ('[placement]\nkind = "colocated"', 'placement.kind is "colocated"'),
        ("[rollout]\nlag = 1\nwindow = 1", "rollout.window lets groups overtake each other"),
    ],
)
def test_streaming_needs_groups_that_stand_alone(tmp_path: Path, toml: str, why: str) -> None:
    (problem,) = problems(config(tmp_path, f"{toml}\n[training]\nstream_groups = 2"))
    assert problem == f"training.stream_groups: expected 0, because {why}, found 2"


def test_colocated_engines_cannot_drain(tmp_path: Path) -> None:
    toml = '[placement]\nkind = "colocated"\n[weight_sync]\nin_flight = "drain"\n'
    assert problems(config(tmp_path, toml)) == []  # without a lag nothing is in flight
    (problem,) = problems(config(tmp_path, f"{toml}[rollout]\nlag = 1"))
    assert problem.startswith('weight_sync.in_flight: expected "swap", because engines sleep')


def test_colocated_meshes_share_gpus(tmp_path: Path) -> None:
    toml = "[parallelism]\ndata_parallel_shard_degree = 2\n"
    (problem,) = problems(config(tmp_path, toml), gpus=2)
    assert "hosts.slots" in problem
    assert problems(config(tmp_path, toml + '[placement]\nkind = "colocated"'), gpus=2) == []
    (problem,) = problems(config(tmp_path, toml + '[placement]\nkind = "colocated"'), gpus=1)
    assert "2 GPUs (2 of the trainer, 1 of the generators; trainer and generators share GPUs)" in problem


def test_a_run_that_goes_on_keeps_its_order_of_prompts_and_its_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    here = f'[job]\ndump_folder = "{run}"\n'
    (run / "checkpoint" / "step-2").mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(config(tmp_path, here)))
    other = "[debug]\nseed = 3\n[eval]\nsize = 7\n[model]\nn_layers = 2"
    assert problems(config(tmp_path, here + other)) == []  # nothing to resume
    (run / "checkpoint" / "step-2" / ".metadata").write_text("")
    assert problems(config(tmp_path, here)) == []
    seed, size, model = problems(config(tmp_path, here + other))
    assert seed == f"debug.seed: expected 0, as in the run in {run} (or --job.fresh to start from scratch), found 3"
    assert size.startswith("eval.size: expected 256")
    assert model.startswith(f"[model]: expected the same shape as in the run in {run}")
    assert problems(config(tmp_path, f'[job]\nfresh = true\ndump_folder = "{run}"\n{other}')) == []


def test_every_problem_at_once(tmp_path: Path) -> None:
    toml = '[model]\nhf_assets_path = "/no/such"\n[task]\nname = "jsonl"\nreward = "x"\n[rollout]\ngroup_size = 1'
    keys = [problem.split(":")[0] for problem in problems(config(tmp_path, toml))]
    expected = ["model.hf_assets_path", "task.reward", "task.path", "task.eval_path", "rollout.group_size"]
    assert keys == expected


def test_gpus_are_slots(tmp_path: Path) -> None:
    two = config(tmp_path, "[parallelism]\ndata_parallel_shard_degree = 2\n[generator]\nblock_size = 16")
    assert problems(two, gpus=3) == []
    (problem,) = host_problems(two, gpus=2)
    assert "room for 3 processes (2 of the trainer, 1 of the generators), found 2" in problem
    (problem,) = host_problems(replace(two, hosts=replace(two.hosts, slots=8)), gpus=2)
    assert problem.startswith("hosts.slots: expected a GPU for each of 3 processes")
    on_cpu = replace(two, hosts=replace(two.hosts, device="cpu"), generator=replace(two.generator, block_size=32))
    assert problems(on_cpu, gpus=2) == []


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[generator]\ndtype = "bfloat16"', "generator.dtype is bfloat16, training.mixed_precision_param is float32"),
        ("[rollout]\ntop_p = 0.9", "rollout.top_p is 0.9"),
    ],
)
def test_warnings(tmp_path: Path, toml: str, message: str) -> None:
    found = config(tmp_path, toml)
    assert problems(found) == []
    (warning,) = warnings(found)
    assert warning.startswith(message)


def test_a_whole_hugging_face_folder(tmp_path: Path, folder: Path) -> None:
    assert problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"')) == []


def edit(path: Path, **changes: Any) -> None:
    kept = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "model.hf_assets_path: expected a usable"),
        (lambda f: (f / "config.json").write_text("{"), "config.json, found Expecting property name"),
        (lambda f: edit(f / "config.json", model_type="gpt2"), 'expected llama or qwen3, found "gpt2"'),
        (lambda f: edit(f / "config.json", vocab_size=40), "a vocab_size of at least the tokenizer's 52"),
        (lambda f: (f / "model.safetensors").unlink(), "expected *.safetensors"),
        (lambda f: (f / "tokenizer.json").unlink(), "model.hf_assets_path: expected a tokenizer"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "model.hf_assets_path: expected a tokenizer"),
        (lambda f: edit(f / "tokenizer_config.json", chat_template=None), 'task.template: expected "plain"'),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "expected a weight_map in"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "a.safetensors", "b": "model.safetensors"}}'
            ),
            "model.safetensors.index.json, found no a.safetensors",
        ),
    ],
)
def test_an_incomplete_hugging_face_folder(tmp_path: Path, folder: Path, broken: Any, message: str) -> None:
    broken(folder)
    toml = f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"'
    (problem,) = problems(config(tmp_path, toml))
    assert message in problem


def test_a_chat_template_of_its_own_file(tmp_path: Path, folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"')) == []


def test_a_flavor_and_a_folder(tmp_path: Path, folder: Path) -> None:
    (problem,) = problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"\nflavor = "8B"'))
    assert problem == 'model.flavor: expected "", because model.hf_assets_path is set, found "8B"'


GOOD = {"question": "1+1=", "answer": "2"}
CHAT = {"question": [{"role": "user", "content": "1+1="}], "answer": "2"}


@pytest.mark.parametrize(
    ("lines", "toml", "message"),
    [
        ([GOOD, "{"], "", "train.jsonl:2: expected a JSON object, found"),
        (
            [GOOD, {"question": "2", "reply": "3"}],
            "",
            "train.jsonl:2: expected task.answer_key = 'answer', found the col",
        ),
        ([{"prompt": "2", "answer": "3"}], "", "['answer', 'prompt']"),
        ([], "", "task.path: expected at least one row"),
        ([CHAT], "", 'task.template: expected "chat" for the messages in row 1'),
        ([GOOD, GOOD | {"answer": " "}], "[cold_start]\nsteps = 3", "cold_start.steps: expected 0, because row 2 of"),
        ([GOOD | {"answer": "two"}], 'reward = "last_number"', "expected a number in the answer of row 1 of"),
    ],
)
def test_rows(tmp_path: Path, lines: list[Any], toml: str, message: str) -> None:
    train = rows(tmp_path / "train.jsonl", *lines)
    heldout = rows(tmp_path / "test.jsonl", GOOD)
    text = f'[task]\nname = "jsonl"\npath = "{train}"\neval_path = "{heldout}"\n{toml}'
    (problem,) = problems(config(tmp_path, text))
    assert message in problem


def test_good_rows(tmp_path: Path) -> None:
    train = rows(tmp_path / "train.jsonl", GOOD, "", *[GOOD] * 100, "beyond what is read")
    text = f'[task]\nname = "jsonl"\npath = "{train}"\nreward = "last_number"\n[cold_start]\nsteps = 3\n[eval]\nsize = '
    assert problems(config(tmp_path, text + "0")) == []
    (problem,) = problems(config(tmp_path, text + "8"))
    assert problem.startswith("task.eval_path: expected a JSONL file for eval.size = 8")
    chat = rows(tmp_path / "chat.jsonl", CHAT)
    text = f'[task]\nname = "jsonl"\ntemplate = "chat"\npath = "{chat}"\n[eval]\nsize = 0'
    assert problems(config(tmp_path, text)) == []


def test_pairs_are_read_by_their_own_columns(tmp_path: Path) -> None:
    pair = {"question": "1+1=", "chosen": "2", "rejected": "3"}
    for name in ("dpo", "ipo", "reward_model"):
        text = f'[algorithm]\nname = "{name}"\n[eval]\nsize = 0\n[task]\nname = "jsonl"\npath = '
        good = text + f'"{rows(tmp_path / "good.jsonl", pair)}"'
        assert problems(config(tmp_path, good)) == []
        (problem,) = problems(config(tmp_path, text + f'"{rows(tmp_path / "bad.jsonl", pair, GOOD)}"'))
        assert "bad.jsonl:2: expected task.chosen_key = 'chosen', found the columns" in problem


def test_a_reward_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reward.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = problems(config(tmp_path, '[task]\nreward = "broken_reward:f"'))
    assert problem.endswith('expected "broken_reward:f" to import, found ZeroDivisionError: division by zero')


def test_head_dims_are_those_of_the_cpu_kernels() -> None:
    """vLLM's own tensors, no model: the kernels refuse a size by name."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is built for a GPU")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

    def runs(size: int) -> bool:
        key, cache = torch.zeros(1, 1, size), torch.zeros(1, 1, 32, size)
        slot = torch.zeros(1, dtype=torch.int64)
        try:
            ops.cpu_attn_reshape_and_cache(key, key, cache, cache.clone(), slot, _get_attn_isa(key.dtype, 32, size))
        except RuntimeError as error:
            if "Unsupported CPU attention configuration" not in str(error):
                raise
            return False
        return True

    supported = CPUAttentionBackend.get_supported_head_sizes()  # the kernels take 48 too, of which vLLM says nothing
    assert tuple(size for size in range(8, 520, 8) if runs(size) and size in supported) == CPU_HEAD_DIMS


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 2), ("", 0), ("-1", 0), ("0", 1), ("1, 0", 2), ("0,7,1", 1), ("GPU-1a2b", 1), ("x", 0)],
)
def test_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int) -> None:
    """An nvidia-smi of two GPUs, one of them split."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: A (UUID: GPU-1)\n  MIG 1g Device 0: (UUID: MIG-1)\nGPU 1: A (UUID: GPU-2)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == expected


@pytest.mark.parametrize("name", shipped())
def test_shipped_configs_need_at_most_files_and_gpus(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # else the folders of an earlier run may be found
    found = problems(load(find(name)), gpus=8)
    sections = ("model", "teacher", "reward_model", "critic")
    models = tuple(f"{section}.hf_assets_path: expected a Hugging Face folder" for section in sections)
    assert all(problem.startswith((*models, "task.path: ", "task.eval_path: ")) for problem in found), found
