"""Checks of the run against this machine, or the one that it is planned for: GPUs, process slots, memory, and what
vLLM supports on a CPU."""

import os
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from titan_rl.config.auto import on_device, resolved
from titan_rl.config.changes import changed
from titan_rl.config.sections import BYTES, Config
from titan_rl.config.toml import as_toml
from titan_rl.preflight.added_parameters import trained_parameters, with_adapter_sync
from titan_rl.preflight.checks.parts import MODEL_CHECKS, checks_of_parts
from titan_rl.preflight.memory import (
    BFLOAT16_BETA,
    GIB,
    ONE_POLICY,
    UNKNOWN,
    AdapterCounts,
    Cut,
    by_formula,
    cache_room,
    gib,
    host_loads,
    needs,
    offloaded,
    on_gpus,
    size,
)
from titan_rl.preflight.placement import CPU_SLOTS, gpus_needed
from titan_rl.preflight.refusal import problem
from titan_rl.preflight.torch_build import as_numbers, cuda_media, installed_vllm, removal, torch_cuda
from titan_rl.wire.cores import host_memory
from titan_rl.wire.gpus import Gpus
from titan_rl.wire.model_shape import ModelShape, SpecShape
from titan_rl.wire.parts import part

PROCESS_BYTES = 2**28  # that a process takes on a CPU before it holds a weight
IMAGES_BYTES = 254 * 2**20  # that reading images adds to an environment process (docs/benchmarks.md)
# Measured: the head sizes of vLLM 0.32's CPU attention. Any other one fails in the first forward.
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
LORA_RANK = 16  # to suggest
NOTED = 1.05  # times as long: less is no price
UTILIZATIONS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # to suggest


def check_placement(config: Config, shape: ModelShape | None, gpus: int) -> Iterator[str]:
    hosts, generator, trainers = config.hosts, config.generator, config.parallelism.world_size
    generators = generator.replicas * generator.tensor_parallel_degree if config.samples_rollouts else 0
    on_gpu = gpus > 0 and hosts.device != "cpu"
    environments = config.environment.processes if config.rollout_code and generators and not on_gpu else 0
    counts = {"trainer": trainers, "generators": generators}
    counts |= {name.replace("_", " "): role.parallelism.world_size for name, role in config.roles.items()}
    counts["seats' models"] = len(config.environment.folders) if generators else 0
    counts["environments"] = environments  # on GPUs they need no slot
    total, parts = sum(counts.values()), ", ".join(f"{n} of the {name}" for name, n in counts.items() if n)
    processes = f"{total} processes ({parts})"
    if hosts.device == "cuda" and not gpus:
        yield 'hosts.device: expected "auto" or "cpu" on a host without GPUs, found "cuda"'
    if on_gpu and config.placement.kind == "colocated":
        total = gpus_needed(config)
        processes = f"{total} GPUs ({parts}; trainer and generators share GPUs)"
        if config.weight_sync.transport == "broadcast":
            why = 'with placement.kind = "colocated", because NCCL refuses a group with two ranks on one GPU'
            yield problem(config, "weight_sync.transport", f'"auto" or another value {why}')
    slots = hosts.slots or (gpus if on_gpu else CPU_SLOTS)
    if hosts.number > 1:
        pass  # check_hosts
    elif total > slots:
        yield f"hosts.slots: expected room for {processes}, found {slots}; raise it, or lower the parallel degrees"
    elif on_gpu and total > gpus:
        yield f"hosts.slots: expected a GPU for each of {processes}, found {gpus}"
    if not on_gpu and hosts.device != "cuda":
        yield from _check_cpu(config, shape, generators, total)
    elif config.compile.enable is True and config.training.mixed_precision_param == "float32":
        why = 'with training.mixed_precision_param = "float32", whose attention cannot be compiled'
        yield problem(config, "compile.enable", f'false or "auto" {why}')


