"""Checks of the run against this host: GPUs, process slots, memory, and what vLLM supports on a CPU."""

import os
from collections.abc import Iterator

from titan_rl.config.sections import BYTES, Config
from titan_rl.preflight.checks.titan_keys import check_compiled
from titan_rl.preflight.placement import CPU_SLOTS
from titan_rl.wire.cores import host_memory
from titan_rl.wire.gpus import Gpus
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.snapshot import snapshot_bytes
from titan_rl.wire.torch_build import as_numbers, cuda_media, torch_cuda, vllm_needs_gpu

PROCESS_BYTES = 2**28  # that a process takes on a CPU before it holds a weight
# Measured: the head sizes of vLLM 0.32's CPU attention. Any other one fails in the first forward.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_BLOCK_SIZE = 32


def gpus_needed(config: Config) -> int:
    """Return how many GPUs the run takes: one for each process, which colocated trainers and generators share."""
    g, trainers = config.generator, config.parallelism.world_size
    generators = g.replicas * g.tensor_parallel_degree if config.samples_rollouts else 0
    shared = min(trainers, generators) if config.placement.kind == "colocated" else 0
    return trainers + generators - shared + sum(role.parallelism.world_size for role in config.roles.values())


def gpus_of_hosts(config: Config, gpus: int) -> int:
    """Return how many GPUs the hosts have together, from those of one host; `processes` share those of this machine."""
    return gpus if config.hosts.kind == "processes" else gpus * config.hosts.number


def check_placement(config: Config, shape: ModelShape | None, gpus: int) -> Iterator[str]:
    hosts, generator, trainers = config.hosts, config.generator, config.parallelism.world_size
    generators = generator.replicas * generator.tensor_parallel_degree if config.samples_rollouts else 0
    roles = {name: role.parallelism.world_size for name, role in config.roles.items()}
    environments = config.environment.processes if config.rollout_code and generators else 0
    parts = [f"{trainers} of the trainer", *([f"{generators} of the generators"] if generators else [])]
    parts += [f"{count} of the {name.replace('_', ' ')}" for name, count in roles.items()]
    if hosts.device == "cuda" and not gpus:
        yield 'hosts.device: expected "auto" or "cpu" on a host without GPUs, found "cuda"'
    on_gpu = gpus > 0 and hosts.device != "cpu"
    if environments and not on_gpu:  # they need no GPU
        parts.append(f"{environments} of the environments")
    total = trainers + generators + sum(roles.values()) + (0 if on_gpu else environments)
    processes = f"{total} processes ({', '.join(parts)})"
    if on_gpu and config.placement.kind == "colocated":
        total = gpus_needed(config)
        processes = f"{total} GPUs ({', '.join(parts)}; trainer and generators share GPUs)"
    slots = hosts.slots or (gpus if on_gpu else CPU_SLOTS)
    if hosts.number > 1:
        pass  # check_hosts
    elif total > slots:
        yield f"hosts.slots: expected room for {processes}, found {slots}; raise it, or lower the parallel degrees"
    elif on_gpu and total > gpus:
        yield f"hosts.slots: expected a GPU for each of {processes}, found {gpus}"

    if on_gpu or hosts.device == "cuda":
        yield from check_compiled(config)
        return
    if media := " ".join(cuda_media()):
        yield (
            f"installed packages: expected none that is built for CUDA next to torch's CPU build, found {media}, which "
            f"vLLM and transformers fail to import; text models do not need them: pip uninstall -y {media}"
        )
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        yield 'checkpoint.async_mode: expected "disabled" or "async" on a CPU, found "async_with_pinned_mem"'
    if config.training.enable_cpu_offload:
        yield "training.enable_cpu_offload: expected false on a CPU, found true"
    if config.compile.enable is True:
        yield "compile.enable: expected false on a CPU, found true"
    if config.profiling.enable_memory_snapshot:
        yield "profiling.enable_memory_snapshot: expected false on a CPU, found true"
    yield from _check_capacity(config, shape, generators, total)
    if not generators:
        return
    if vllm_needs_gpu():
        yield (
            "hosts.device: expected a GPU, because vLLM's CUDA build is installed, which samples on nothing else; "
            "./scripts/run --extra cpu installs the build for CPUs"
        )
    longest = generator.max_model_len or config.training.seq_len
    if 0 < generator.max_num_batched_tokens < longest:
        least = f"0 or at least {longest} on a CPU, where a prompt is computed in one step"
        yield f"generator.max_num_batched_tokens: expected {least}, found {generator.max_num_batched_tokens}"
    if shape and shape.head_dim % 2 == 0 and shape.head_dim not in CPU_HEAD_DIMS:
        sizes = ", ".join(map(str, CPU_HEAD_DIMS))
        yield f"model.head_dim: expected a size that vLLM supports on a CPU ({sizes}), found {shape.head_dim}"
    if generator.block_size % CPU_BLOCK_SIZE:
        yield f"generator.block_size: expected a multiple of {CPU_BLOCK_SIZE} on a CPU, found {generator.block_size}"


