"""What must hold between keys, found out before anything is spawned. Each key by itself is config_file.py's.

Every message names the key to change, says what was expected of it, and what was found.
"""

import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from titan_rl.config.sections import BYTES, Config
from titan_rl.config.toml import ConfigError, as_toml, load
from titan_rl.preflight.shapes import shape_of
from titan_rl.tasks.rewards import last_number, reward_for
from titan_rl.tasks.task import jsonl
from titan_rl.tasks.tokenizer import SIZE, TextTokenizer, build
from titan_rl.wire.model_shape import ModelShape, shape_of_folder
from titan_rl.wire.snapshot import snapshot_bytes
from titan_rl.wire.types import Prompt

ADDITION_PROMPT = 7  # tokens: BOS and "47+38="
ADDITION_HELD_OUT = 2000  # of the 10,000 sums: the others are trained on
ROWS_READ = 100  # of a JSONL file
CPU_SLOTS = 16
# Measured: what vLLM 0.32's CPU attention is compiled for. Anything else dies in the first forward.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_BLOCK_SIZE = 32


def problems(config: Config, *, gpus: int = 0) -> list[str]:
    """Everything that would make the run fail on this host, which has so many GPUs."""
    shape, unusable = _shape(config)
    rules = [_assets(config, shape), _task(config), _run(config), _titan(config), _algorithm(config)]
    rules += [_resume(config, shape)]
    if shape:
        rules += [_dimensions(config, shape), _parallelism(config, shape), _lengths(config, shape)]
        rules += [_roles(config, shape)]
    return [*unusable, *(problem for rule in rules for problem in rule), *host_problems(config, gpus=gpus)]


def host_problems(config: Config, *, gpus: int = 0) -> list[str]:
    """Those problems that the config would not have on another host."""
    shape, _ = _shape(config)
    return list(_placement(config, shape, gpus))


def warnings(config: Config) -> list[str]:
    """What runs, but seldom as meant."""
    found = []
    trainer, generator = config.training.mixed_precision_param, config.generator.dtype
    if trainer != generator:
        found.append(
            f"generator.dtype is {generator}, training.mixed_precision_param is {trainer}: expect log-probs of trainer "
            "and generator to differ by about 4e-3 on average, against 3e-7 with float32 in both"
        )
    if config.rollout.top_p < 1:
        found.append(
            f"rollout.top_p is {config.rollout.top_p}: the sampling log-probs are of the truncated distribution, the "
            "trainer's of the whole one, and their ratio is biased; 1.0 is exact"
        )
    a = config.algorithm
    if a.kl_coef and a.kl == "k1" and a.kl_in == "loss":
        found.append(
            'algorithm.kl is "k1" in the loss: its gradient is zero on average and anchors nothing; take "k2" or "k3", '
            'or algorithm.kl_in = "reward"'
        )
    kept, memory = snapshot_memory(config), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if kept > memory / 2:
        found.append(
            f"fault.snapshot_interval = {config.fault.snapshot_interval}: snapshots take {kept / 2**30:.0f} GiB of the "
            f"host's {memory / 2**30:.0f} GiB of memory; 0 keeps none"
        )
    return found


def snapshot_memory(config: Config) -> int:
    """Bytes of the host's memory, as far as the model is known."""
    shape, _ = _shape(config)
    if config.fault.snapshot_interval == 0 or shape is None:
        return 0
    roles = [config.parallelism, *([config.critic.parallelism] if config.algorithm.needs_critic else [])]
    return sum(snapshot_bytes(shape.parameters, config.training.dtype, p.data_parallel_replicate_degree) for p in roles)


def visible_gpus() -> int:
    """The NVIDIA GPUs that CUDA would show to this process, counted without torch."""
    present = _present_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    for count, device in enumerate(map(str.strip, visible.split(","))):
        known = device.startswith(("GPU-", "MIG-")) or (device.isdecimal() and int(device) < present)
        if not (present and known):
            return count  # CUDA reads no further than the first entry that is no device
    return visible.count(",") + 1


