import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.checked_configs import config
from titan_rl.config.sections import Config
from titan_rl.config.toml import to_toml
from titan_rl.preflight.checks import problems, warnings
from titan_rl.wire.gpus import Gpus


def test_the_defaults_run() -> None:
    assert (problems(Config()), warnings(Config())) == ([], [])


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[parallelism]\ntensor_parallel_degree = 4", "a divisor of the model's n_kv_heads = 2, found 4"),
        ("[model]\nn_heads = 8\nhead_dim = 16", "model.head_dim: expected a size that vLLM supports on a CPU"),
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
            '[lora]\nrank = 4\nsync = "adapter"',
            "lora.rank: expected 1, 8, 16, 32, 64, 128, 256, 320 or 512, the ranks of vLLM's adapters (lora.sync = "
            '"merge" allows any), found 4',
        ),
        (
            '[model]\nname = "qwen3_moe"\n[lora]\nrank = 8\nsync = "adapter"',
            'lora.sync: expected "merge" for qwen3_moe: with adapters vLLM computes experts in another way',
        ),
        (
            '[model]\nname = "gpt_oss"\n[lora]\nrank = 8\n[parallelism]\ntensor_parallel_degree = 2',
            "lora.targets: expected names without o, because TorchTitan gives it no adapter under tensor parallelism "
            "in gpt_oss, found q, k, v, o",
        ),
        (
            '[model]\nname = "gpt_oss"\n[generator]\ntensor_parallel_degree = 2',
            "generator.tensor_parallel_degree: expected 1 for gpt_oss, because all but vLLM's first rank have zeros "
            "for a bias of the experts, which no sync can write, found 2",
        ),
        (
            "[rollout]\nmax_new_tokens = 250",
            "training.seq_len: expected at least 257 (a prompt of 7 and rollout.max_new_tokens = 250), found 256",
        ),
        ("[generator]\nmax_model_len = 70", "generator.max_model_len: expected at least 71"),
        (
            "[generator]\nmax_model_len = 65536\nkv_cache_memory_mb = 1024",
            "generator.max_model_len: expected at most the model's max_seq_len = 32768",
        ),
        (
            "[training]\nseq_len = 256\n[generator]\nmax_model_len = 257",
            "generator.max_model_len: expected at most training.seq_len = 256, because a rollout must fit a packed "
            "row, found 257",
        ),
        (
            '[task]\ntemplate = "chat"\n[training]\nseq_len = 73\n[eval]\nsize = 0',
            "task '00+00=': expected a prompt of at most 9 tokens (training.seq_len = 73, rollout.max_new_tokens = "
            "64), found 10; raise training.seq_len (or lower rollout.max_new_tokens) by at least 1, or set "
            'task.bad_rows = "drop" to drop 10000 of 10000 rows',
        ),
        (
            "[rollout]\ngroup_size = 1",
            'rollout.group_size: expected at least 2, because algorithm.advantage = "group" compares the samples of a '
            "group, found 1",
        ),
        ('[model]\nname = "qwen3"\ndim = 130', "model.dim: expected a multiple of n_heads = 4, because head_dim is 0"),
        (
            '[model]\nname = "qwen2"\nhead_dim = 64',
            "head_dim x n_heads = 64 x 4, as vLLM's Qwen2ForCausalLM has",
        ),
        ('[model]\nname = "qwen3"\nhead_dim = 33', "model.head_dim: expected an even number"),
        (
            '[model]\nname = "qwen3_moe"\nhidden_dim = 36',
            "model.hidden_dim: expected a multiple of 8 with experts, found 36",
        ),
        (
            '[model]\nname = "glm4_moe"\n[algorithm]\nname = "ppo"\n[critic]\nlr = 1e-3',
            "algorithm.name: expected one without a value head, whose folder transformers could not load",
        ),
        (
            '[model]\nname = "glm4_moe"\nenable_weight_tying = true',
            "model.enable_weight_tying: expected false, as vLLM ignores it for glm4_moe, found true",
        ),
        ('[model]\nname = "qwen3_moe"\nexperts = 1', "model.experts_per_token: expected at most the model's 1 experts"),
        (
            '[model]\nname = "qwen3_moe"\n[parallelism]\ndata_parallel_shard_degree = 3',
            "parallelism.data_parallel_shard_degree: expected a divisor of the model's 8 experts",
        ),
        (
            '[model]\nname = "qwen3_moe"\nhidden_dim = 24\n[parallelism]\ntensor_parallel_degree = 2',
            "model.hidden_dim: expected a multiple of 16 with experts that parallelism.tensor_parallel_degree = 2 cuts",
        ),
        (
            '[model]\nname = "qwen3_moe"\nexperts = 4\n[parallelism]\nexpert_parallel_degree = 2\n'
            "tensor_parallel_degree = 2\ndata_parallel_shard_degree = 4",
            "parallelism.data_parallel_shard_degree x tensor_parallel_degree: expected a divisor of the model's 4 exp",
        ),
        (
            '[model]\nname = "qwen3_moe"\n[parallelism]\nexpert_parallel_degree = 2',
            "parallelism.expert_parallel_degree: expected a divisor of data_parallel_shard_degree x tensor_parallel",
        ),
        (
            "[parallelism]\nexpert_parallel_degree = 2",
            "parallelism.expert_parallel_degree: expected 1 for llama3, which has no experts, found 2",
        ),
        (
            "[algorithm]\nrouting_replay = true",
            "algorithm.routing_replay: expected false, because llama3 has no experts, found true",
        ),
        (
            '[model]\nname = "qwen3_moe"\n[algorithm]\nname = "sft"\nrouting_replay = true',
            'algorithm.routing_replay: expected false, because algorithm.name = "sft" samples no answers, found true',
        ),
        ("[training]\nsteps = 0", "training.steps: expected at least 1, because cold_start.steps is 0 too, found 0"),
        (
            "[model]\nn_layers = 64\n[training]\nseq_len = 2048\n[generator]\nkv_cache_memory_mb = 32",
            "generator.kv_cache_memory_mb: expected at least 257, the KV cache of 4 sequences of 2048 tokens, found 32",
        ),
        (
            '[task]\nreward = "exct"',
            'task.reward: expected "exact", "last_number", "number", "regex", "json_schema", "math", "choice", '
            '"format", "length", "code_tests", "reasoning_gym", "judge", "judge_group", "model" or '
            '"package.module:function"',
        ),
        ('[task]\nreward = "no_such:f"', "No module named 'no_such'"),
        ('[task]\nreward = "json:no_such"', "module 'json' has no attribute 'no_such'"),
        ('[task]\nreward = "json:lods"', "module 'json' has no attribute 'lods'; did you mean 'loads'?"),
        ('[task]\nreward = "last_numbr"', "found 'last_numbr'; did you mean 'last_number'?"),
        ('[model]\nhf_assets_path = "Qwen/Qwen3-0.6B"', "`hf download OWNER/NAME --local-dir FOLDER` fetches one"),
    ],
)
def test_one_problem(tmp_path: Path, toml: str, message: str) -> None:
    (problem,) = problems(config(tmp_path, toml))
    assert message in problem