def _check_cpu(config: Config, shape: ModelShape | None, generators: int, processes: int) -> Iterator[str]:
    wrong, generator = partial(problem, config), config.generator
    if media := cuda_media():
        yield (
            "installed packages: expected none that is built for CUDA next to torch's CPU build, found "
            f"{' '.join(media)}, which vLLM and transformers fail to import; text models do not need them: "
            f"{removal(media)}"
        )
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        yield wrong("checkpoint.async_mode", '"disabled" or "async" on a CPU')
    if config.activation_checkpoint.mode == "offload":
        yield wrong("activation_checkpoint.mode", '"none", "selective" or "full" on a CPU')
    if config.training.enable_cpu_offload:
        yield wrong("training.enable_cpu_offload", "false on a CPU")
    if config.compile.enable is True:
        yield wrong("compile.enable", "false on a CPU")
    if config.profiling.enable_memory_snapshot:
        yield wrong("profiling.enable_memory_snapshot", "false on a CPU")
    yield from _check_capacity(config, shape, generators, processes)
    if not generators:
        return
    if installed_vllm() == {"vllm"}:
        yield (
            "hosts.device: expected a GPU, because vLLM's CUDA build is installed, which samples on nothing else; "
            "./scripts/run --extra cpu installs the build for CPUs"
        )
    longest = generator.max_model_len or config.training.seq_len
    if 0 < generator.max_num_batched_tokens < longest:
        least = f"0 or at least {longest} on a CPU, where a prompt is computed in one step"
        yield wrong("generator.max_num_batched_tokens", least)
    grouped = shape is not None and not isinstance(shape, SpecShape)  # another attention may have other sizes
    if shape and grouped and shape.head_dim % 2 == 0 and shape.head_dim not in CPU_HEAD_DIMS:
        sizes = ", ".join(map(str, CPU_HEAD_DIMS))
        yield f"model.head_dim: expected a size that vLLM supports on a CPU ({sizes}), found {shape.head_dim}"


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


def check_engine(config: Config, device: str) -> Iterator[str]:
    """Check that this host has vLLM, which only the extras bring. Other hosts have their own Python."""
    if config.samples_rollouts and config.hosts.number == 1 and not installed_vllm():
        yield f"installed packages: expected vLLM, which samples, found none: pip install 'titan-rl[{device}]'"