def _present_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
    except subprocess.TimeoutExpired:
        return 0  # a driver that hangs runs nothing either
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def _shape(config: Config) -> tuple[ModelShape | None, list[str]]:
    try:
        return shape_of(config.model), []
    except ValueError as error:
        return None, [str(error)]


def _assets(config: Config, shape: ModelShape | None) -> Iterator[str]:
    folder = Path(config.model.hf_assets_path)
    if not config.model.hf_assets_path or not folder.is_dir():
        return
    if config.model.flavor:
        yield f'model.flavor: expected "" beside model.hf_assets_path, found "{config.model.flavor}"'
    yield from _weights(folder)
    if shape is None:
        return  # the tokenizer is read with the same config.json
    try:
        tokenizer = TextTokenizer.load(folder)
    except Exception as error:  # tokenizers raises Exception itself
        yield f"model.hf_assets_path: expected a tokenizer, found {error}"
        return
    if tokenizer.size > shape.vocab_size:
        yield (
            f"model.hf_assets_path: expected a vocab_size of at least the tokenizer's {tokenizer.size} in "
            f"{folder / 'config.json'}, found {shape.vocab_size}"
        )
    settings = folder / "tokenizer_config.json"
    templated = settings.is_file() and "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    if config.task.template == "chat" and not (templated or (folder / "chat_template.jinja").is_file()):
        yield f'task.template: expected "plain", as {folder} has no chat template, found "chat"'