@pytest.mark.parametrize(
    "toml",
    [
        "[generator]\ntensor_parallel_degree = 4",  # two ranks per kv head: each kv head is on two ranks
        "[model]\nn_kv_heads = 4\n[generator]\ntensor_parallel_degree = 2",
        "[training]\nseq_len = 71",
        "[generator]\nmax_model_len = 71\nkv_cache_memory_mb = 1",
        '[model]\nname = "qwen3"\nhead_dim = 64',
        '[task]\ntemplate = "chat"\n[training]\nseq_len = 74',  # BOS, user, six characters, EOS, assistant; 64 new
        "[training]\nseq_len = 512\n[generator]\nmax_model_len = 512",
        "[eval]\nsize = 0",
        "[training]\nsteps = 0\n[cold_start]\nsteps = 1",
        '[algorithm]\nname = "sft"\n[rollout]\ntemperature = 2.5',  # it samples greedily
        '[algorithm]\nname = "sft"\n[eval]\nsize = 0\n[debug]\nseed = 1099511627776',  # it has no engines
    ],
)
def test_no_problem(tmp_path: Path, toml: str) -> None:
    assert problems(config(tmp_path, toml), gpus=Gpus(2 if "cuda" in toml else 0)) == []


def test_a_window_needs_something_to_overtake_and_fixed_places(tmp_path: Path) -> None:
    (problem,) = problems(config(tmp_path, "[rollout]\nmax_staleness_steps = 2\novertake_steps = 2"))
    assert problem == "rollout.overtake_steps: expected 0, or less than rollout.max_staleness_steps = 2, found 2"
    (problem,) = problems(
        config(tmp_path, '[rollout]\nmax_staleness_steps = 3\novertake_steps = 2\n[algorithm]\nname = "dapo"')
    )
    assert problem.startswith(
        "rollout.overtake_steps: expected 0 with algorithm.dynamic_sampling, because replaced groups"
    )


