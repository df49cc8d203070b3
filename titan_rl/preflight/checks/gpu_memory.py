"""Checks that every rank fits its GPU by estimate, and names the nearest setting with which it does."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from titan_rl.config.auto import on_device, resolved
from titan_rl.config.changes import changed
from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.preflight import device_memory
from titan_rl.preflight.checks.host import gpus_needed
from titan_rl.preflight.checks.role_folders import shape_of_role
from titan_rl.preflight.device_memory import CONTEXT, GRAPHS, Estimate
from titan_rl.preflight.quantities import gib
from titan_rl.wire.model_shape import ModelShape, ShardedModel

GPU_TOKENS = 2**15  # of a microbatch, at most: more keeps a GPU no busier
SPARE = 0.1  # share of a GPU that stays free when gradients and microbatches are sized by estimate
UTILIZATIONS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # to suggest


@dataclass(frozen=True, slots=True)
class Need:
    """What one rank of a mesh takes of its GPU at the worst moment, together with what shares the GPU with it."""

    key: str  # section to change
    what: str
    own: Estimate
    limit: int
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.own.total + sum(self.others.values())

    @property
    def parts(self) -> str:
        return ", ".join([str(self.own), *(f"{name} {gib(nbytes)}" for name, nbytes in self.others.items())])

    @property
    def fits(self) -> bool:
        return self.nbytes <= self.limit


def needs(
    config: Config,
    shape: ModelShape,
    gpu_bytes: int,
    roles: Mapping[str, ModelShape],
    sharded: Mapping[str, ShardedModel] = MappingProxyType({}),
) -> dict[str, Need]:
    """Return what each mesh needs, by its name. `roles` has the shapes of those that are not the policy's, `sharded`
    how TorchTitan cuts the models, where that is known."""
    colocated = config.placement.kind == "colocated" and config.samples_rollouts
    trainer = device_memory.trained(config, shape, config.parallelism, sharded.get("trainer"), lent=lent(config))
    asleep = CONTEXT + (0 if config.generator.enforce_eager else GRAPHS)
    beside = {"sleeping engine": asleep} if colocated else {}
    found = {"trainer": Need("parallelism", "a trainer", trainer, gpu_bytes, beside)}
    if config.samples_rollouts:
        found["generator"] = _generator(config, shape, gpu_bytes, trainer.idle if colocated else 0)
    for name, role in config.roles.items():
        estimate = device_memory.trained if name == "critic" else device_memory.frozen
        own = estimate(config, roles.get(name, shape), role.parallelism, sharded.get(name))
        found[name] = Need(name, f"a {name.replace('_', ' ')}", own, gpu_bytes)
    return found


def lent(config: Config) -> int:
    """Return how many frozen models the trainer holds besides its own."""
    a = config.algorithm
    return sum(
        (a.needs_reference and config.reference.mesh == "trainer", a.needs_teacher and config.teacher.mesh == "trainer")
    )


def _generator(config: Config, shape: ModelShape, gpu_bytes: int, trainer: int) -> Need:
    """A KV cache without a size takes the memory within gpu_memory_utilization that weights, graphs and a waiting
    `trainer` leave, but at least one sequence."""
    g = config.generator
    longest = (g.max_model_len or config.training.seq_len) * device_memory.cache_bytes_per_token(config, shape)
    cache, limit = g.kv_cache_memory_mb << 20, gpu_bytes
    if not cache:
        allowed = int(gpu_bytes * g.gpu_memory_utilization)
        left = allowed - trainer - device_memory.engine(config, shape, 0).total
        cache = max(longest, int(left / (1 + device_memory.FRAGMENTED)))
        limit = gpu_bytes if trainer else allowed
    own = device_memory.engine(config, shape, cache)
    return Need("generator", "an engine", own, limit, {"waiting trainer": trainer} if trainer else {})


def role_shapes(config: Config, shape: ModelShape) -> dict[str, ModelShape]:
    own = {name: shape_of_role(config, name) or shape for name in config.roles}
    return own | ({"critic": shape.with_value_head()} if "critic" in own else {})


def on_gpus(config: Config, shape: ModelShape, gpu_bytes: int) -> Config:
    """Return the config as ranks on GPUs work with it: gradients are kept whole where that fits, then microbatches have
    the largest power of two of rows that fits. On a GPU of unknown size they have one row. A colocated trainer starts
    after vLLM has measured the free memory, so the KV cache beside it is sized by estimate."""
    roles = role_shapes(config, shape)

    def fits(tried: Config, nbytes: float, *others: str) -> bool:
        found = needs(tried, shape, int(nbytes), roles)
        return gpu_bytes > 0 and all(need.fits for name, need in found.items() if name not in others)

    spared = (1 - SPARE) * gpu_bytes
    whole, rows = fits(resolved(config, "cuda", gradients_fit=True), spared, "generator"), 1
    while 2 * rows * config.training.seq_len <= GPU_TOKENS:
        if not fits(resolved(config, "cuda", gradients_fit=whole, rows=2 * rows), spared, "generator"):
            break
        rows *= 2
    final = resolved(config, "cuda", gradients_fit=whole, rows=rows)
    if config.placement.kind == "disaggregated" or not config.samples_rollouts or not gpu_bytes:
        return final
    cache = needs(final, shape, gpu_bytes, roles)["generator"].own.kept["KV cache"].nbytes
    return resolved(final, "cuda", cache_mb=cache >> 20)


def check_gpu_memory(
    config: Config,
    shape: ModelShape,
    gpu_bytes: int,
    *,
    most: int,
    sharded: Mapping[str, ShardedModel] = MappingProxyType({}),
) -> Iterator[str]:
    """`most`: how many GPUs there are."""
    config = on_device(config, "cuda")
    roles = role_shapes(config, shape)
    for name, need in needs(on_gpus(config, shape, gpu_bytes), shape, gpu_bytes, roles, sharded).items():
        if not need.fits:
            nearest = _nearest(config, shape, gpu_bytes, roles, name, most)
            room = f"{gib(need.limit)} GiB of a GPU's {gib(gpu_bytes)}"
            found = f"{gib(need.nbytes)} GiB by estimate ({need.parts})"
            yield f"[{need.key}]: expected {need.what} that fits {room}, found {found}; {nearest}"


def _nearest(
    config: Config, shape: ModelShape, gpu_bytes: int, roles: Mapping[str, ModelShape], name: str, most: int
) -> str:
    """Describe the first change that makes a mesh fit: one of `_changes`, or else several."""
    changes, most = list(_changes(config, shape, name, most)), max(most, gpus_needed(config))
    for keys in [*changes, *accumulate(changes, lambda before, more: before | more)]:
        other = changed(config, keys)
        need = needs(on_gpus(other, shape, gpu_bytes), shape, gpu_bytes, roles)[name]
        if need.fits and gpus_needed(other) <= most:
            settings = ", ".join(f"{key} = {as_toml(value)}" for key, value in keys.items())
            return f"{settings} needs {gib(need.nbytes)} GiB"
    tried = dict.fromkeys(key for keys in changes for key in keys)
    return f"no value of {', '.join(tried)} is enough: take larger GPUs, more of them, or a smaller model"


def _changes(config: Config, shape: ModelShape, name: str, most: int) -> Iterator[dict[str, Any]]:
    """Yield the settings that need less memory, those that cost the least time first."""
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
    yield from ({"training.local_batch_size": rows} for rows in _halves(config.training.local_batch_size, 1))
    modes = ("none", "selective", "full")
    for mode in modes[modes.index(config.activation_checkpoint.mode) + 1 :]:
        yield {"activation_checkpoint.mode": mode}
    yield {"training.gradient_sync": "microbatch"}
    section, p = ("parallelism", config.parallelism) if name == "trainer" else (name, config.roles[name].parallelism)
    for degree in _doubles(p.data_parallel_shard_degree, most):
        yield {f"{section}.data_parallel_shard_degree": degree}


def _halves(value: int, least: int) -> Iterator[int]:
    while (value := value // 2) >= least:
        yield value


def _doubles(value: int, most: int) -> Iterator[int]:
    while (value := value * 2) <= most:
        yield value
