"""Resolves the keys that are "auto", or 0 for that: what they mean depends on the machine."""

from dataclasses import replace
from typing import Literal

from titan_rl.config.sections import Config


def compiles(config: Config, device: str) -> bool:
    """Return whether the trainers' blocks are compiled on `device`, "cpu" or "cuda"."""
    if config.compile.enable == "auto":
        return device == "cuda" and config.training.mixed_precision_param == "bfloat16"
    return config.compile.enable


def gradient_sync(config: Config, *, fits: bool = True) -> Literal["update", "microbatch"]:
    """Return when gradients are synced. `fits`: every rank has the memory for its gradients unsharded."""
    if config.training.gradient_sync == "auto":
        return "update" if fits else "microbatch"
    return config.training.gradient_sync


MOST_THREADS = 8
"""Beyond that a process is given threads by hosts.threads only: no machine with more cores has measured what they add,
and models that train on CPUs are small."""


def threads(config: Config, kind: Literal["model", "generator"], device: str, cores: int) -> int:
    """Return the OpenMP threads of each process that holds a model of TorchTitan's, or an engine of vLLM's."""
    if config.debug.exact:  # several threads would add up floats in another order than one
        return 1
    if config.hosts.threads:
        return config.hosts.threads
    roles = {name: role.parallelism.world_size for name, role in config.roles.items()}
    models = config.parallelism.world_size + sum(roles.values())
    if device == "cuda":  # only an optimizer in host memory computes there
        return max(1, cores // models) if kind == "model" and config.training.enable_cpu_offload else 1
    starts = config.samples_rollouts or kind == "generator"  # trained weights are served whatever trained them
    engines = config.generator.replicas * config.generator.tensor_parallel_degree if starts else 0
    overlap = config.algorithm.kind == "rl" and (config.rollout.lag or config.training.stream_groups)
    judges = roles.get("reward_model", 0)  # while other groups are sampled
    together = models + engines if overlap else models if kind == "model" else engines + judges
    return min(MOST_THREADS, max(1, cores // together))


def resolved(config: Config, device: str, *, gradients_fit: bool = True, rows: int = 1) -> Config:
    """Return the config that the ranks on `device` work with. It has no "auto", and resolves to itself. Microbatches
    that are sized by tokens (preflight/microbatches.py) have `rows`."""
    return replace(
        config,
        compile=replace(config.compile, enable=compiles(config, device)),
        training=replace(
            config.training,
            gradient_sync=gradient_sync(config, fits=gradients_fit),
            local_batch_size=config.training.local_batch_size or rows,
        ),
    )