@pytest.mark.parametrize(
    ("toml", "why"),
    [
        ('[algorithm]\nname = "reinforce_pp"', 'algorithm.normalize is "batch"'),
        ("[algorithm]\nminibatches = 2", "a step has several updates"),
        ('[algorithm]\nname = "dapo"', "algorithm.dynamic_sampling replaces groups"),
        ('[placement]\nkind = "colocated"', 'placement.kind is "colocated"'),
        ('[algorithm]\nname = "online_dpo"', "algorithm.pair_loss divides by all pairs of a step"),
        (
            "[rollout]\nmax_staleness_steps = 2\novertake_steps = 1",
            "rollout.overtake_steps lets groups overtake each other",
        ),
    ],
)
def test_streaming_needs_groups_that_stand_alone(tmp_path: Path, toml: str, why: str) -> None:
    (problem,) = problems(config(tmp_path, f"{toml}\n[training]\nstream_groups = 2"))
    assert problem == f"training.stream_groups: expected 0, because {why}, found 2"


def test_colocated_engines_cannot_drain(tmp_path: Path) -> None:
    toml = '[placement]\nkind = "colocated"\n[weight_sync]\nin_flight = "drain"\n'
    assert problems(config(tmp_path, toml)) == []  # without a lag nothing is in flight
    (problem,) = problems(config(tmp_path, f"{toml}[rollout]\nmax_staleness_steps = 1"))
    assert problem.startswith('weight_sync.in_flight: expected "swap", because engines sleep')


def test_kept_keys_and_values_need_a_correction_and_devices_of_their_own(tmp_path: Path) -> None:
    keep = '[weight_sync]\nin_flight = "keep"\n'
    uncorrected = '[algorithm]\nproximal = "trainer"\ncorrection = "none"\n'
    assert problems(config(tmp_path, f"{keep}{uncorrected}")) == []  # without a lag nothing is in flight
    assert (
        problems(config(tmp_path, f"{keep}[rollout]\nmax_staleness_steps = 1")) == []
    )  # whose ratio is against the log-probs of sampling
    (problem,) = problems(config(tmp_path, f"{keep}{uncorrected}[rollout]\nmax_staleness_steps = 1"))
    assert problem.startswith('algorithm.correction: expected "token_tis" or another correction, because weight_sync')
    (problem,) = problems(
        config(tmp_path, f'{keep}[rollout]\nmax_staleness_steps = 1\n[placement]\nkind = "colocated"')
    )
    assert problem.startswith('weight_sync.in_flight: expected "swap", because engines sleep and free their keys and')


def test_a_run_that_goes_on_keeps_its_order_of_prompts_and_its_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    here = f'[job]\ndump_folder = "{run}"\n'
    (run / "checkpoint" / "step-2").mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(config(tmp_path, here)))
    other = "[debug]\nseed = 3\n[eval]\nsize = 7\n[model]\nn_layers = 2"
    assert problems(config(tmp_path, here + other)) == []  # nothing to resume
    (run / "checkpoint" / "step-2" / ".metadata").write_text("")
    assert problems(config(tmp_path, here)) == []
    (checkpoints,) = problems(config(tmp_path, here + "[checkpoint]\nenable = false"))
    assert checkpoints.startswith(f"checkpoint.enable: expected true, as in the run in {run}")
    seed, size, model = problems(config(tmp_path, here + other))
    assert seed == f"debug.seed: expected 0, as in the run in {run} (or --job.fresh to start from scratch), found 3"
    assert size.startswith("eval.size: expected 256")
    assert model.startswith(f"[model]: expected the same shape as in the run in {run}")
    assert problems(config(tmp_path, f'[job]\nfresh = true\ndump_folder = "{run}"\n{other}')) == []


def test_another_experiment_does_not_resume_a_run_unless_asked_to(tmp_path: Path) -> None:
    run = tmp_path / "run"
    here = f'[job]\ndump_folder = "{run}"\n'
    (run / "checkpoint" / "step-2").mkdir(parents=True)
    (run / "checkpoint" / "step-2" / ".metadata").write_text("")
    (run / "config.toml").write_text(to_toml(config(tmp_path, here)))
    tuned = "[optimizer]\nlr = 2e-6\n[rollout]\nmax_staleness_steps = 1\n[training]\nsteps = 500\n"
    tuned += "[memory]\nfragmentation = 0.2\ncuda_context_mb = 900\n"
    assert problems(config(tmp_path, here + tuned)) == []
    other = '[task]\nreward = "last_number"\n[algorithm]\nname = "rloo"\n'
    found = problems(config(tmp_path, here + other))
    assert found[0] == (
        f'task.reward: expected "exact", as in the run in {run}, found "last_number": choose another job.dump_folder, '
        "or continue that run with --job.resume_changed"
    )
    assert any(line.startswith('algorithm.name: expected "grpo"') for line in found)
    assert problems(config(tmp_path, f"{here}resume_changed = true\n{other}")) == []


