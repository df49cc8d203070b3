"""What must hold between keys, found out before anything is spawned. Each key by itself is config_file.py's.

Every message names the key to change, says what was expected of it, and what was found.
"""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from titan_rl.config import BYTES, Config
from titan_rl.model_shape import ModelShape, shape_of
from titan_rl.rewards import last_number, reward_for
from titan_rl.tasks import jsonl
from titan_rl.tokenizer import SIZE, TextTokenizer
from titan_rl.types import Prompt

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
    rules = [_assets(config, shape), _task(config), _run(config)]
    if shape:
        rules += [_dimensions(config, shape), _parallelism(config, shape), _lengths(config, shape)]
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
    return found


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
    try:
        reward_for(task)
    except (TypeError, ValueError) as error:
        yield str(error)
    except Exception as error:  # importing the user's module runs it
        yield f'task.reward: expected "{task.reward}" to import, found {type(error).__name__}: {error}'
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
        examples = jsonl(config.task, key, ROWS_READ)
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
    if config.algorithm.name == "grpo" and rollout.group_size < 2:
        yield f"rollout.group_size: expected at least 2, for group-relative advantages, found {rollout.group_size}"
    if rollout.lag > 0:
        yield f"rollout.lag: expected 0, exact on-policy training, found {rollout.lag}"
    if config.checkpoint.keep_latest_k == 1:
        yield "checkpoint.keep_latest_k: expected 0 (all) or at least 2, as one may be half-written, found 1"


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
    key, tp = "parallelism.tensor_parallel_degree", config.parallelism.tensor_parallel_degree
    seq_len = config.training.seq_len
    for size in ("n_heads", "n_kv_heads", "hidden_dim", "vocab_size"):
        if getattr(shape, size) % tp:
            yield f"{key}: expected a divisor of the model's {size} = {getattr(shape, size)}, found {tp}"
    if config.parallelism.enable_sequence_parallel and seq_len % tp:
        yield f"training.seq_len: expected a multiple of {key} = {tp} (sequence parallel), found {seq_len}"

    key, tp = "generator.tensor_parallel_degree", config.generator.tensor_parallel_degree
    for size in ("n_heads", "hidden_dim"):
        if getattr(shape, size) % tp:
            yield f"{key}: expected a divisor of the model's {size} = {getattr(shape, size)}, found {tp}"
    if shape.n_kv_heads % tp and tp % shape.n_kv_heads:
        yield f"{key}: expected a divisor or a multiple of the model's n_kv_heads = {shape.n_kv_heads}, found {tp}"


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
    generators = generator.replicas * generator.tensor_parallel_degree
    processes = f"{trainers + generators} processes ({trainers} of the trainer, {generators} of the generators)"
    if hosts.device == "cuda" and not gpus:
        yield 'hosts.device: expected "auto" or "cpu" on a host without GPUs, found "cuda"'
    on_gpu = gpus > 0 and hosts.device != "cpu"
    slots = hosts.slots or (gpus if on_gpu else CPU_SLOTS)
    if trainers + generators > slots:
        yield f"hosts.slots: expected room for {processes}, found {slots}; lower their degrees or raise it"
    elif on_gpu and trainers + generators > gpus:
        yield f"hosts.slots: expected a GPU for each of {processes}, found {gpus}"

    if on_gpu or hosts.device == "cuda":
        return
    if shape and shape.head_dim % 2 == 0 and shape.head_dim not in CPU_HEAD_DIMS:
        sizes = ", ".join(map(str, CPU_HEAD_DIMS))
        yield f"model.head_dim: expected one that vLLM has CPU kernels for ({sizes}), found {shape.head_dim}"
    if generator.block_size % CPU_BLOCK_SIZE:
        yield f"generator.block_size: expected a multiple of {CPU_BLOCK_SIZE} on a CPU, found {generator.block_size}"