def check_driver(config: Config, gpus: Gpus) -> Iterator[str]:
    """Check that torch can use the GPUs of this host: with a driver that is too old, it finds none."""
    wanted = torch_cuda()
    if not gpus.cuda or config.hosts.device == "cpu":
        return
    if not wanted:
        yield (
            f"hosts.device: expected a CUDA build of torch for this host's {gpus.count} GPUs, found a CPU build; "
            './scripts/run --extra cuda installs one, and hosts.device = "cpu" runs on the CPU'
        )
    elif as_numbers(gpus.cuda)[:1] < as_numbers(wanted)[:1]:
        yield (
            f"hosts.device: expected a driver that runs CUDA {wanted}, for which torch is built, found {gpus.driver}, "
            f'which runs CUDA up to {gpus.cuda}; update it, or set hosts.device = "cpu"'
        )


def _check_capacity(config: Config, shape: ModelShape | None, generators: int, processes: int) -> Iterator[str]:
    """Check that the models of a CPU run fit this host's memory, and its threads the cores."""
    threads, cores = config.hosts.threads, os.cpu_count() or 1
    if threads > (most := max(4, 2 * cores)):
        yield f"hosts.threads: expected at most {most} on a host of {cores} cores, found {threads}"
    memory = host_memory()
    if processes > (most := max(16, memory // PROCESS_BYTES)):
        yield f"hosts.slots: expected at most {most} processes in this host's {memory >> 30} GiB, found {processes}"
    cache = config.generator.kv_cache_memory_mb * generators << 20
    most = memory // 2**20 // max(1, generators)
    if cache > memory:
        found = f"found {config.generator.kv_cache_memory_mb}"
        yield f"generator.kv_cache_memory_mb: expected at most {most}, this host's memory per generator, {found}"
    elif shape is not None:
        copies = 4 * config.parallelism.data_parallel_replicate_degree * BYTES[config.training.dtype]
        copies += config.generator.replicas * BYTES[config.generator.dtype] if generators else 0
        if (needed := shape.parameters * copies + cache) > memory:
            found = (
                f"found {shape.parameters:,} parameters, which need {needed >> 30} GiB with optimizer and generators"
            )
            yield f"[model]: expected a model that fits this host's {memory >> 30} GiB of memory, {found}"


def snapshot_warning(config: Config, shape: ModelShape | None) -> Iterator[str]:
    if config.fault.snapshot_interval == 0 or shape is None:
        return
    roles = [config.parallelism, *([config.critic.parallelism] if config.algorithm.needs_critic else [])]
    kept = sum(snapshot_bytes(shape.parameters, config.training.dtype, p.data_parallel_replicate_degree) for p in roles)
    memory = host_memory()
    if kept > memory / 2:
        yield (
            f"fault.snapshot_interval = {config.fault.snapshot_interval}: snapshots take {kept / 2**30:.0f} GiB of the "
            f"host's {memory / 2**30:.0f} GiB of memory; 0 disables them"
        )
