"""Checks of the run against this host: GPUs, process slots, memory, and what vLLM supports on a CPU."""

import os
from collections.abc import Iterator

from titan_rl.config.sections import Config
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.snapshot import snapshot_bytes

CPU_SLOTS = 16
# Measured: the head sizes of vLLM 0.32's CPU attention. Any other one fails in the first forward.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_BLOCK_SIZE = 32


def check_placement(config: Config, shape: ModelShape | None, gpus: int) -> Iterator[str]:
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
        processes = f"{total} GPUs ({', '.join(parts)}; trainer and generators share GPUs)"
    slots = hosts.slots or (gpus if on_gpu else CPU_SLOTS)
    if total > slots:
        yield f"hosts.slots: expected room for {processes}, found {slots}; raise it, or lower the parallel degrees"
    elif on_gpu and total > gpus:
        yield f"hosts.slots: expected a GPU for each of {processes}, found {gpus}"

    if on_gpu or hosts.device == "cuda":
        return
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        yield 'checkpoint.async_mode: expected "disabled" or "async" on a CPU, found "async_with_pinned_mem"'
    if config.training.enable_cpu_offload:
        yield "training.enable_cpu_offload: expected false on a CPU, found true"
    if config.compile.enable:
        yield "compile.enable: expected false on a CPU, found true"
    if config.profiling.enable_memory_snapshot:
        yield "profiling.enable_memory_snapshot: expected false on a CPU, found true"
    if not generators:
        return
    if shape and shape.head_dim % 2 == 0 and shape.head_dim not in CPU_HEAD_DIMS:
        sizes = ", ".join(map(str, CPU_HEAD_DIMS))
        yield f"model.head_dim: expected a size that vLLM supports on a CPU ({sizes}), found {shape.head_dim}"
    if generator.block_size % CPU_BLOCK_SIZE:
        yield f"generator.block_size: expected a multiple of {CPU_BLOCK_SIZE} on a CPU, found {generator.block_size}"


def snapshot_warning(config: Config, shape: ModelShape | None) -> Iterator[str]:
    if config.fault.snapshot_interval == 0 or shape is None:
        return
    roles = [config.parallelism, *([config.critic.parallelism] if config.algorithm.needs_critic else [])]
    kept = sum(snapshot_bytes(shape.parameters, config.training.dtype, p.data_parallel_replicate_degree) for p in roles)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if kept > memory / 2:
        yield (
            f"fault.snapshot_interval = {config.fault.snapshot_interval}: snapshots take {kept / 2**30:.0f} GiB of the "
            f"host's {memory / 2**30:.0f} GiB of memory; 0 disables them"
        )
