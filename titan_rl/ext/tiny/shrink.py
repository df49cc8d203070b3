"""--scale tiny: the same run, small enough for this machine. Roles, axes, algorithm and hosts stay.

    Config -> shrunk -> Config, and what changed ("generator.replicas: 8 -> 2")

A model folder that is missing, or holds a large model, is replaced by a tiny random model of its family with the
built-in tokenizer, or by one that sees; missing rows by sums, or by squares to count. Keys given on the command line
stay as given.
"""

import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.config.changes import changed, differences, valued
from titan_rl.config.sections import Config, ModelSection
from titan_rl.config.toml import as_toml, schema
from titan_rl.preflight.placement import Unplaceable, place
from titan_rl.preflight.plan import write_model_folder
from titan_rl.preflight.pretrained import PREFIX
from titan_rl.preflight.refusal import refuse
from titan_rl.preflight.shapes import shape_of
from titan_rl.tasks.row_files import row_files
from titan_rl.wire.model_shape import ModelShape, SpecShape, shape_of_folder

TINY_PARAMETERS = 10**7  # a smaller model is not shrunk
SQUARES = "titan_rl.ext.vision.squares:counted"
SEEING = f"{PREFIX}tiny_vision"
DEGREES = ("data_parallel_shard_degree", "tensor_parallel_degree", "context_parallel_degree")
MODEL_KEYS = (
    *("dim", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size"),
    *("experts", "experts_per_token"),
)
ROW_KEYS = ("path", "eval_path", "sources", "prompt_key", "answer_key", "demonstration_key")
HOSTS = 2  # in place of more
AT_MOST: dict[str, int] = {
    **{
        f"{section}.{key}": 2
        for section in ("parallelism", "reference", "critic", "reward_model", "teacher")
        for key in DEGREES
    },
    "parallelism.data_parallel_replicate_degree": 2,
    "parallelism.expert_parallel_degree": 2,
    "cold_start.steps": 20,
    "cold_start.batch_size": 16,
    "rollout.groups_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 32,
    "environment.processes": 2,
    "environment.concurrency": 16,
    "training.seq_len": 512,
    "training.global_batch_size": 8,
    "training.local_batch_size": 2,
    "generator.replicas": 2,
    "generator.tensor_parallel_degree": 2,
    "generator.max_num_seqs": 64,
    "eval.size": 8,
}
VALUES: dict[str, Any] = {
    "algorithm.max_dead_steps": 0,  # a random model earns no reward
    "generator.max_model_len": 0,
    "generator.kv_cache_memory_mb": 64,
    "generator.enforce_eager": True,
    "training.enable_cpu_offload": False,
    "profiling.enable_memory_snapshot": False,
    "hosts.device": "cpu",
    "hosts.slots": 0,
    "hosts.gpu_memory_gb": 0.0,
    "hosts.memory_gb": 0.0,
    "hosts.link_gbps": 0.0,
}


def shrunk(config: Config, given: Collection[str], stand_ins: Path) -> tuple[Config, list[str]]:
    """Return the tiny config, and one line per key that changed. Models for roles are written to `stand_ins`."""
    changes = {key: min(value, valued(config, key)) for key, value in AT_MOST.items()} | VALUES
    changes |= dict(_model(config)) | dict(_rows(config)) | dict(_hosts(config))
    changes["job.dump_folder"] = f"{config.job.dump_folder}_tiny"

    def kept(keys: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in keys.items() if key not in given}

    tiny = changed(config, kept(changes))
    tiny = changed(tiny, kept(_dependent(tiny)))
    tiny = changed(tiny, kept(dict(_roles(tiny, stand_ins))))
    return tiny, [f"{key}: {as_toml(old)} -> {as_toml(new)}" for key, old, new in differences(config, tiny)]


def _model(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a tiny model of the same family. A folder that cannot be used is left to the checks."""
    folder, name = config.model.hf_assets_path, config.model.name
    shape = None
    if folder and os.path.isdir(folder):
        try:
            shape = shape_of_folder(folder, "model.hf_assets_path")
        except ValueError:
            return
        if shape.parameters <= TINY_PARAMETERS:
            return
    elif not folder and _parameters(config.model) <= TINY_PARAMETERS:
        return
    if config.model.vision != "none":
        yield "model.hf_assets_path", SEEING
        return
    if isinstance(shape, SpecShape):
        refuse("--scale", [f"--scale tiny: expected a family of docs/models.md, found {shape.family} in {folder}"])
    if shape:
        yield "model.name", shape.family
        yield "model.enable_weight_tying", shape.tied
    elif name == "auto":
        yield "model.name", "llama3"
    yield "model.hf_assets_path", ""
    yield "model.n_layers", 2
    yield from ((f"model.{key}", getattr(ModelSection(), key)) for key in MODEL_KEYS)


def _parameters(model: ModelSection) -> float:
    try:
        return shape_of(model).parameters
    except (ValueError, ZeroDivisionError):
        return 0  # left to the checks


def _rows(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a task that needs no files, if any file is missing; and leave out rows that no longer fit."""
    task, missing = config.task, False
    if task.name != "jsonl":
        return
    paths = [str(source.get("path", "")) for source in task.sources.values()] or [task.path]
    for path in [*paths, *([task.eval_path] if config.eval.size else [])]:
        try:
            row_files(path, "task.path")
        except FileNotFoundError:
            missing = True
    if not missing:
        yield "task.bad_rows", "drop"
        return
    sees = config.model.vision != "none"
    yield "task.name", SQUARES if sees else "addition"
    yield from ((f"task.{key}", schema()["task"][key].default) for key in ROW_KEYS)
    yield "task.images_key", "image" if sees else ""
    yield "eval.sets", {name: table for name, table in config.eval.sets.items() if not table.get("path")}
    yield "eval.keep_best", ""  # it may name one of the others


def _hosts(config: Config) -> Iterator[tuple[str, Any]]:
    if config.hosts.number > 1:
        yield "hosts.kind", "processes"
        yield "hosts.count", HOSTS
        yield "placement.hosts", {}
        defaults = ("addresses", "own_address", "tls", "insecure")
        yield from ((f"hosts.{key}", schema()["hosts"][key].default) for key in defaults)


def _dependent(config: Config) -> dict[str, Any]:
    """Return the keys whose bounds other keys set."""
    a, rollout, length = config.algorithm, config.rollout, config.training.seq_len
    new: dict[str, Any] = {
        "algorithm.minibatches": math.gcd(a.minibatches, rollout.groups_per_step),
        "algorithm.overlong_buffer": min(a.overlong_buffer, rollout.max_new_tokens // 2),
        "algorithm.length_target": min(a.length_target, rollout.max_new_tokens),
        "algorithm.pass_k": min(a.pass_k, rollout.group_size),
        "training.stream_groups": min(config.training.stream_groups, rollout.groups_per_step // 2),
        "environment.max_tokens": min(config.environment.max_tokens, length // 2),
        "fault.min_trainers": min(config.fault.min_trainers, config.parallelism.dp),
        "fault.min_replicas": min(config.fault.min_replicas, config.generator.replicas),
    }
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        new["checkpoint.async_mode"] = "async"
    if config.activation_checkpoint.mode == "offload":
        new["activation_checkpoint.mode"] = "full"
    if config.compile.enable is True:
        new["compile.enable"] = "auto"
    if config.hosts.number > 1:
        new["hosts.slots"] = _enough_slots(config)
    return new


def _enough_slots(config: Config) -> int:
    """Return the fewest slots per host with which all ranks have a place, so that every host has some."""
    for slots in range(1, 2**10):
        with suppress(Unplaceable):
            place(config, slots)
            return slots
    return 0


def _roles(config: Config, stand_ins: Path) -> Iterator[tuple[str, Any]]:
    """Yield folders of tiny models for the roles whose own is missing or large."""
    try:
        policy = shape_of(config.model)
    except ValueError:
        return
    if config.critic.hf_assets_path and not _is_tiny(config.critic.hf_assets_path):
        yield "critic.hf_assets_path", ""
    shapes = {"teacher": policy, "reward_model": policy.with_value_head()}
    needed = {"teacher": config.algorithm.loads_teacher, "reward_model": "reward_model" in config.roles}
    for seed, (role, shape) in enumerate(shapes.items()):
        if needed[role] and not _is_tiny(getattr(config, role).hf_assets_path):
            write_stand_in(stand_ins / role, shape, seed)
            yield f"{role}.hf_assets_path", str(stand_ins / role)


def _is_tiny(folder: str) -> bool:
    try:
        return shape_of_folder(folder, "").parameters <= TINY_PARAMETERS
    except ValueError:
        return False


def write_stand_in(folder: Path, shape: ModelShape, seed: int) -> None:
    """Write a Hugging Face folder of random weights, the same ones each time."""
    from safetensors.numpy import save_file

    write_model_folder(folder, shape)
    draw = np.random.default_rng(seed)
    tensors = {
        name: draw.normal(0, 0.02, size).astype(np.float32) if len(size) > 1 else np.ones(size, np.float32)
        for name, size in shape.folder_tensors().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