def test_a_run_without_a_critic_does_not_go_on_with_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    here = f'[job]\ndump_folder = "{run}"\n'
    ppo = '[algorithm]\nname = "ppo"\n[critic]\nlr = 1e-3\n'
    for step in ("step-2", "critic/step-1"):
        (run / "checkpoint" / step).mkdir(parents=True)
        (run / "checkpoint" / step / ".metadata").write_text("")
    (run / "config.toml").write_text(to_toml(config(tmp_path, here)))
    here += "resume_changed = true\n"
    (problem,) = problems(config(tmp_path, here + ppo))
    assert problem == (
        f"algorithm.name: expected an algorithm without a critic, as in the run in {run} (or --job.fresh to start from "
        'scratch), found "ppo"'
    )
    (run / "checkpoint" / "critic" / "step-1").rename(run / "checkpoint" / "critic" / "step-2")
    assert problems(config(tmp_path, here + ppo)) == []


def test_a_run_without_a_moving_average_does_not_go_on_with_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    here = f'[job]\ndump_folder = "{run}"\nresume_changed = true\n'
    (run / "checkpoint" / "step-2").mkdir(parents=True)
    (run / "checkpoint" / "step-2" / ".metadata").write_text("")
    (run / "config.toml").write_text(to_toml(config(tmp_path, here + '[algorithm]\nname = "opsd"\n')))
    (problem,) = problems(config(tmp_path, here + '[algorithm]\nname = "sdpo"\n'))
    assert problem.startswith(
        f"algorithm.teacher_weights: expected a teacher without an average, as in the run in {run}"
    )
    assert problems(config(tmp_path, here)) == []


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[generator]\ndtype = "bfloat16"', "generator.dtype is bfloat16, training.mixed_precision_param is float32"),
        (
            '[model]\nhead_dtype = "float32"\n[debug]\ndeterministic = true\n[generator]\ndtype = "bfloat16"\n'
            '[training]\nmixed_precision_param = "bfloat16"',
            'model.head_dtype is "float32" with debug.deterministic: on a GPU vLLM\'s batch-invariant kernels',
        ),
        (
            '[algorithm]\nname = "ipo"\nlabel_smoothing = 0.1',
            'algorithm.label_smoothing = 0.1: no effect, because algorithm.name is "ipo"',
        ),
        (
            '[algorithm]\nname = "kto"\nlabel_smoothing = 0.1',
            'algorithm.label_smoothing = 0.1: no effect, because algorithm.name is "kto"',
        ),
        (
            '[algorithm]\nname = "online_dpo"\npair_loss = "ipo"\nlabel_smoothing = 0.1',
            'algorithm.label_smoothing = 0.1: no effect, because algorithm.pair_loss is "ipo"',
        ),
        (
            '[generator]\nquantization = "int8"\n[algorithm]\ncorrection = "none"',
            'algorithm.correction is "none" with generator.quantization = "int8": the clip also acts on the',
        ),
        (
            '[generator]\nquantization = "int8"\n[algorithm]\nproximal = "trainer"\ncorrection = "none"',
            'algorithm.correction is "none" with generator.quantization = "int8": nothing corrects for the',
        ),
    ],
)
def test_warnings(tmp_path: Path, toml: str, message: str) -> None:
    found = config(tmp_path, toml)
    assert problems(found) == []
    (warning,) = warnings(found)
    assert warning.startswith(message)


@pytest.mark.parametrize("name", ["ledger.jsonl", "metrics.superseded.jsonl", "config.toml", ".lock"])
@pytest.mark.parametrize(
    ("place", "found"),
    [
        (Path.mkdir, "a folder"),
        (os.mkfifo, "something else: remove it"),
        (lambda path: path.symlink_to("/dev/zero"), "something else: remove it"),
        (lambda path: path.symlink_to("nowhere"), "something else: remove it"),
    ],
)
def test_what_is_no_file_under_the_name_of_one_is_refused_and_not_opened(
    tmp_path: Path, name: str, place: Callable[[Path], object], found: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    place(run / name)
    assert problems(config(tmp_path, f'[job]\ndump_folder = "{run}"\n')) == [
        f"job.dump_folder: expected a file at {run / name}, found {found}"
    ]