def _check_capacity(config: Config, shape: ModelShape | None, generators: int, processes: int) -> Iterator[str]:
    """Check that the models of a CPU run fit this host's memory, and its threads the cores."""
    cores, memory, g = os.cpu_count() or 1, host_memory(), config.generator
    if config.hosts.threads > (most := max(4, 2 * cores)):
        yield problem(config, "hosts.threads", f"at most {most} on a host of {cores} cores")
    reads = bool(config.rollout_code) and generators > 0 and config.model.vision != "none"
    reading = config.environment.processes * reads
    if processes > (most := max(16, (memory - reading * IMAGES_BYTES) // PROCESS_BYTES)):
        images = f", {reading} of which read images" if reading else ""
        expected = f"at most {most} processes in this host's {memory >> 30} GiB"
        yield f"hosts.slots: expected {expected}, found {processes}{images}"
    cache, most = g.kv_cache_memory_mb * generators << 20, memory // 2**20 // max(1, generators)
    if cache > memory:
        yield problem(config, "generator.kv_cache_memory_mb", f"at most {most}, this host's memory per generator")
    elif shape is not None:
        replicas, trained = config.parallelism.data_parallel_replicate_degree, trained_parameters(config.lora, shape)
        state = 4 * trained * BYTES[config.training.dtype]
        state += shape.parameters * BYTES[config.lora.base_dtype] if config.lora.on else 0
        engines = shape.parameters * g.replicas * BYTES[g.dtype] if generators else 0
        if (needed := replicas * state + engines + cache) > memory:
            found = f"{shape.parameters:,} parameters, which need {needed >> 30} GiB with optimizer and generators"
            yield f"[model]: expected a model that fits this host's {memory >> 30} GiB of memory, found {found}"


def check_gpu_memory(
    config: Config,
    shape: ModelShape,
    gpu_bytes: int,
    *,
    most: int,
    sharded: Cut = UNKNOWN,
    adapters: AdapterCounts = ONE_POLICY,
) -> Iterator[str]:
    """Check that every rank fits its GPU by estimate, and name the nearest setting with which it does. `most`: how many
    GPUs there are."""
    config = on_device(config, "cuda")
    planned = on_gpus(config, shape, gpu_bytes, adapters)
    for name, need in needs(planned, shape, gpu_bytes, sharded, adapters).items():
        if not need.fits:
            nearest = _nearest(config, shape, gpu_bytes, name, most, adapters)
            room = f"{gib(need.limit)} GiB of a GPU's {gib(gpu_bytes)}"
            found = f"{gib(need.nbytes)} GiB by estimate ({need.parts})"
            yield f"[{need.key}]: expected {need.what} that fits {room}, found {found}; {nearest}"


def _nearest(config: Config, shape: ModelShape, gpu_bytes: int, name: str, most: int, adapters: AdapterCounts) -> str:
    """Describe the first change that makes a mesh fit: one of `_changes`, or else several; or else every one of
    `_last_resorts` that does."""
    most = max(most, gpus_needed(config))
    changes = list(_changes(config, shape, name, most))
    together = list(accumulate(changes, lambda before, more: before | more))

    def fitting(keys: Mapping[str, Any]) -> str:
        """Return what these keys need and cost, or "" if the mesh does not fit with them, or another check refuses."""
        other = with_adapter_sync(changed(config, keys), shape, "cuda")
        planned = on_gpus(other, shape, gpu_bytes, adapters)
        found = needs(planned, shape, gpu_bytes, adapters=adapters)
        need, moved = found[name], "placement.kind" in keys
        fits = all(each.fits for each in found.values()) if moved else need.fits
        if not fits or gpus_needed(other) > most or _refused(other, shape):
            return ""
        settings = ", ".join(f"{key} = {as_toml(value)}" for key, value in keys.items())
        return f"{settings} needs {gib(need.nbytes)} GiB{price(keys, config, planned, shape, gpu_bytes)}"

    if found := next(filter(None, map(fitting, [*changes, *together])), ""):
        return found
    resorts, every = list(_last_resorts(config, name, most)), together[-1] if together else {}
    for smaller in ({}, every):
        if found := [text for keys in resorts if (text := fitting({**smaller, **keys}))]:
            return " or ".join(found)
    tried = dict.fromkeys(key for keys in [*changes, *resorts] for key in keys)
    return f"no value of {', '.join(tried)} is enough: take larger GPUs, more of them, or a smaller model"


def _refused(config: Config, shape: ModelShape) -> bool:
    """Return True if other checks refuse what a change of `_last_resorts` leads to."""
    if any(list(each.problems(config, shape, "cuda")) for each in checks_of_parts(config, MODEL_CHECKS)):
        return True
    quantized = part("checks of quantization") if config.generator.quantization != "none" else None
    if quantized and list(quantized(config, shape, "cuda")):
        return True
    p, memory = config.parallelism, config.hosts.memory_gb * GIB
    states = offloaded(config, by_formula(shape, p, config.lora))
    return config.training.enable_cpu_offload and 0 < memory < states * -(-p.world_size // config.hosts.number)


def price(keys: Mapping[str, Any], config: Config, planned: Config, shape: ModelShape, gpu_bytes: int) -> str:
    """Describe what a planned change of keys costs: the share of the parameters that is trained, host memory, and the
    time of updates by the planner's closed form, as a multiple of the time on a GPU that all of it fitted."""
    t, costs = planned.training, list[str]()
    if planned.lora.on and not config.lora.on:
        share = trained_parameters(planned.lora, shape) / shape.parameters
        costs.append(f"trains adapters of {100 * share:.2g}% of the parameters")
    if t.enable_cpu_offload and not config.training.enable_cpu_offload:
        cut = by_formula(shape, planned.parallelism, planned.lora)
        costs.append(f"{gib(offloaded(planned, cut))} GiB of host memory per rank")
    if planned.optimizer.moments != config.optimizer.moments:
        costs.append("Adam's moments keep 8 of 24 bits")
    times = part("times of updates")
    if times and planned.lora.on == config.lora.on and any(not key.startswith("generator.") for key in keys):
        of = times(shape, gpu_bytes)
        given = resolved(config, "cuda", gradients_fit=False, rows=t.local_batch_size, recompute="none")
        ratio = of.seconds(planned) / of.seconds(given)
        costs += [f"updates at least {ratio:.2g} times as long"] * (ratio >= NOTED)
    return f" ({', '.join(costs)})" if costs else ""


def _changes(config: Config, shape: ModelShape, name: str, most: int) -> Iterator[dict[str, Any]]:
    """Yield settings that need less memory, the cheapest in time first."""
    if name == "generator":
        g = config.generator
        if g.kv_cache_memory_mb:
            yield from ({"generator.kv_cache_memory_mb": mb} for mb in _halves(g.kv_cache_memory_mb, 64))
        yield from ({"generator.max_num_seqs": count} for count in _halves(g.max_num_seqs, 8))
        if not g.kv_cache_memory_mb:
            lower = (part for part in UTILIZATIONS if part < g.gpu_memory_utilization)
            yield from ({"generator.gpu_memory_utilization": part} for part in lower)
        for degree in _doubles(g.tensor_parallel_degree, most):
            if shape.n_heads % degree == 0:
                replicas = max(1, g.replicas * g.tensor_parallel_degree // degree)
                yield {"generator.tensor_parallel_degree": degree, "generator.replicas": replicas}
        return
    if config.placement.sleep is False:
        yield {"placement.sleep": True}
    yield from ({"training.local_batch_size": rows} for rows in _halves(config.training.local_batch_size, 1))
    yield from [{"training.keep_logits": False}] * (config.training.keep_logits is True)
    modes = ("none", "selective", "full", "auto", "offload")  # "auto" is "full" where no other one fits
    for mode in modes[modes.index(config.activation_checkpoint.mode) + 1 :]:
        yield from [{"activation_checkpoint.mode": mode}] * (mode != "auto")
    yield from [{"training.gradient_sync": "microbatch"}] * (config.training.gradient_sync == "update")
    if config.training.parameter_gather == "update":
        yield {"training.gradient_sync": "microbatch", "training.parameter_gather": "microbatch"}
    section, p = ("parallelism", config.parallelism) if name == "trainer" else (name, config.roles[name].parallelism)
    for degree in _doubles(p.data_parallel_shard_degree, most):
        yield {f"{section}.data_parallel_shard_degree": degree}
    for degree in _doubles(p.context_parallel_degree, most):
        yield {f"{section}.context_parallel_degree": degree}


def _last_resorts(config: Config, name: str, most: int) -> Iterator[dict[str, Any]]:
    """Yield settings that change the trained parameters, or their place: each has a price for the user to see."""
    t, g, p, alone = config.training, config.generator, config.parallelism, config.weight_sync.in_flight == "swap"
    colocated = config.placement.kind == "colocated"
    if name == "trainer" and config.samples_rollouts and not (colocated or config.roles or t.stream_groups) and alone:
        shards = most * p.data_parallel_shard_degree // p.world_size
        keys = {
            "parallelism.data_parallel_shard_degree": shards,
            "generator.replicas": most // g.tensor_parallel_degree,
        }
        yield {"placement.kind": "colocated", **keys}
    if config.optimizer.moments == "master" and t.dtype == "float32" and not config.lora.on and name != "generator":
        yield from [{"optimizer.moments": "bfloat16"}] * (
            max(config.optimizer.beta1, config.optimizer.beta2) <= BFLOAT16_BETA
        )
    if not t.enable_cpu_offload and (name != "generator" or colocated):
        yield {"training.enable_cpu_offload": True}
    if not config.lora.on and name in ("trainer", "generator") and (name == "trainer" or colocated):
        yield {"lora.rank": LORA_RANK}
    if name == "generator" and g.quantization == "none":
        yield {"generator.quantization": "fp8"}


def _halves(value: int, least: int) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value


def _doubles(value: int, most: int) -> Iterator[int]:
    while (value := value * 2) <= most:
        yield value


def check_cache_room(
    config: Config, shape: ModelShape, gpu_bytes: int, adapters: AdapterCounts = ONE_POLICY
) -> Iterator[str]:
    """Check that the KV cache of an engine holds the sequences that it samples at once."""
    room, g = cache_room(config, shape, gpu_bytes, adapters), config.generator
    if config.samples_rollouts and config.placement.kind == "colocated" and not (g.kv_cache_memory_mb or gpu_bytes):
        why = 'because with placement.kind = "colocated" it is planned, and the memory of the GPUs is unknown'
        yield problem(config, "generator.kv_cache_memory_mb", f"a size, {why}")
    if room is None or room.whole >= room.fewest:
        return
    sequences = f"{room.fewest} sequences" if room.fewest > 1 else "one sequence"
    if g.kv_cache_memory_mb:
        cache = f"{room.mib(room.fewest)}, the KV cache of {sequences} of {room.longest} tokens"
        yield problem(config, "generator.kv_cache_memory_mb", f"at least {cache}")
    else:
        cache = f"of which the KV cache of {size(room.nbytes)} by estimate holds {sequences}"
        yield f"generator.max_model_len: expected at most {room.length(room.fewest)}, {cache}, found {room.longest}"


def cache_warning(
    config: Config, shape: ModelShape, gpu_bytes: int, adapters: AdapterCounts = ONE_POLICY
) -> Iterator[str]:
    room = cache_room(config, shape, gpu_bytes, adapters)
    if room is None or not room.fewest <= room.whole < room.wanted:
        return
    advice = "lower generator.max_model_len if no sequence is as long"
    if config.generator.kv_cache_memory_mb:
        advice = f"generator.kv_cache_memory_mb = {room.mib(room.wanted)} holds them all"
    yield (
        f"generator: the KV cache of {size(room.nbytes)} holds {room.whole} sequences of {room.longest} tokens, of the "
        f"{room.wanted} that an engine samples at once: if they grow as long, some wait or are computed again; {advice}"
    )


def check_host_memory(
    config: Config, shape: ModelShape, sharded: Cut, gpus: int, adapters: AdapterCounts = ONE_POLICY
) -> Iterator[str]:
    """Refuse what does not fit the stated memory of a host."""
    loads, memory = host_loads(config, shape, sharded, gpus, adapters), config.hosts.memory_gb * GIB
    fullest = max((load for load in loads), key=lambda load: load.total, default=None)
    if not memory or fullest is None or fullest.total <= memory:
        return
    parts = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in fullest.held.items())
    without = fullest.total - fullest.held.get("snapshots", 0) - fullest.held.get("peers' snapshots", 0)
    better = f"fault.snapshot_interval = 0 needs {gib(without)} GiB"
    if without > memory:
        better = "take hosts with more memory, or more of them"
    yield (
        f"hosts.memory_gb: expected {gib(fullest.total)} GiB on a host ({parts}), besides its processes, found "
        f"{config.hosts.memory_gb:g}; {better}"
    )
