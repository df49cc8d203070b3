import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_rl import tokenizer
from titan_rl.checks import CPU_HEAD_DIMS, host_problems, problems, visible_gpus, warnings
from titan_rl.config import Config, Model, Rollout
from titan_rl.config_file import find, load, shipped
from titan_rl.model_shape import shape_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder; nothing reads the weights themselves."""
    folder = tmp_path / "model"
    tokenizer.build(folder)
    (folder / "config.json").write_text(json.dumps(shape_of(Model()).hf_config(bos=1, eos=2, pad=0)))
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
        ("[model]\nn_heads = 8\nhead_dim = 16", "model.head_dim: expected one that vLLM has CPU kernels for"),
        ("[model]\nhidden_dim = 387\n[parallelism]\ntensor_parallel_degree = 2", "hidden_dim = 387, found 2"),
        ("[model]\nvocab_size = 65\n[parallelism]\ntensor_parallel_degree = 2", "vocab_size = 65, found 2"),
        (
            "[training]\nseq_len = 255\n[parallelism]\ntensor_parallel_degree = 2",
            "training.seq_len: expected a multiple of parallelism.tensor_parallel_degree = 2 (sequence parallel)",
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
        ("[generator]\nreplicas = 16", "found 16; lower their degrees or raise it"),
        (
            "[eval]\nsize = 0\n[cold_start]\nsteps = 9\nstop_at = 0.5",
            "cold_start.stop_at: expected 0 where eval.size is 0",
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
            "rollout.group_size: expected at least 2, for group-relative advantages, found 1",
        ),
        ('[model]\nname = "qwen3"\ndim = 130', "model.dim: expected a multiple of n_heads = 4 where head_dim is 0"),
        ("[model]\ndim = 130", "model.dim: expected head_dim x n_heads"),
        ("[model]\nhead_dim = 64", "as TorchTitan's Llama 3 requires (64 x 4), found 128"),
        ('[model]\nname = "qwen3"\nhead_dim = 33', "model.head_dim: expected an even size"),
        ("[model]\nn_kv_heads = 3", "model.n_kv_heads: expected a divisor of the model's 4 heads, found 3"),
        ("[model]\nvocab_size = 10", "model.vocab_size: expected at least the built-in tokenizer's 52, found 10"),
        ('[model]\nflavor = "8"', "model.flavor: expected a dense llama3 (debugmodel, 1B,"),
        ('[model]\nname = "qwen3"\nflavor = "30B-A3B"', "model.flavor: expected a dense qwen3 (debugmodel,"),
        ('[model]\nhf_assets_path = "/no/such"', "model.hf_assets_path: expected a Hugging Face folder, found none at"),
        ("[checkpoint]\nkeep_latest_k = 1", "checkpoint.keep_latest_k: expected 0 (all) or at least 2"),
        ("[training]\nsteps = 0", "training.steps: expected at least 1 where cold_start.steps is 0, found 0"),
        ("[eval]\nsize = 2001", "eval.size: expected at most 2000 of addition's 10,000 sums, found 2001"),
        ("[generator]\nblock_size = 16", "generator.block_size: expected a multiple of 32 on a CPU, found 16"),
        (
            "[model]\nn_layers = 64\n[training]\nseq_len = 2048\n[generator]\nkv_cache_memory_mb = 32",
            "generator.kv_cache_memory_mb: expected at least 65, which one sequence of 2048 tokens takes, found 32",
        ),
        ('[task]\nreward = "exct"', 'task.reward: expected "exact", "last_number" or "package.module:function"'),
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


def test_lag_of_a_config_made_in_code() -> None:
    (problem,) = problems(replace(Config(), rollout=Rollout(lag=1)))
    assert problem == "rollout.lag: expected 0, exact on-policy training, found 1"


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


def test_flavor_beside_a_folder(tmp_path: Path, folder: Path) -> None:
    (problem,) = problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"\nflavor = "8B"'))
    assert problem == 'model.flavor: expected "" beside model.hf_assets_path, found "8B"'


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
        ([GOOD, GOOD | {"answer": " "}], "[cold_start]\nsteps = 3", "cold_start.steps: expected 0, as row 2 of"),
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
def test_shipped_configs_need_at_most_files_and_gpus(name: str) -> None:
    found = problems(load(find(name)), gpus=8)
    files = ("model.hf_assets_path: expected a Hugging Face folder", "task.path: ", "task.eval_path: ")
    assert all(problem.startswith(files) for problem in found), found
