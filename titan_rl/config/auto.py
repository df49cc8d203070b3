"""Resolves the keys that are "auto", or 0 for "auto": their values depend on the machine.

`on_device` resolves the keys that only the device decides. Checks, the plan and the run read its result. `resolved`
also resolves the keys that depend on estimates of memory and time, which only ranks read.
"""

from dataclasses import replace
from typing import Any, Literal

from titan_rl.config.sections import Config, Dtype

BATCHED_TOKENS = 8192
"""Tokens of one engine step on a GPU, at least: prompts are computed in few large steps."""
RECOMPUTED_FROM = 2048
"""Tokens of a row from which on blocks are recomputed on a GPU whose memory is unknown."""
BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
"""Tokens of a block of the KV cache, the unit of prefix caching. vLLM takes multiples of 32 on a CPU."""
CPU_CACHE_MB = 256
"""Size of the KV cache of an engine on a CPU: vLLM measures the memory of GPUs only."""


def device_of(config: Config, gpus: int) -> Literal["cpu", "cuda"]:
    """Return where the ranks of a run compute whose host has `gpus` GPUs."""
    return "cuda" if gpus and config.hosts.device != "cpu" else "cpu"


def on_device(config: Config, device: str) -> Config:
    """Return the config without "auto" in the keys that `device`, "cpu" or "cuda", decides. It resolves to itself."""
    g, t, cuda = config.generator, config.training, device == "cuda"
    compute = dtype_of_products(config, device)
    recompute = "auto" if cuda else "none"
    batched = max(BATCHED_TOKENS, g.max_model_len or t.seq_len, g.max_num_seqs) if cuda else 0
    forward = chosen(t.mixed_precision_param, compute)
    return replace(
        config,
        lora=replace(config.lora, base_dtype=chosen(config.lora.base_dtype, forward)),
        training=replace(t, mixed_precision_param=forward),
        activation_checkpoint=replace(
            config.activation_checkpoint, mode=chosen(config.activation_checkpoint.mode, recompute)
        ),
        checkpoint=replace(
            config.checkpoint,
            async_mode=chosen(config.checkpoint.async_mode, "async_with_pinned_mem" if cuda else "disabled"),
        ),
        generator=replace(
            g,
            dtype=chosen(g.dtype, "bfloat16" if g.quantization == "fp8" else compute),
            enforce_eager=chosen(g.enforce_eager, not cuda),
            async_scheduling=chosen(g.async_scheduling, cuda and not config.recorded_columns),
            max_num_batched_tokens=g.max_num_batched_tokens or batched,
            kv_cache_memory_mb=g.kv_cache_memory_mb or (0 if cuda else CPU_CACHE_MB),
        ),
        weight_sync=replace(
            config.weight_sync,
            in_flight=chosen(config.weight_sync.in_flight, "keep" if cuda and keeps(config) else "swap"),
        ),
    )


def dtype_of_products(config: Config, device: str) -> Dtype:
    """Return the dtype in which trainers and engines compute where their key is "auto"."""
    keys: list[Any] = [config.training.mixed_precision_param, config.generator.dtype]
    given: list[Dtype] = [key for key in keys if device == "cuda" and key != "auto"]
    return (given or ["bfloat16" if device == "cuda" else "float32"])[0]


def chosen(value: Any, otherwise: Any) -> Any:
    return otherwise if value == "auto" else value


def keeps(config: Config) -> bool:
    """Return whether unfinished requests may keep the keys and values of old weights: engines that sleep at an update
    free them, and a ratio against the policy of one version needs a correction (preflight/checks/algorithm.py)."""
    a = config.algorithm
    corrected = (a.proximal, a.correction) != ("trainer", "none")
    return a.kind == "rl" and config.rollout.steps_ahead > 0 and config.placement.kind != "colocated" and corrected


def compiles(config: Config, device: str) -> bool:
    """Return whether the trainers' blocks are compiled on `device`, "cpu" or "cuda"."""
    if config.compile.enable == "auto":
        forward = chosen(config.training.mixed_precision_param, dtype_of_products(config, device))
        return device == "cuda" and forward == "bfloat16"
    return config.compile.enable


