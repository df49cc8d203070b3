"""--dry-run resolves and checks everything, prints the plan, and leaves the disk as it was."""

import json
import re
import socket
from pathlib import Path

import pytest

from support.folders import write_header, write_hf, write_models
from support.shapes import LLAMA_8B, LLAMA_70B, QWEN_30B_A3B, QWEN_32B, QWEN_600M
from support.shipped_configs import REPRESENTATIVES, features, slow_except
from titan_rl.config.auto import resolved
from titan_rl.config.sections import ModelSection
from titan_rl.config.toml import find, load, shipped, to_toml
from titan_rl.ext.run_plan import sharding
from titan_rl.preflight.shapes import shape_of
from titan_rl.run import main
from titan_rl.text import tokenizer as characters
from titan_rl.wire.model_shape import ModelShape, ShardedModel

GPU_CONFIGS = {
    "grpo_llama3_8b": (LLAMA_8B, ["8.03B parameters", "FSDP2 4", "vLLM x 4", "no byte leaves its host"]),
    "grpo_llama3_8b_colocated": (LLAMA_8B, ["FSDP2 8", "vLLM x 8", "sleeping engine", "waiting trainer"]),
    "grpo_llama3_8b_lora_24gb": (
        LLAMA_8B,
        ["41.9M trained parameters (0.52%), 160 MiB", "frozen weights 15 GiB, adapters with gradients, AdamW: 640 MiB"],
    ),
    "grpo_qwen3_0_6b_1gpu": (QWEN_600M, ["596M parameters", "FSDP2 1", "vLLM x 1", "1.11 GiB per version"]),
    "grpo_llama3_70b": (
        LLAMA_70B,
        [
            "FSDP2 4 x TP 8",
            "vLLM x 8, TP 4",
            "2.21B own parameters x 4",
            "at least 2.8 s at 400 Gbit/s per host",
        ],
    ),
    "grpo_qwen3_32b": (
        QWEN_32B,
        ["FSDP2 8 x TP 4", "vLLM x 16, TP 2", "1-3: peers' snapshots 183.1 GiB", "5-7: received weights 61.0 GiB"],
    ),
    "grpo_qwen3_30b_a3b": (
        QWEN_30B_A3B,
        ["FSDP2 16, experts over 8", "1.91B own parameters x 4", "2: received weights 56.9 GiB"],
    ),
}
UNFETCHED = [name for name in REPRESENTATIVES if "fetched" not in features(name)]  # a fetch takes half a minute


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    rows = [{"question": f"{i} + {i}?", "answer": f"#### {2 * i}"} for i in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [flag for key in ("path", "eval_path") for flag in (f"--task.{key}", str(tmp_path / "data.jsonl"))]


def assets(folder: Path, shape: ModelShape) -> list[str]:
    """Write what a GPU config expects on disk, without the weights' bytes: a dry run reads none of them."""
    characters.build(folder)
    (folder / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
    write_header(folder / "model.safetensors", shape.hf_tensors(), "BF16")
    return ["--model.hf_assets_path", str(folder)]


@pytest.fixture(scope="module")
def cuts() -> dict[str, ShardedModel]:
    """How TorchTitan cuts the models of all GPU configs, by "config mesh". It is imported once for all of them."""
    configs = {name: resolved(load(find(name)), "cuda") for name in GPU_CONFIGS}
    asked = {name: sharding.questions(config, GPU_CONFIGS[name][0]) for name, config in configs.items()}
    return sharding.ask_titan({f"{name} {mesh}": each for name in asked for mesh, each in asked[name].items()})


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_a_gpu_config_is_checked_whole_without_a_gpu(
    name: str, data: list[str], cuts: dict[str, ShardedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sharding, "ask_titan", lambda asked: {mesh: cuts[f"{name} {mesh}"] for mesh in asked})
    shape, expected = GPU_CONFIGS[name][0], [*GPU_CONFIGS[name][1]]
    dump = tmp_path / "dump"
    flags = [*data, *assets(tmp_path / "model", shape), "--job.dump_folder", str(dump)]
    assert main(["--config", name, "--dry-run", *flags]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    hosts, lr = load(find(name)).hosts.number, load(find(name)).optimizer.lr
    expected += [f"optimizer.lr {lr:g}", "rollout.temperature 1, rollout.max_new_tokens 1024, algorithm.clip_low 0.2"]
    expected += ["generator.dtype bfloat16", "generator.enforce_eager false", "async_mode async_with_pinned_mem"]
    expected += ["GiB by estimate", "concurrency", "staged weights", f"{hosts} hosts" if hosts > 1 else "another host"]
    assert [text for text in expected if text not in out] == []
    assert "hosts." not in out  # no warning about this host, which is not the one that is planned for
    assert not dump.exists()
    assert "batch-invariant" not in out


def test_deterministic_engines_are_announced_and_too_small_a_gpu_is_refused(
    data: list[str], cuts: dict[str, ShardedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sharding, "ask_titan", lambda _: {"trainer": cuts["grpo_qwen3_0_6b_1gpu trainer"]})
    flags = [*data, *assets(tmp_path / "model", QWEN_600M), "--job.dump_folder", str(tmp_path / "dump")]
    run = ["--config", "grpo_qwen3_0_6b_1gpu", "--dry-run", *flags]
    assert main([*run, "--debug.deterministic", "true"]) == 0
    assert "batch-invariant kernels" in re.sub(r"\s+", " ", capsys.readouterr().out)
    with pytest.raises(SystemExit) as stop:
        main([*run, "--hosts.gpu_memory_gb", "10"])
    assert stop.value.code == 2
    assert "[parallelism]: expected a trainer that fits 10.0 GiB" in capsys.readouterr().err


def test_quantized_rollouts_and_their_correction_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "grpo_llama", "--generator.quantization", "int8", "--dry-run"]) == 0
    plan = " ".join(capsys.readouterr().out.split())
    for part in (
        "per rank (linear layers rounded to int8), KV cache",
        "correction token_tis up to 2 for weights sampled in int8",
        "quantized to int8 on landing, verified in the live parameters",
    ):
        assert part in plan


def test_routing_replay_and_the_bytes_of_its_routes_are_announced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mixture = ["--model.name", "qwen3_moe", "--model.n_layers", "4", "--model.experts", "300"]
    run = ["--config", "grpo_llama", *mixture, "--model.experts_per_token", "3", "--training.seq_len", "127"]
    run += ["--job.dump_folder", str(tmp_path / "run")]
    assert main([*run, "--algorithm.routing_replay", "true", "--record.batches", "2", "--dry-run"]) == 0
    plan = " ".join(capsys.readouterr().out.split())
    assert "trainers take the generator's 3 experts in 4 layers: 24 B per token, up to 1.5 MiB per step" in plan
    assert "batches of 2 steps: up to 5.62 MiB" in plan, "32 x 16 samples a step, 128 tokens each, 21 + 24 bytes each"


def test_snapshots_that_exceed_a_hosts_memory_are_refused(
    data: list[str], cuts: dict[str, ShardedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sharding, "ask_titan", lambda asked: {mesh: cuts[f"grpo_llama3_70b {mesh}"] for mesh in asked})
    flags = [*data, *assets(tmp_path / "model", LLAMA_70B), "--job.dump_folder", str(tmp_path / "dump")]
    run = ["--config", "grpo_llama3_70b", "--dry-run", *flags, "--hosts.memory_gb", "256"]
    with pytest.raises(SystemExit) as stop:
        main(run)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert (
        "hosts.memory_gb: expected 854.2 GiB on a host (staged weights 65.7, snapshots 394.2, peers' snapshots 394.2),"
        in err
    )
    assert "besides its processes, found 256; fault.snapshot_interval = 0 needs 65.7 GiB" in err


def test_the_plan_has_when_a_run_is_evaluated_and_who_sees_it_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = [
        "--metrics.prometheus",
        f"{port}",
        "--metrics.alert",
        "https://host/S3CRET",
        "--metrics.alert_on",
        "failed",
    ]
    flags += ["--eval.interval", "7", "--eval.keep_best", "eval/score", "--job.dump_folder", str(tmp_path / "dump")]
    assert main(["--config", "grpo_llama", "--dry-run", *flags]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "every 7 steps, and before the first and after the last step; best/ keeps the weights with the highest" in out
    )
    assert f"outside Prometheus at {port}; alerts of failed" in out
    assert "S3CRET" not in out
    with socket.create_server(("127.0.0.1", port)), pytest.raises(SystemExit) as stop:
        main(["--config", "grpo_llama", "--dry-run", *flags])
    assert stop.value.code == 2
    refused = capsys.readouterr().err
    assert (
        f'metrics.prometheus: expected a free address of this host, found "{port}": Address already in use' in refused
    )


@pytest.mark.parametrize("name", slow_except(UNFETCHED, [name for name in shipped() if name not in GPU_CONFIGS]))
def test_every_tiny_config_is_ready(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where no earlier run has left a role's folder
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
    said_so = said("--optimizer.lr=0.123", "--optimizer.beta1=0.5", "--job.description=other")
    assert f"changed optimizer.lr = 0.123 (was {lr}), optimizer.beta1 = 0.5 (was 0.9) " in said_so
    assert "changed" not in said("--optimizer.lr=0.123", "--job.fresh")
    (dump / "config.toml").write_text("[no_such_section]")
    assert "changed" not in said("--optimizer.lr=0.123")
    (dump / "config.toml").write_text("[rollout]\npace = false\n")
    assert "rollout.pace = false, of an earlier version, has no effect" in said()


def test_a_run_whose_checkpoints_are_elsewhere_is_not_started_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """checkpoint.folder of an earlier version."""
    (tmp_path / "mine" / "step-3").mkdir(parents=True)
    (tmp_path / "mine" / "step-3" / ".metadata").write_text("whole")
    (tmp_path / "config.toml").write_text('[checkpoint]\nfolder = "mine"\n')
    with pytest.raises(SystemExit):
        main(["--config", "grpo_llama", "--dry-run", "--job.dump_folder", str(tmp_path)])
    assert "[checkpoint] has no key 'folder' any more; " in capsys.readouterr().err
