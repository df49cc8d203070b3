"""A run's plan in words and numbers: what --dry-run prints, and what every run prints first."""

import os
from collections.abc import Sequence

from titan_rl.config import BYTES, Config
from titan_rl.plan_view import MeshRow, Plan
from titan_rl.setup import Setup


def describe(setup: Setup, warnings: Sequence[str]) -> Plan:
    config, shape = setup.config, setup.shape
    facts = [
        (
            "model",
            f"{shape.family}, {count(shape.parameters)} parameters: {shape.n_layers} layers x {shape.dim}, "
            f"{shape.n_heads} heads ({shape.n_kv_heads} kv), vocabulary {shape.vocab_size}"
            + (f", from {config.model.hf_assets_path}" if config.model.hf_assets_path else ", random weights"),
        ),
        ("task", task(setup)),
        ("weights", transport(setup)),
        ("run", str(setup.folder)),
    ]
    if config.cold_start.steps:
        facts.insert(2, ("cold start", cold_start(config)))
    if config.training.steps:
        facts.insert(-2, ("RL", rl(config)))
    if str(setup.resume):
        facts.append(("resume", f"from {setup.resume}"))
    return Plan(setup.name, config.job.description, [trainers(setup), generators(setup)], facts, warnings)


def trainers(setup: Setup) -> MeshRow:
    config, p = setup.config, setup.config.parallelism
    layout = [f"FSDP2 {p.data_parallel_shard_degree}"]
    if p.data_parallel_replicate_degree > 1:
        layout = [f"HSDP {p.data_parallel_replicate_degree} x {p.data_parallel_shard_degree}"]
    if p.tensor_parallel_degree > 1:
        layout.append(f"TP {p.tensor_parallel_degree}")
    training = config.training
    dtype = training.dtype
    if training.mixed_precision_param != dtype:
        dtype += f", {training.mixed_precision_param} compute"
    # weights, gradients and Adam's two moments, sharded over everything but the replicas
    share = p.data_parallel_shard_degree * p.tensor_parallel_degree
    each = 4 * setup.shape.parameters * BYTES[training.dtype] // share
    holds = f"weights, gradients, {config.optimizer.name}: {size(each)} a rank"
    if config.algorithm.kl_coef:
        holds += f", reference {size(each // 4)}"
    return MeshRow("trainer", p.world_size, " x ".join(layout), device(setup), dtype, holds)


def generators(setup: Setup) -> MeshRow:
    g = setup.config.generator
    each = setup.shape.parameters * BYTES[g.dtype] // g.tensor_parallel_degree
    cache = f"KV cache {g.kv_cache_memory_mb} MiB" if g.kv_cache_memory_mb else "KV cache by GPU memory"
    layout = f"vLLM x {g.replicas}" + (f", TP {g.tensor_parallel_degree}" if g.tensor_parallel_degree > 1 else "")
    procs = g.replicas * g.tensor_parallel_degree
    return MeshRow("generator", procs, layout, device(setup), g.dtype, f"weights {size(each)} a rank, {cache}")


def device(setup: Setup) -> str:
    return f"{setup.device}, this host" if setup.device == "cuda" else f"cpu ({os.cpu_count()} cores), this host"


def task(setup: Setup) -> str:
    config = setup.config
    return (
        f"{config.task.name}: {len(setup.task.train):,} problems, {len(setup.heldout.prompts)} held out, "
        f"reward {config.task.reward}"
    )


def cold_start(config: Config) -> str:
    cold = config.cold_start
    steps = f"{cold.steps} supervised steps of {cold.batch_size}"
    if not cold.stop_at:
        return steps
    return f"up to {steps}, until {cold.stop_at:g} of {config.eval.size} training problems are solved"


def rl(config: Config) -> str:
    r = config.rollout
    return (
        f"{config.algorithm.name}: {config.training.steps} steps of "
        f"{r.groups_per_step} prompts x {r.group_size} samples, lag {r.lag}"
    )


def transport(setup: Setup) -> str:
    """Named aloud, because the fallback is slower than what a cluster should have."""
    verbs = os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband")
    how = "ibverbs" if verbs else "TCP fallback: no RDMA device here"
    nbytes = setup.shape.parameters * BYTES[setup.config.generator.dtype]
    return f"RDMABuffer, one-sided reads ({how}), {size(nbytes)} a version and replica"


def count(n: float) -> str:
    return _scaled(n, 1000, ("", "K", "M", "B"))


def size(nbytes: float) -> str:
    return _scaled(nbytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while n >= base and power < len(units) - 1:
        n, power = n / base, power + 1
    return f"{n:.3g}{units[power]}"