def gradient_sync(config: Config, *, fits: bool = True) -> Literal["update", "microbatch"]:
    """Return when gradients are synced. `fits`: every rank has the memory for its gradients unsharded."""
    if config.training.gradient_sync == "auto":
        return "update" if fits else "microbatch"
    return config.training.gradient_sync


def parameter_gather(config: Config, *, fits: bool = True) -> Literal["update", "microbatch"]:
    """Return how often parameters are gathered. `fits`: every rank has the memory for its parameters unsharded."""
    if config.training.parameter_gather == "auto":
        return "update" if fits else "microbatch"
    return config.training.parameter_gather


def without_fsdp(config: Config, world_size: int) -> bool:
    """Return whether a model of a resolved config is on one rank that copies its parameters itself: FSDP2 would do so
    for every forward and backward. FSDP2 moves parameters in host memory, and adds up 16-bit gradients in float32."""
    t = config.training
    return world_size == 1 and t.parameter_gather == "update" and t.dtype == "float32" and not t.enable_cpu_offload


MOST_THREADS = 8
"""A process has more threads only by hosts.threads: their gain on machines with more cores has not been measured, and
models that train on CPUs are small."""


def threads(config: Config, kind: Literal["model", "generator"], device: str, cores: int) -> int:
    """Return the OpenMP threads of each process that holds a model of TorchTitan's, or an engine of vLLM's."""
    if config.hosts.threads:
        return config.hosts.threads
    roles = {name: role.parallelism.world_size for name, role in config.roles.items()}
    models = config.parallelism.world_size + sum(roles.values())
    if device == "cuda":  # only an optimizer in host memory computes there
        return max(1, cores // models) if kind == "model" and config.training.enable_cpu_offload else 1
    starts = config.samples_rollouts or kind == "generator"  # weights of any training are served
    engines = config.generator.replicas * config.generator.tensor_parallel_degree if starts else 0
    overlap = config.algorithm.kind == "rl" and (config.rollout.steps_ahead or config.training.stream_groups)
    judges = roles.get("reward_model", 0)  # while other groups are sampled
    together = models + engines if overlap else models if kind == "model" else engines + judges
    return min(MOST_THREADS, max(1, cores // together))


def recompute_by_length(config: Config) -> Literal["none", "selective"]:
    """Return the recomputation on a GPU whose memory is unknown."""
    return "selective" if config.training.seq_len >= RECOMPUTED_FROM else "none"


def resolved(
    config: Config,
    device: str,
    *,
    gradients_fit: bool = True,
    gather_fits: bool = True,
    keep_logits: bool = False,
    rows: int = 1,
    recompute: str = "",
    cache_mb: int = 0,
    sleep: bool = True,
) -> Config:
    """Return the config that the ranks on `device` work with. It has no "auto", and resolves to itself. Microbatches
    that are sized by tokens (preflight/memory.py) have `rows`. Activations that nothing else decides about are
    recomputed by `recompute`, or by the length of a row. A KV cache without a size has `cache_mb`; 0: what vLLM
    measures. Colocated engines `sleep`, unless a key decides."""
    config = on_device(config, device)
    mode = chosen(config.activation_checkpoint.mode, recompute or recompute_by_length(config))
    return replace(
        config,
        activation_checkpoint=replace(config.activation_checkpoint, mode=mode),
        generator=replace(config.generator, kv_cache_memory_mb=config.generator.kv_cache_memory_mb or cache_mb),
        placement=replace(config.placement, sleep=chosen(config.placement.sleep, sleep)),
        compile=replace(config.compile, enable=compiles(config, device)),
        training=replace(
            config.training,
            gradient_sync=gradient_sync(config, fits=gradients_fit),
            parameter_gather=parameter_gather(config, fits=gather_fits),
            keep_logits=chosen(config.training.keep_logits, keep_logits),
            local_batch_size=config.training.local_batch_size or rows,
        ),
    )