def _weights(folder: Path) -> Iterator[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            yield f"model.hf_assets_path: expected a weight_map in {index}, found {error!r}"
            return
        if missing := sorted(name for name in files if not (folder / name).is_file()):
            yield f"model.hf_assets_path: expected every file of {index}, found no {', '.join(missing)}"
    elif not any(folder.glob("*.safetensors")):
        yield f"model.hf_assets_path: expected *.safetensors in {folder}, found none"


def _task(config: Config) -> Iterator[str]:
    task = config.task
    for key, reward in (("reward", task.reward), ("eval_reward", task.eval_reward)):
        if key == "eval_reward" and reward == "model":
            yield 'task.eval_reward: expected a rule, as a reward model does not judge itself, found "model"'
        if reward in ("", "model"):
            continue
        try:
            reward_for(reward)
        except (TypeError, ValueError) as error:
            yield str(error).replace("task.reward", f"task.{key}")
        except Exception as error:  # importing the user's module runs it
            yield f'task.{key}: expected "{reward}" to import, found {type(error).__name__}: {error}'
    if task.name == "addition":
        if config.eval.size > ADDITION_HELD_OUT:
            yield f"eval.size: expected at most {ADDITION_HELD_OUT} of addition's 10,000 sums, found {config.eval.size}"
        return
    if not task.path:
        yield 'task.path: expected a JSONL file for task.name = "jsonl", found ""'
    if config.eval.size and not task.eval_path:
        yield f'task.eval_path: expected a JSONL file for eval.size = {config.eval.size} (0: no evaluation), found ""'
    if task.path:
        yield from _rows(config, "path")
    if task.eval_path and config.eval.size:
        yield from _rows(config, "eval_path")


def _rows(config: Config, key: Literal["path", "eval_path"]) -> Iterator[str]:
    try:
        examples = jsonl(config.task, key, ROWS_READ, pairs=config.algorithm.kind in ("preference", "reward"))
    except (OSError, ValueError) as error:
        yield str(error)
        return

    file = getattr(config.task, key)
    for row, example in enumerate(examples, 1):
        if config.task.template == "plain" and not isinstance(example.prompt, str):
            yield f'task.template: expected "chat" for the messages in row {row} of {file}, found "plain"'
        elif config.cold_start.steps and key == "path" and not example.answer.strip():
            steps = config.cold_start.steps
            yield f"cold_start.steps: expected 0, as row {row} of {file} has no answer to learn from, found {steps}"
        elif config.task.reward == "last_number" and not _has_number(example.answer):
            yield f'task.reward: expected a number in the answer of row {row} of {file}, found "{example.answer}"'
        else:
            continue
        return  # one bad row shows what is wrong with the file


def _has_number(answer: str) -> bool:
    try:
        last_number(Prompt(0, "", [], answer), "")
    except ValueError:
        return False
    return True


def _run(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if config.cold_start.stop_at and config.eval.size == 0:
        found = f"found {config.cold_start.stop_at:g}"
        yield f"cold_start.stop_at: expected 0 where eval.size is 0, for it looks at so many training problems, {found}"
    if config.training.steps == 0 and config.cold_start.steps == 0:
        yield "training.steps: expected at least 1 where cold_start.steps is 0, found 0: there is nothing to do"
    if rollout.window and rollout.lag == 0:
        why = "as nothing is there to overtake"
        yield f"rollout.window: expected 0 where rollout.lag is 0, {why}, found {rollout.window}"
    if rollout.window and config.algorithm.dynamic_sampling:
        why = "for replaced groups would break its bound"
        yield f"rollout.window: expected 0 beside algorithm.dynamic_sampling, {why}, found {rollout.window}"
    if rollout.lag and config.placement.kind == "colocated" and config.weight_sync.in_flight == "drain":
        why = 'as engines that sleep finish nothing before a switch (placement.kind = "colocated")'
        yield f'weight_sync.in_flight: expected "swap" under a lag, {why}, found "drain"'
    yield from _streaming(config)
    if config.checkpoint.keep_latest_k == 1:
        yield "checkpoint.keep_latest_k: expected 0 (all) or at least 2, as one may be half-written, found 1"


def _titan(config: Config) -> Iterator[str]:
    """What TorchTitan would refuse only on the ranks."""
    profiling = config.profiling
    least = profiling.profiler_warmup + profiling.profiler_active
    if profiling.profile_freq < least:
        yield (
            f"profiling.profile_freq: expected at least profiler_warmup + profiler_active = {least}, "
            f"found {profiling.profile_freq}"
        )
    for target in config.override.imports:
        module = target.rpartition(".")[0]
        try:
            found = bool(module) and find_spec(module) is not None
        except (ImportError, ValueError):  # of a parent package
            found = False
        if not found:
            yield f'override.imports: expected "module.function" of a module that can be imported, found "{target}"'


def _resume(config: Config, shape: ModelShape | None) -> Iterator[str]:
    """What a run that goes on may not change: the order of its prompts, and the model in its checkpoint."""
    folder = Path(config.job.dump_folder)
    if config.job.fresh or not any((folder / config.checkpoint.folder).glob("**/.metadata")):
        return
    try:
        before = load(folder / "config.toml")
        had = shape_of(before.model)
    except (ConfigError, OSError, ValueError):
        return  # another version's, or its model's folder is gone: the checkpoint itself will tell
    kept = {
        "debug.seed": (before.debug.seed, config.debug.seed),
        "task.name": (before.task.name, config.task.name),
    }
    if config.task.name == before.task.name == "addition":  # what is held out is not trained on
        kept["eval.size"] = (before.eval.size, config.eval.size)
    for key, (was, found) in kept.items():
        if was != found:
            expected = f"{as_toml(was)}, with which {folder} began (job.fresh begins anew)"
            yield f"{key}: expected {expected}, found {as_toml(found)}"
    if shape is not None and replace(had, head=shape.head) != shape:
        yield f"[model]: expected the model that {folder} began with (job.fresh begins anew), found another shape"


def _streaming(config: Config) -> Iterator[str]:
    """What must be known of all of a step's groups before any of them is trained on."""
    a, size = config.algorithm, config.training.stream_groups
    needs = {
        'algorithm.normalize is "batch"': a.normalize == "batch",
        "a step has several updates": a.updates > 1,
        "algorithm.dynamic_sampling replaces groups": a.dynamic_sampling,
        "a critic is trained": a.needs_critic,
        "rollout.window lets groups overtake each other": config.rollout.window > 0,
        'placement.kind is "colocated"': config.placement.kind == "colocated",
    }
    if size and a.kind == "rl" and any(needs.values()):
        why = " and ".join(reason for reason, holds in needs.items() if holds)
        yield f"training.stream_groups: expected 0 where {why}, found {size}"


def _algorithm(config: Config) -> Iterator[str]:
    """What contradicts itself within [algorithm], or asks for what no other section gives."""
    a, rollout = config.algorithm, config.rollout
    if a.kind != "rl":
        if a.kind == "reward" and config.cold_start.steps:
            yield f"cold_start.steps: expected 0, as a reward model writes no answers, found {config.cold_start.steps}"
        return
    if a.advantage in ("group", "leave_one_out") and rollout.group_size < 2:
        what = f'which algorithm.advantage = "{a.advantage}" compares with each other'
        yield f"rollout.group_size: expected at least 2 samples, {what}, found {rollout.group_size}"
    if a.normalize == "group" and a.advantage != "group":
        yield (
            f'algorithm.normalize: expected "none" or "batch", as algorithm.advantage = "{a.advantage}" is not '
            'relative to its group, found "group"'
        )
    if a.dynamic_sampling and rollout.group_size < 2:
        yield f"algorithm.dynamic_sampling: expected false where rollout.group_size is {rollout.group_size}, found true"
    if 0 < a.dual_clip <= 1 + a.clip_high:
        yield f"algorithm.dual_clip: expected above 1 + clip_high = {1 + a.clip_high:g} (0: off), found {a.dual_clip:g}"
    if a.dual_clip and a.clip != "ppo":
        yield f'algorithm.dual_clip: expected 0 where algorithm.clip is "{a.clip}", found {a.dual_clip:g}'
    for key in ("correction", "rejection"):
        low, high = getattr(a, f"{key}_low"), getattr(a, f"{key}_high")
        if low >= high:
            yield f"algorithm.{key}_low: expected below algorithm.{key}_high = {high:g}, found {low:g}"
    if a.correction != "none" and a.proximal == "generator":
        yield (
            f'algorithm.proximal: expected "trainer" where algorithm.correction is "{a.correction}", as the ratio '
            'would correct for the same gap twice, found "generator"'
        )
    if config.rollout.groups_per_step % a.minibatches:
        groups = f"rollout.groups_per_step = {rollout.groups_per_step}"
        yield f"algorithm.minibatches: expected a divisor of {groups}, found {a.minibatches}"
    if a.overlong_buffer > rollout.max_new_tokens:
        found = f"found {a.overlong_buffer}"
        yield f"algorithm.overlong_buffer: expected at most rollout.max_new_tokens = {rollout.max_new_tokens}, {found}"


def _roles(config: Config, shape: ModelShape) -> Iterator[str]:
    """A role that the algorithm needs and does not have; a role whose folder does not fit the policy."""
    a = config.algorithm
    if a.needs_reference and config.reference.mesh == "none":
        why = f"algorithm.kl_coef = {a.kl_coef:g}" if a.kind == "rl" else f'algorithm.name = "{a.name}"'
        yield f'reference.mesh: expected "trainer" or "own", as {why} needs a reference, found "none"'
    if a.needs_critic and config.critic.lr == 0:
        yield f'critic.lr: expected above 0, as algorithm.name = "{a.name}" trains a critic, found 0'
    if a.needs_teacher:
        yield from _folder(config, shape, "teacher", config.teacher.hf_assets_path, f'algorithm.name = "{a.name}"')
    if a.needs_critic and config.critic.hf_assets_path:
        yield from _folder(config, shape, "critic", config.critic.hf_assets_path, "")
    if a.kind == "rl" and config.task.reward == "model":
        yield from _folder(config, shape, "reward_model", config.reward_model.hf_assets_path, 'task.reward = "model"')
    if config.samples_rollouts and config.eval.size and config.task.reward == "model" and not config.task.eval_reward:
        yield (
            'task.eval_reward: expected a rule to judge held-out answers by where task.reward is "model" '
            '(eval.size = 0: no evaluation), found ""'
        )


def _folder(config: Config, shape: ModelShape, role: str, folder: str, why: str) -> Iterator[str]:
    key = f"{role}.hf_assets_path"
    if not folder:
        yield f'{key}: expected a Hugging Face folder, as {why} needs one, found ""'
        return
    try:
        found = shape_of_folder(folder, key)
        tokenizer = TextTokenizer.load(Path(folder))
    except Exception as error:  # tokenizers raises Exception itself
        yield str(error) if key in str(error) else f"{key}: expected a tokenizer, found {error}"
        return
    yield from (problem.replace("model.hf_assets_path", key) for problem in _weights(Path(folder)))
    if (found.head == "value") != (role == "reward_model") and role != "critic":
        wanted = "a reward model (*ForSequenceClassification)" if role == "reward_model" else "a language model"
        yield f"{key}: expected {wanted}, found another kind in {folder}"
    if role == "teacher" and config.teacher.mesh == "trainer" and found != shape:
        yield 'teacher.mesh: expected "own" for a teacher of another shape than the policy\'s, found "trainer"'
    if role == "critic" and replace(found, head=shape.head, tied=shape.tied) != shape:
        yield f"{key}: expected the policy's shape, found another in {folder}"
    own = _tokenizer(config)
    if own is not None and own.vocabulary != tokenizer.vocabulary:
        yield (
            f"{key}: expected the policy's tokenizer, found another in {folder}: the same ids would mean other texts "
            f"({len(own.vocabulary)} and {len(tokenizer.vocabulary)} entries)"
        )


def _tokenizer(config: Config) -> TextTokenizer | None:
    """The policy's; None where its own checks already refuse it."""
    with tempfile.TemporaryDirectory() as scratch, suppress(Exception):
        folder = Path(config.model.hf_assets_path)
        if not config.model.hf_assets_path:
            folder = Path(scratch)
            build(folder)
        return TextTokenizer.load(folder)
    return None


def _dimensions(config: Config, shape: ModelShape) -> Iterator[str]:
    model = config.model
    if shape.n_heads % shape.n_kv_heads:
        yield f"model.n_kv_heads: expected a divisor of the model's {shape.n_heads} heads, found {shape.n_kv_heads}"
    if shape.head_dim % 2:
        yield f"model.head_dim: expected an even size, as rotary embeddings pair its elements, found {shape.head_dim}"
    if shape.family == "llama3" and shape.head_dim * shape.n_heads != shape.dim:
        found = f"{shape.head_dim} x {shape.n_heads}"
        yield f"model.dim: expected head_dim x n_heads, as TorchTitan's Llama 3 requires ({found}), found {shape.dim}"
    elif not (model.hf_assets_path or model.flavor or model.head_dim) and model.dim % model.n_heads:
        yield f"model.dim: expected a multiple of n_heads = {model.n_heads} where head_dim is 0, found {model.dim}"
    if not model.hf_assets_path and shape.vocab_size < SIZE:
        yield f"model.vocab_size: expected at least the built-in tokenizer's {SIZE}, found {shape.vocab_size}"


def _parallelism(config: Config, shape: ModelShape) -> Iterator[str]:
    seq_len = config.training.seq_len
    for mesh, p in {"parallelism": config.parallelism, **{n: r.parallelism for n, r in config.roles.items()}}.items():
        key, tp = f"{mesh}.tensor_parallel_degree", p.tensor_parallel_degree
        own = _role_shape(config, mesh) or shape
        for size in ("n_heads", "n_kv_heads", "hidden_dim", "vocab_size"):
            if getattr(own, size) % tp:
                yield f"{key}: expected a divisor of the model's {size} = {getattr(own, size)}, found {tp}"
        if p.enable_sequence_parallel and seq_len % tp:
            yield f"training.seq_len: expected a multiple of {key} = {tp} (sequence parallel), found {seq_len}"

    key, tp = "generator.tensor_parallel_degree", config.generator.tensor_parallel_degree
    for size in ("n_heads", "hidden_dim"):
        if getattr(shape, size) % tp:
            yield f"{key}: expected a divisor of the model's {size} = {getattr(shape, size)}, found {tp}"
    if shape.n_kv_heads % tp and tp % shape.n_kv_heads:
        yield f"{key}: expected a divisor or a multiple of the model's n_kv_heads = {shape.n_kv_heads}, found {tp}"


def _role_shape(config: Config, role: str) -> ModelShape | None:
    """Of a role whose model need not be the policy's; None of any other, and of a folder that `_folder` refuses."""
    folders = {"teacher": config.teacher.hf_assets_path, "reward_model": config.reward_model.hf_assets_path}
    with suppress(ValueError):
        return shape_of_folder(folders[role], f"{role}.hf_assets_path") if role in folders else None
    return None


def _lengths(config: Config, shape: ModelShape) -> Iterator[str]:
    generator, seq_len, new = config.generator, config.training.seq_len, config.rollout.max_new_tokens
    # How long a file's prompts or a chat template's are is not known before they are tokenized: one token at least.
    prompt = ADDITION_PROMPT if (config.task.name, config.task.template) == ("addition", "plain") else 1
    if seq_len > shape.max_seq_len:
        yield f"training.seq_len: expected at most the model's max_seq_len = {shape.max_seq_len}, found {seq_len}"
    if prompt + new > seq_len:
        yield (
            f"training.seq_len: expected at least {prompt + new} (a prompt of {prompt} and rollout.max_new_tokens = "
            f"{new}), found {seq_len}"
        )
    if generator.max_model_len > shape.max_seq_len:
        yield (
            f"generator.max_model_len: expected at most the model's max_seq_len = {shape.max_seq_len}, "
            f"found {generator.max_model_len}"
        )
    if 0 < generator.max_model_len < prompt + new:
        yield (
            f"generator.max_model_len: expected at least {prompt + new} (a prompt of {prompt} and "
            f"rollout.max_new_tokens = {new}), found {generator.max_model_len}"
        )

    length = generator.max_model_len or seq_len
    blocks = math.ceil(length / generator.block_size) + 1  # vLLM keeps one to itself
    heads = max(1, shape.n_kv_heads // generator.tensor_parallel_degree)
    token = 2 * shape.n_layers * heads * shape.head_dim * BYTES[generator.dtype]
    needed = math.ceil(blocks * generator.block_size * token / 2**20)
    if 0 < generator.kv_cache_memory_mb < needed:
        yield (
            f"generator.kv_cache_memory_mb: expected at least {needed}, which one sequence of {length} tokens takes, "
            f"found {generator.kv_cache_memory_mb}"
        )


def _placement(config: Config, shape: ModelShape | None, gpus: int) -> Iterator[str]:
    hosts, generator, trainers = config.hosts, config.generator, config.parallelism.world_size
    generators = generator.replicas * generator.tensor_parallel_degree if config.samples_rollouts else 0
    roles = {name: role.parallelism.world_size for name, role in config.roles.items()}
    total = trainers + generators + sum(roles.values())
    parts = [f"{trainers} of the trainer", *([f"{generators} of the generators"] if generators else [])]
    parts += [f"{count} of the {name.replace('_', ' ')}" for name, count in roles.items()]
    processes = f"{total} processes ({', '.join(parts)})"
    if hosts.device == "cuda" and not gpus:
        yield 'hosts.device: expected "auto" or "cpu" on a host without GPUs, found "cuda"'
    on_gpu = gpus > 0 and hosts.device != "cpu"
    if on_gpu and config.placement.kind == "colocated":
        total -= min(trainers, generators)
        processes = f"{total} GPUs ({', '.join(parts)}; the first two share theirs)"
    slots = hosts.slots or (gpus if on_gpu else CPU_SLOTS)
    if total > slots:
        yield f"hosts.slots: expected room for {processes}, found {slots}; lower their degrees or raise it"
    elif on_gpu and total > gpus:
        yield f"hosts.slots: expected a GPU for each of {processes}, found {gpus}"

    if on_gpu or hosts.device == "cuda":
        return
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        yield 'checkpoint.async_mode: expected "disabled" or "async" on a CPU, found "async_with_pinned_mem"'
    if config.profiling.enable_memory_snapshot:
        yield "profiling.enable_memory_snapshot: expected false on a CPU, found true"
    if not generators:
        return
    if shape and shape.head_dim % 2 == 0 and shape.head_dim not in CPU_HEAD_DIMS:
        sizes = ", ".join(map(str, CPU_HEAD_DIMS))
        yield f"model.head_dim: expected one that vLLM has CPU kernels for ({sizes}), found {shape.head_dim}"
    if generator.block_size % CPU_BLOCK_SIZE:
        yield f"generator.block_size: expected a multiple of {CPU_BLOCK_SIZE} on a CPU, found {generator.block_size}"
