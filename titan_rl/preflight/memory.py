"""Estimates the memory that each rank and each host needs, and sizes microbatches and KV caches by it.

Weights, optimizer states, caches and activations follow from the shapes: tests/unit/preflight/test_device_memory.py
counts the activations in TorchTitan's own blocks. What no shape gives is an allowance, a key of [memory]:
docs/clusters.md lists them with their sources.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType

from titan_rl.batch.prefixes import MOST_TARGETS
from titan_rl.config.auto import BLOCK_TOKENS, recompute_by_length, resolved, without_fsdp
from titan_rl.config.sections import BYTES, Config, LoraSection, MemorySection, ParallelismSection
from titan_rl.kernels.logit_windows import most_flops, most_logits
from titan_rl.preflight.added_parameters import added_parameters, trained_parameters
from titan_rl.preflight.placement import Unplaceable, place, slots_per_host
from titan_rl.preflight.shapes import role_shapes
from titan_rl.preflight.snapshot_sizes import snapshot_sizes
from titan_rl.wire.counted import counted
from titan_rl.wire.model_shape import ModelShape, ShardedModel
from titan_rl.wire.parts import needed_part, part
from titan_rl.wire.weight_source import SLOTS

GIB = 2**30
PREFILL_TOKENS = 2048  # vLLM computes in one step by default, unless max_num_seqs is larger
BYTES_PER_TOP_TOKEN = 64  # an id, and float32 numbers: two log-probs, what the divergence keeps, gradients
GPU_TOKENS = 2**15  # most tokens of a microbatch: more keeps a GPU no busier
SPARE = 0.1  # share of a GPU that stays free when gradients and microbatches are sized by estimate
EQUAL = 1.001  # times as long as the fastest: the planner's closed form tells no more apart
FEWEST = 4  # whole sequences in a cache: with fewer, an engine computes hardly anything at a time
# Tokens x hidden_dim. Measured on cores with 1 MiB of L2 and 32 MiB of L3: at hidden_dim 384 the fastest microbatch has
# 4096 tokens (512 take 1.34 times as long, 10,240 take 1.1 times), at 1024 about 1000 (3300 take 1.09 times as long).
CPU_ELEMENTS = 3 * 2**19
MEMORY_SHARE = 4  # all microbatches at once take at most a quarter of the host's memory
GATHERED_SHARE = 8  # and gathered parameters of all ranks an eighth
Cut = Mapping[str, ShardedModel]
"""How TorchTitan cuts the models, by mesh."""
NO_LORA = LoraSection()
UNKNOWN: Cut = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """How many policies' adapters a run has over one base."""

    banked: int = 0  # in the trainers' bank, besides those in the model
    optimizers: int = 1
    slots: int = 1  # per engine

    @classmethod
    def of_policies(cls, number: int) -> "AdapterCounts":
        return cls(number - 1, number, number)


ONE_POLICY = AdapterCounts()


def count(n: float) -> str:
    """Write a number as people read it."""
    return _scaled(n, 1000, ("", "K", "M", "B"))


def size(nbytes: float) -> str:
    return _scaled(nbytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while n >= base and power < len(units) - 1:
        n, power = n / base, power + 1
    return f"{n:.3g}{units[power]}"


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Bytes of one process for one purpose, and the formula that they come from."""

    nbytes: int
    formula: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one process takes of its GPU. `kept`: all the time, while an engine on the same GPU samples too. `peak`:
    during a forward, a backward or an engine step."""

    kept: Mapping[str, MemoryPart]
    peak: Mapping[str, MemoryPart]
    allowances: MemorySection
    peers: int = 0  # processes with which it communicates

    @property
    def idle(self) -> int:
        return self._with_overhead(self.kept)

    @property
    def total(self) -> int:
        return self._with_overhead(self.parts)

    @property
    def parts(self) -> Mapping[str, MemoryPart]:
        return {**self.kept, **self.peak}

    @property
    def overhead(self) -> MemoryPart:
        m = self.allowances
        peers = f" + nccl_buffers_mb {m.nccl_buffers_mb}" if self.peers else ""
        formula = f"[memory] cuda_context_mb {m.cuda_context_mb}{peers} + fragmentation {m.fragmentation:g}"
        return MemoryPart(self.total - self.allocated, formula)

    @property
    def allocated(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def outside(self) -> int:
        """Bytes that torch's allocator does not hold."""
        return self.allowances.cuda_context_mb + (self.allowances.nccl_buffers_mb if self.peers else 0) << 20

    def _with_overhead(self, parts: Mapping[str, MemoryPart]) -> int:
        allocated = sum(part.nbytes for part in parts.values())
        return int(allocated * (1 + self.allowances.fragmentation)) + self.outside

    def __str__(self) -> str:
        named = [f"{name} {gib(part.nbytes)}" for name, part in self.parts.items() if part.nbytes >= GIB / 20]
        return ", ".join([*named, f"CUDA and fragmentation {gib(self.overhead.nbytes)}"])


def by_formula(shape: ModelShape, p: ParallelismSection, lora: LoraSection = NO_LORA) -> ShardedModel:
    """Return how a model is cut where every size divides evenly; a dry run asks TorchTitan (sharding.py)."""
    tp, ep = p.tensor_parallel_degree, p.expert_parallel_degree
    again = head_parameters(shape) if shape.tied and tp > 1 else 0  # FSDP2 then gathers a tied weight for both users
    stack = 3 * shape.experts * shape.dim * shape.hidden_dim  # the experts of a layer, of which a rank gathers its own
    fewer = stack // tp - stack // ep if ep > 1 else 0
    added = added_parameters(lora, shape).number(tp)
    return ShardedModel(
        held=(shape.parameters // tp + added) // p.shards,
        whole=(shape.parameters + again) // tp - shape.routed_layers * fewer + added,
        block=max(block_parameters(shape, i) // tp - shape.routes(i) * fewer for i in shape.kinds)
        + added // shape.n_layers,
        last=(head_parameters(shape) + again) // tp,
        adapters=added // p.shards,
        adapters_whole=added,
    )


def trained(
    config: Config,
    shape: ModelShape,
    p: ParallelismSection,
    sharded: ShardedModel | None = None,
    *,
    frozen_copies: int = 0,
    averages: bool = False,
    adapters: AdapterCounts = ONE_POLICY,
    gpu_bytes: int = 0,
) -> Estimate:
    """Estimate one rank of a model in training, which holds `frozen_copies` of the weights besides its own, and
    may hold the moving average of its trained parameters. With adapters only they have gradients and an optimizer, one
    for each policy."""
    t, lora, sharded = config.training, config.lora, sharded or by_formula(shape, p, config.lora)
    each, changed = BYTES[t.dtype], sharded.adapters or sharded.held
    own, copies = count(changed), f" x {1 + frozen_copies} models" if frozen_copies else ""
    state = {"weights": MemoryPart(changed * each * (1 + frozen_copies), f"{own} own parameters x {each}{copies}")}
    if sharded.adapters:
        fixed, small = sharded.held - sharded.adapters, BYTES[lora.base_dtype]
        state = {
            "frozen weights": MemoryPart(fixed * small * (1 + frozen_copies), f"{count(fixed)} own x {small}{copies}"),
            "adapters": MemoryPart(changed * each, f"{own} x {each}"),
        }
    if adapters.banked:
        formula = f"values and gradients of {adapters.banked} policies x {own} x {each}"
        state["adapter bank"] = MemoryPart(2 * adapters.banked * changed * each, formula)
    if averages:
        state["teacher's average"] = MemoryPart(changed * each, f"{own} x {each}")
    moment = moment_bytes(config)
    moments = f"{own} x {moment} x 2 moments"
    moments += f" x {adapters.optimizers} policies" if adapters.optimizers > 1 else ""
    state["optimizer"] = MemoryPart(2 * adapters.optimizers * changed * moment, moments)
    reduced = {"gradients": MemoryPart(changed * each, f"{own} x {each}, from the first backward to the update")}
    if t.enable_cpu_offload:
        state = reduced = {}
    state |= seeing(config, shape, trains=True)
    peak = {
        **reduced,
        "gradients before reduction": unreduced(config, shape, p, sharded),
        "gathered weights": gathered(config, p, sharded),
        "activations": activations(config, shape, p),
        "head": head(config, shape, p, gpu_bytes, keeps=t.keep_logits is True),
    }
    return Estimate(state, peak, config.memory, p.world_size - 1)


def frozen(
    config: Config, shape: ModelShape, p: ParallelismSection, sharded: ShardedModel | None = None, *, gpu_bytes: int = 0
) -> Estimate:
    """Estimate one rank of a model that only runs forward."""
    t, sharded = config.training, sharded or by_formula(shape, p)
    layer, each = max(kept_per_token(config, shape, p, "none", i) for i in shape.kinds), BYTES[t.dtype]
    peak = {
        "gathered weights": gathered(config, p, sharded),
        "activations": MemoryPart(tokens(config, p) * layer, f"{tokens(config, p):,} tokens x {size(layer)}"),
        "head": head(config, shape, p, gpu_bytes),
    }
    weights = MemoryPart(sharded.held * each, f"{count(sharded.held)} own parameters x {each}")
    kept = {} if t.enable_cpu_offload else {"weights": weights}
    return Estimate(kept | seeing(config, shape, trains=True), peak, config.memory, p.world_size - 1)


def engine(config: Config, shape: ModelShape, cache: int, slots: int = 1) -> Estimate:
    """Estimate one rank of a generator with a KV cache of `cache` bytes, and `slots` for the adapters it applies."""
    g = config.generator
    each, tp = BYTES[g.dtype], g.tensor_parallel_degree
    batch = g.max_num_batched_tokens or max(PREFILL_TOKENS, g.max_num_seqs)
    wide = (4 * shape.dim + 3 * shape.most_hidden_per_token // tp) * each
    logits = 4 * shape.vocab_size * BYTES["float32"]  # logits, log-probs, and the sampler's two copies
    captured = MemoryPart(config.memory.cuda_graphs_mb << 20, "memory.cuda_graphs_mb")
    graphs = {} if g.enforce_eager else {"graphs": captured}
    token = cache_bytes_per_token(config, shape)
    kept = {
        "weights": engine_weights(config, shape),
        **seeing(config, shape, trains=False),
        **(
            {"adapter slots": adapter_slots(config, shape, slots + config.opponent_slots)}
            if config.lora.in_vllm
            else {}
        ),
        "KV cache": MemoryPart(cache, f"{count(cache // token)} tokens x {size(token)}"),
    }
    formula = f"{batch:,} tokens x {size(wide)} + {g.max_num_seqs} sequences x {size(logits)}"
    peak = {"step": MemoryPart(batch * wide + g.max_num_seqs * logits, formula), **graphs}
    return Estimate(kept, peak, config.memory, tp - 1)


def seeing(config: Config, shape: ModelShape, *, trains: bool) -> dict[str, MemoryPart]:
    """Return what a vision tower takes, if the model has one in use."""
    if config.model.vision == "none":
        return {}
    return needed_part("memory of towers", "model.vision")(config, shape, trains=trains)


def asleep(config: Config) -> int:
    """Return the bytes that a sleeping engine keeps of its GPU."""
    m = config.memory
    graphs = 0 if config.generator.enforce_eager else m.cuda_graphs_mb
    return (m.sleeping_engine_mb or m.cuda_context_mb + graphs) << 20


def engine_weights(config: Config, shape: ModelShape) -> MemoryPart:
    """Return the weights of one rank of a generator. Those in int8 are rounded and stored in generator.dtype."""
    g = config.generator
    each, tp = BYTES[g.dtype], g.tensor_parallel_degree
    if g.quantization != "fp8":
        return MemoryPart(shape.parameters * each // tp, f"{count(shape.parameters)} parameters x {each} / TP {tp}")
    codes = sum(rows * cols for rows, cols in shape.linears)
    scales = sum(rows for rows, _ in shape.linears)
    rest = shape.parameters - codes
    formula = f"({count(codes)} fp8 codes + {count(scales)} scales x 4 + {count(rest)} others x {each}) / TP {tp}"
    return MemoryPart((codes + 4 * scales + rest * each) // tp, formula)


def adapter_slots(config: Config, shape: ModelShape, slots: int) -> MemoryPart:
    """Return the slots of one rank of a generator. Each has room for adapters of the largest rank on all layers."""
    each = BYTES[config.generator.dtype]
    rank, one = added_parameters(config.lora, shape).slot(config.generator.tensor_parallel_degree)
    return MemoryPart(slots * one * each, f"{slots} of rank {rank} x {count(one)} own x {each}")


def cache_bytes_per_token(config: Config, shape: ModelShape) -> int:
    if shape.latent_dim:  # each rank has all of it
        return shape.n_layers * shape.latent_dim * BYTES[config.generator.dtype]
    heads = max(1, shape.n_kv_heads // config.generator.tensor_parallel_degree)
    return 2 * shape.n_layers * heads * shape.head_dim * BYTES[config.generator.dtype]


def tokens(config: Config, p: ParallelismSection) -> int:
    """Return the places of a microbatch that a rank computes: its part of each row."""
    return config.training.local_batch_size * -(-config.training.seq_len // p.context_parallel_degree)


def gathered(config: Config, p: ParallelismSection, sharded: ShardedModel) -> MemoryPart:
    """Return the weights in the compute dtype that FSDP2 has gathered at once: all, or the block at work, the next one,
    and the last group (norm and head), which TorchTitan keeps. On one rank weights in this dtype need no copy."""
    compute = config.training.mixed_precision_param
    each, alone = BYTES[compute], without_fsdp(config, p.world_size)
    if alone and compute == config.training.dtype and config.lora.base_dtype in ("auto", compute):
        return MemoryPart(0, "none: they are computed with as they are")
    if config.training.parameter_gather == "update":
        adapters_only = alone and sharded.adapters and config.lora.base_dtype == compute
        whole = sharded.adapters_whole if adapters_only else sharded.whole
        return MemoryPart(whole * each, f"all {count(whole)} x {each}, kept until the update")
    formula = f"(2 blocks of {count(sharded.block)} + the head's {count(sharded.last)}) x {each}"
    return MemoryPart((2 * sharded.block + sharded.last) * each, formula)


def unreduced(config: Config, shape: ModelShape, p: ParallelismSection, sharded: ShardedModel) -> MemoryPart:
    """Return a rank's gradients before they are reduced: of all parameters, or of one FSDP2 group, as computed and as
    they are reduced. One rank without FSDP2 adds them up in parts of at most a group."""
    t = config.training
    reduced = BYTES["float32"]
    if t.gradient_sync == "update" and not without_fsdp(config, p.world_size):
        whole = sharded.adapters_whole or sharded.whole
        return MemoryPart(whole * reduced, f"all {count(whole)} x {reduced}, kept until the update")
    group, computed = max(sharded.block, sharded.last), BYTES[t.mixed_precision_param]
    if sharded.adapters:
        group = sharded.adapters_whole // shape.n_layers
    return MemoryPart(group * (computed + reduced), f"one group of {count(group)} x ({computed} + {reduced})")


def activations(config: Config, shape: ModelShape, p: ParallelismSection) -> MemoryPart:
    """Return what the forward keeps for the backward, and what the block needs that the backward works on."""
    mode = config.activation_checkpoint.mode
    at_work = gradients_per_token(config, shape, p)
    if mode != "none":  # the block is computed again
        at_work += max(kept_per_token(config, shape, p, "none", i) for i in shape.kinds)
    n = tokens(config, p)
    kept = [f"{k} layers x {size(kept_per_token(config, shape, p, mode, i))}" for i, k in shape.kinds.items()]
    formula = f"{n:,} tokens x ({' + '.join(kept)} + {size(at_work)} in the backward)"
    return MemoryPart(n * (kept_in_blocks(config, shape, p, mode) + at_work), formula)


def kept_in_blocks(config: Config, shape: ModelShape, p: ParallelismSection, mode: str) -> int:
    """Return the bytes that all blocks keep per token."""
    return sum(count * kept_per_token(config, shape, p, mode, i) for i, count in shape.kinds.items())


def kept_per_token(config: Config, shape: ModelShape, p: ParallelismSection, mode: str, layer: int) -> int:
    """Return the bytes that a block keeps per token: what its operations save for their backward, less weights."""
    each, tp = BYTES[config.training.mixed_precision_param], p.tensor_parallel_degree
    stream = shape.dim * each // tp  # one tensor of the residual stream
    queries, keys = (heads * shape.head_dim * each // tp for heads in (shape.n_heads, shape.n_kv_heads))
    wide, routes = shape.dense_rows(layer) * each // tp, shape.routes(layer)
    attention = queries + 4 * shape.n_heads // tp  # its output, and a float32 per head
    if config.training.mixed_precision_param == "float32" or shape.parts.sinks:  # SDPA may keep scores too: at most
        attention += 4 * shape.n_heads // tp * config.training.seq_len
    if mode == "full":
        return stream
    if mode == "offload":  # the stream is on the host
        return 0
    added = added_parameters(config.lora, shape).kept_per_token(tp, recomputes=mode == "selective") * each
    if mode == "selective" and shape.qkv_bias:  # key's projection is kept too
        added += keys
    if mode == "selective" and routes:  # their products are computed again
        shared = wide + stream if wide else 0
        return stream + attention + queries + keys + 12 * shape.experts_per_token + shared + added
    if mode == "selective":  # the block's input, the attention, every second projection: query, value, gate, down
        return 2 * stream + attention + queries + keys + wide + added
    norms = len(shape.parts.norms) * (stream + 4)  # the input, and a float32
    rotary = 8 * (shape.rotary_dim or shape.head_dim)  # its cosines and sines
    if shape.qk_norms:
        norms += queries + keys + 4 * (shape.n_heads + shape.n_kv_heads) // tp
    # then the attention's inputs, and the projections': two of the stream, gate, its SiLU, up, and their product
    routed = (routed_per_token(config, shape, p) if routes else 0) + 4 * wide
    gathered_keys = 2 * keys * p.context_parallel_degree  # at most: attention keeps whole rows' keys and values
    return norms + rotary + attention + queries + gathered_keys + 2 * stream + routed + added


def block_inputs(config: Config, shape: ModelShape, p: ParallelismSection) -> int:
    """Return the bytes of pinned memory that a rank's block inputs take, at most. torch rounds each up to a power of
    two. Two microbatches' overlap while the host is ahead of the GPU."""
    each = tokens(config, p) * shape.dim * BYTES[config.training.mixed_precision_param] // p.tensor_parallel_degree
    return 2 * shape.n_layers * (1 << (each - 1).bit_length())


def routed_per_token(config: Config, shape: ModelShape, p: ParallelismSection) -> int:
    """Return the bytes that router and experts keep per token: probabilities; and for each expert of the token its
    input, its output in float32, its number, place and weights, gate, SiLU, up and product; clamped experts keep gate
    and up before and after, and a router with a bias its input in float32.

    All experts are taken to get equally many tokens. Tensor-parallel ranks route other tokens each if experts are dealt
    to ranks; otherwise all ranks route all tokens, and have a part of each expert."""
    each, tp = BYTES[config.training.mixed_precision_param], p.tensor_parallel_degree
    kept = 7 if shape.parts.clamped_experts else 4
    of_stream, of_hidden = shape.dim * (each + 4) + 32, kept * shape.hidden_dim * each
    of_router = 4 * shape.experts + 4 + 4 * shape.dim * shape.parts.biased_routes
    if p.expert_parallel_degree > 1:
        return (of_router + shape.experts_per_token * (of_stream + of_hidden)) // tp
    return of_router + shape.experts_per_token * (of_stream + of_hidden // tp)


def gradients_per_token(config: Config, shape: ModelShape, p: ParallelismSection) -> int:
    """Return the bytes of gradients of activations that are alive at once in a block's backward, at most."""
    each = BYTES[config.training.mixed_precision_param]
    dense = (2 * shape.dim + 3 * shape.most_hidden_per_token // p.tensor_parallel_degree) * each
    # per expert, its output as computed, in float32 before and after its weight; and its input
    routed = shape.dim * each + shape.experts_per_token * (shape.dim * (2 * each + 8) + 4)
    return max(dense, routed) if shape.experts else dense


def head(
    config: Config, shape: ModelShape, p: ParallelismSection, gpu_bytes: int, *, keeps: bool = False
) -> MemoryPart:
    """Return what the log-prob head needs: the places of masked targets, their gradient in float32 (twice) and in the
    compute dtype, a window of logits and of their gradients, all logits if it `keeps` them, the masks of kept sets, and
    the teacher's top tokens. A value head has a fraction of them."""
    compute = BYTES[config.training.mixed_precision_param]
    each = 2 * compute + 8
    targets = tokens(config, p) * MOST_TARGETS
    formula, extra = f"{targets:,} targets x {shape.dim:,} x {each}", 0
    if shape.head == "lm":
        masks = targets * shape.vocab_size // 8 if config.rollout.truncates else 0
        top = targets * config.algorithm.distill_top_k * BYTES_PER_TOP_TOKEN
        words, logit = -(-shape.vocab_size // p.tensor_parallel_degree), compute
        if config.model.head_dtype == "float32":
            logit = BYTES["float32"]
        kept = targets * words * logit if keeps else 0
        window = most_logits(targets, words, shape.dim, most_flops(gpu_bytes))
        window *= compute if keeps or logit == compute else logit + compute
        extra = window + kept + masks + top
        formula += f" + a window of {size(window)}" + (f" + kept logits of {size(kept)}" if keeps else "")
        formula += f" + kept sets of {size(masks)}" if masks else ""
        formula += f" + top tokens of {size(top)}" if top else ""
    return MemoryPart(targets * shape.dim * each + extra, formula)


def block_parameters(shape: ModelShape, layer: int) -> int:
    return shape.block_parameters(layer) + shape.dim // shape.n_layers  # with its share of the last norm


def head_parameters(shape: ModelShape) -> int:
    return shape.dim if shape.head == "value" else shape.vocab_size * shape.dim


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
    sharded: Cut = UNKNOWN,
    adapters: AdapterCounts = ONE_POLICY,
) -> dict[str, Need]:
    """Estimate the memory of a rank of each mesh. `sharded`: how TorchTitan cuts the models, if it was asked."""
    by_mesh = trainer_needs(config, shape, gpu_bytes, sharded, adapters)
    if not config.samples_rollouts:
        return by_mesh
    trainer, *others = by_mesh.items()
    waiting = trainer[1].own.idle if config.placement.kind == "colocated" else 0
    engines = "generator", _generator(config, shape, gpu_bytes, waiting, adapters.slots)
    return dict([trainer, engines, *others])


def trainer_needs(
    config: Config,
    shape: ModelShape,
    gpu_bytes: int,
    sharded: Cut = UNKNOWN,
    adapters: AdapterCounts = ONE_POLICY,
) -> dict[str, Need]:
    """Estimate the memory of a rank of the trainer and of each role: all but engines."""
    colocated = config.placement.kind == "colocated" and config.samples_rollouts
    copies, averages = len(frozen_roles(config)), config.algorithm.averages
    cut = sharded.get("trainer")
    trainer = trained(
        config,
        shape,
        config.parallelism,
        cut,
        frozen_copies=copies,
        averages=averages,
        adapters=adapters,
        gpu_bytes=gpu_bytes,
    )
    beside = beside_trainer(config, shape, adapters.slots) if colocated else {}
    by_mesh = {"trainer": Need("parallelism", "a trainer", trainer, gpu_bytes, beside)}
    shapes, whole = role_shapes(config, shape), replace(config, lora=LoraSection())
    for name, role in config.roles.items():
        estimate = trained if name == "critic" else frozen
        own = estimate(whole, shapes[name], role.parallelism, sharded.get(name), gpu_bytes=gpu_bytes)
        by_mesh[name] = Need(name, f"a {name.replace('_', ' ')}", own, gpu_bytes)
    return by_mesh


def beside_trainer(config: Config, shape: ModelShape, slots: int = 1) -> dict[str, int]:
    """Return what a colocated engine takes of its GPU while the trainers compute."""
    if config.placement.sleep:  # also "auto"
        return {"sleeping engine": asleep(config)}
    cache = config.generator.kv_cache_memory_mb << 20 or filled_cache(config, shape, slots)
    return {"awake engine": engine(config, shape, cache, slots).total}


def beside_engine(config: Config, shape: ModelShape, free: int, total: int, slots: int = 1) -> str:
    """Compare what a colocated engine leaves of its GPU, as measured, with the estimates of both."""
    need = needs(config, shape, total)["trainer"]
    ((name, kept),) = beside_trainer(config, shape, slots).items()
    text = (
        f"{'a' if config.placement.sleep else 'an'} {name} leaves {gib(free)} of {gib(total)} GiB of its GPU "
        f"(estimated {gib(total - kept)}) for a trainer (estimated {gib(need.own.total)})"
    )
    if config.placement.sleep and far(total - free, kept):
        text += f"; set memory.sleeping_engine_mb = {(total - free) >> 20}"
    advice = "lower training.local_batch_size or training.seq_len if it runs out of memory"
    return text if need.own.total <= free else f"{text}; {advice}"


def measured_trainer(
    config: Config, shape: ModelShape, measured: Mapping[str, float], adapters: AdapterCounts = ONE_POLICY
) -> str:
    """Compare what a trainer rank takes of its GPU by its memory/* metrics with the estimate, and name the allowances
    to set. Torch's allocator may hold less than the estimated parts, which are upper bounds: no allowance is wrong."""
    need = needs(config, shape, 0, adapters=adapters)["trainer"]
    own, others = need.own, sum(need.others.values())
    held, outside = (int(measured[f"memory/{name}_gib"] * GIB) for name in ("max_reserved", "outside"))
    by_allocator = own.total - own.outside
    keys = []
    if far(held, by_allocator) and held > own.allocated:
        keys.append(f"memory.fragmentation = {held / own.allocated - 1:.2f}")
    if far(outside, own.outside + others):
        unset = (
            "sleeping engine" in need.others and not own.allowances.sleeping_engine_mb
        )  # the engine's share is the least certain estimate
        key = "sleeping_engine_mb" if unset else "nccl_buffers_mb" if own.peers else "cuda_context_mb"
        rest = own.outside + others - (others if unset else getattr(own.allowances, key) << 20)
        keys.append(f"memory.{key} = {max(0, outside - rest) >> 20}")
    return (
        f"a trainer takes {gib(held + outside)} GiB of its GPU (estimated {gib(need.nbytes)}): torch's allocator "
        f"{gib(held)} ({gib(by_allocator)}), all else {gib(outside)} ({gib(own.outside + others)})"
        + (f"; set {', '.join(keys)}" if keys else "")
    )


def far(measured: int, estimated: int) -> bool:
    """Return True if a measurement differs from its estimate by more than a tenth of the estimate."""
    return abs(measured - estimated) > estimated / 10


BFLOAT16_BETA = 1 - 2**-8
"""The largest beta with which moments in bfloat16, of 8 bits, decay: a smaller change is rounded away."""


def moment_bytes(config: Config) -> int:
    """Return the bytes of one of Adam's two moments per trained parameter."""
    return BYTES["bfloat16" if config.optimizer.moments == "bfloat16" else config.training.dtype]


def saved_bytes(config: Config, mesh: str) -> int:
    """Return the bytes per trained parameter in a checkpoint or snapshot of a mesh: its value and Adam's moments, and
    the policy's moving average."""
    values = 1 + (mesh == "trainer" and config.algorithm.averages)
    return values * BYTES[config.training.dtype] + 2 * moment_bytes(config)


def frozen_roles(config: Config) -> list[str]:
    """Return the frozen models that the trainer holds besides its own. Without its adapters it is the reference."""
    a = config.algorithm
    reference = a.needs_reference and config.reference.mesh == "trainer" and not config.lora.on
    teacher = a.loads_teacher and config.teacher.mesh == "trainer"
    return ["reference"] * reference + ["teacher"] * teacher


def _generator(config: Config, shape: ModelShape, gpu_bytes: int, trainer: int, slots: int) -> Need:
    """A KV cache without a size takes the memory within gpu_memory_utilization that weights, graphs and a waiting
    `trainer` leave, beside a trainer no more than its sequences can fill, but at least one sequence."""
    g = config.generator
    longest = (g.max_model_len or config.training.seq_len) * cache_bytes_per_token(config, shape)
    cache, limit = g.kv_cache_memory_mb << 20, gpu_bytes
    if not cache:
        allowed = int(gpu_bytes * g.gpu_memory_utilization)
        free = allowed - trainer - engine(config, shape, 0, slots).total
        room = int(free / (1 + config.memory.fragmentation))
        cache = max(longest, min(room, filled_cache(config, shape, slots)) if trainer else room)
        limit = gpu_bytes if trainer else allowed
    own = engine(config, shape, cache, slots)
    return Need("generator", "an engine", own, limit, {"waiting trainer": trainer} if trainer else {})


@dataclass(frozen=True, slots=True)
class UpdateChoice:
    """A way to compute the updates of a step: rows of a microbatch, recomputation, when gradients are reduced and
    parameters gathered, and whether logits are kept."""

    config: Config  # resolved
    seconds: float  # by the closed form of the planner; 0 in an installation without it

    def __str__(self) -> str:
        rows, mode = self.config.training.local_batch_size, self.config.activation_checkpoint.mode
        again = {"none": "nothing recomputed"}.get(mode, f"recompute {mode}")
        reduced, gathered = self.config.training.gradient_sync, self.config.training.parameter_gather
        shared = f"gradients reduced once per {reduced}, parameters gathered once per {gathered}"
        kept = ", logits kept" * (self.config.training.keep_logits is True)
        return f"{counted(rows, 'row')} a microbatch, {again}, {shared}{kept}"


def update_choices(
    config: Config, shape: ModelShape, gpu_bytes: int, adapters: AdapterCounts = ONE_POLICY
) -> list[UpdateChoice]:
    """Return the ways that fit the GPUs with a share to spare, the fastest first: for each recomputation, reduction
    and gathering the most rows, as more cost nothing, and the best of these with its logits kept. One row may take that
    share too with the usual recomputation, or where no other way fits. If none does, return the one that lacks least.
    On a GPU of unknown size microbatches have one row."""
    if not gpu_bytes:
        return [UpdateChoice(resolved(config, "cuda", gradients_fit=False, gather_fits=False), 0.0)]
    times, usual = part("times of updates"), recompute_by_length(config)
    modes = sorted(("none", "selective", "full"), key=lambda mode: not times and mode != usual)
    left = [each for each in product(modes, (True, False), (True, False)) if _left_open(config, *each)]
    single = [
        resolved(config, "cuda", gradients_fit=whole, gather_fits=once, recompute=mode) for mode, whole, once in left
    ]
    most = max(1, GPU_TOKENS * config.parallelism.context_parallel_degree // config.training.seq_len)
    given = config.training.local_batch_size
    counts = [given] if given else range(1, most + 1)
    spared = (1 - SPARE) * gpu_bytes

    def largest(tried: Config) -> int:
        by_mesh = trainer_needs(tried, shape, gpu_bytes, adapters=adapters).values()
        return max(need.nbytes for need in by_mesh)

    def most_rows(one: Config) -> list[Config]:
        fitting = bisect_left(counts, 1, key=lambda n: largest(with_rows(one, n)) > spared)
        barely = not fitting and one.activation_checkpoint.mode == usual and largest(one) <= gpu_bytes
        return [with_rows(one, counts[fitting - 1] if fitting else counts[0])] if fitting or barely else []

    found = [each for one in single for each in most_rows(one)]
    if not found:
        single.sort(key=largest)
        found = [one for one in single if largest(one) <= gpu_bytes] or single[:1]
    seconds = times(shape, gpu_bytes).seconds if times else lambda _: 0.0
    choices = [UpdateChoice(each, seconds(each)) for each in found]
    if times and config.training.keep_logits == "auto":  # less than recomputation or communication: for the best alone
        best = min(choices, key=lambda choice: choice.seconds).config
        training = replace(best.training, keep_logits=True, local_batch_size=given or 1)
        choices += [UpdateChoice(each, seconds(each)) for each in most_rows(replace(best, training=training))]
    least = EQUAL * min(choice.seconds for choice in choices)
    return sorted(choices, key=lambda choice: max(choice.seconds, least))  # equal ones keep their order


def with_rows(config: Config, rows: int) -> Config:
    return replace(config, training=replace(config.training, local_batch_size=rows))


def _left_open(config: Config, mode: str, whole: bool, once: bool) -> bool:
    """Return True if the config leaves this choice, or is the choice."""
    given, t = config.activation_checkpoint.mode, config.training
    free = given == "auto" or mode == "none"
    return free and (t.gradient_sync == "auto" or whole) and (t.parameter_gather == "auto" or once)


def on_gpus(config: Config, shape: ModelShape, gpu_bytes: int, adapters: AdapterCounts = ONE_POLICY) -> Config:
    """Return the config as ranks on GPUs work with it: updates are computed in the fastest way that fits. A colocated
    trainer starts after vLLM has measured the free memory, so the KV cache beside it is sized by estimate. Engines stay
    awake where trainers fit beside them, with a cache of full size, and updates are as fast."""
    best = update_choices(config, shape, gpu_bytes, adapters)[0]
    final = best.config
    if config.placement.kind == "disaggregated" or not config.samples_rollouts or not gpu_bytes:
        return final
    cache = needs(final, shape, gpu_bytes, adapters=adapters)["generator"].own.kept["KV cache"].nbytes
    final = resolved(final, "cuda", cache_mb=cache >> 20)
    if config.placement.sleep != "auto" or cache < filled_cache(final, shape, adapters.slots):
        return final
    awake = update_choices(with_awake_engines(config, final), shape, gpu_bytes, adapters)[0]
    by_mesh = needs(awake.config, shape, int((1 - SPARE) * gpu_bytes), adapters=adapters)
    fits = all(need.fits for need in by_mesh.values())
    return awake.config if fits and awake.seconds <= EQUAL * best.seconds else final


def with_awake_engines(config: Config, sized: Config) -> Config:
    """Return the config with engines that do not sleep, and whose cache is as large as in `sized`."""
    generator = replace(config.generator, kv_cache_memory_mb=sized.generator.kv_cache_memory_mb)
    return replace(config, generator=generator, placement=replace(config.placement, sleep=False))


def on_cpu(config: Config, shape: ModelShape, host_bytes: int) -> Config:
    """Return the config as ranks on CPUs work with it."""
    one = resolved(config, "cpu", rows=1)
    row = sum(p.world_size * activations(one, shape, p).nbytes for p in trained_meshes(config).values())
    by_cache = CPU_ELEMENTS // shape.most_hidden_per_token // config.training.seq_len
    meshes = [(config.parallelism, shape)]
    meshes += [(role.parallelism, role_shapes(config, shape)[name]) for name, role in config.roles.items()]
    copies = sum(p.world_size * gathered(one, p, by_formula(each, p)).nbytes for p, each in meshes)
    rows = max(1, min(by_cache, host_bytes // MEMORY_SHARE // row))
    return resolved(config, "cpu", rows=rows, gather_fits=copies <= host_bytes // GATHERED_SHARE)


def in_flight(config: Config) -> int:
    """Return how many rollouts are sampled at the same time. Environment processes drive a limited number."""
    r, e = config.rollout, config.environment
    greedy = config.algorithm.advantage == "greedy"
    samples = r.groups_per_step * (r.group_size + greedy) * (1 + r.steps_ahead)
    return min(samples, e.processes * e.concurrency) if config.rollout_code else samples


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """How many sequences of full length the KV cache of an engine holds, and how many it samples at once."""

    nbytes: int
    longest: int  # tokens of a sequence
    block: int  # bytes
    block_size: int  # tokens
    wanted: int

    @property
    def whole(self) -> int:
        return self._blocks // math.ceil(self.longest / self.block_size)

    @property
    def fewest(self) -> int:
        return min(FEWEST, self.wanted)

    def mib(self, sequences: int) -> int:
        """Return the size of a cache that holds this number of them."""
        return math.ceil((sequences * math.ceil(self.longest / self.block_size) + 1) * self.block / 2**20)

    def length(self, sequences: int) -> int:
        """Return the longest length at which this cache holds this number of sequences."""
        return self._blocks // sequences * self.block_size

    @property
    def _blocks(self) -> int:
        return max(0, self.nbytes // self.block - 1)  # vLLM keeps one for itself


def cache_room(
    config: Config, shape: ModelShape, gpu_bytes: int, adapters: AdapterCounts = ONE_POLICY
) -> CacheRoom | None:
    """Return the room in the KV cache of one engine, from a config; None if nothing is sampled, if an
    engine measures the room itself, or if it does not fit its GPU, which check_gpu_memory refuses."""
    g = config.generator
    if not config.samples_rollouts or shape.head == "value":
        return None
    nbytes = g.kv_cache_memory_mb << 20
    if not nbytes and gpu_bytes:
        planned = on_gpus(config, shape, gpu_bytes, adapters)
        need = needs(planned, shape, gpu_bytes, adapters=adapters)["generator"]
        nbytes = need.own.kept["KV cache"].nbytes if need.fits else 0
    if not nbytes:
        return None
    samples = in_flight(config) if config.algorithm.kind == "rl" else config.eval.size or 1
    size = BLOCK_TOKENS["cuda" if gpu_bytes else "cpu"]
    block = size * cache_bytes_per_token(config, shape)
    wanted = min(g.max_num_seqs, math.ceil(samples / g.replicas))
    return CacheRoom(nbytes, g.max_model_len or config.training.seq_len, block, size, wanted)


def sequences_at_once(config: Config, policies: int = 1) -> int:
    """Return how many sequences an engine has in its cache at once, at most: the ones that it samples, in training or
    in an evaluation, and in several turns those whose next turn waits for an environment."""
    g, rl = config.generator, config.algorithm.kind == "rl"
    trained = math.ceil((in_flight(config) * policies if rl else 0) / g.replicas)
    if config.rollout_code:
        return max(1, trained, g.max_num_seqs if config.eval.size else 0)
    evaluated = config.eval.size and g.max_num_seqs  # sets may have any number of samples
    return max(1, min(g.max_num_seqs, max(trained, evaluated)))


def filled_cache(config: Config, shape: ModelShape, policies: int = 1) -> int:
    """Return the bytes of a cache that holds these sequences at full length."""
    block = BLOCK_TOKENS["cuda"] * cache_bytes_per_token(config, shape)
    longest = config.generator.max_model_len or config.training.seq_len
    room = CacheRoom(0, longest, block, BLOCK_TOKENS["cuda"], 0)
    return room.mib(sequences_at_once(config, policies)) << 20


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Bytes that one host holds besides what its GPUs do, and that a weight sync moves over its link."""

    held: Mapping[str, int]
    received: int
    sent: int

    @property
    def total(self) -> int:
        return sum(self.held.values())


def host_loads(
    config: Config, shape: ModelShape, sharded: Cut, gpus: int, adapters: AdapterCounts = ONE_POLICY
) -> list[HostLoad]:
    """Return the load of every host; none if it is not known how the models are cut, or they do not fit the hosts."""
    try:
        placed = place(config, slots_per_host(config, gpus))
    except Unplaceable:
        return []
    if "trainer" not in sharded:
        return []
    hosts = {mesh: [share.host for share in shares for _ in share.slots] for mesh, shares in placed.items()}
    sent, each = sharded["trainer"].sent, BYTES[config.generator.dtype]
    held = [Counter[str]() for _ in range(config.hosts.number)]
    arriving, leaving = [0] * len(held), [0] * len(held)
    own = [0] * len(held)  # bytes that the trainers of a host send
    for host, runs in zip(hosts["trainer"], sent, strict=True):
        own[host] += sum(runs) * each
    homes = {places[0] for mesh, places in hosts.items() if mesh.startswith("generator")}
    senders = {host for host, nbytes in enumerate(own) if nbytes}
    readers, passed_on = sorted(homes - senders), part("readers of trainers")
    first = passed_on(config.weight_sync, len(senders), len(readers)) if passed_on else len(readers)
    for host in senders:
        held[host]["staged weights"] += SLOTS * own[host]
        leaving[host] = own[host] * (first + len(homes & senders - {host}))
    for home in readers[first:]:  # this number of hosts pass the version on, once
        leaving[home] = sum(own)
    for home in homes:
        arriving[home] = sum(own) - own[home]
        if arriving[home]:
            held[home]["received weights"] += arriving[home]  # once: its replicas share what one of them reads
    for name, p in trained_meshes(config).items():
        for host, kind, nbytes in snapshot_sizes(config).by_host(name, shape, hosts[name], len(held)):
            held[host][kind] += nbytes
        if config.training.enable_cpu_offload:
            for host in hosts[name]:
                own_states = offloaded(config, sharded[name], name, adapters)
                held[host]["offloaded states"] += own_states
        if config.activation_checkpoint.mode == "offload":
            for host in hosts[name]:
                held[host]["block inputs"] += block_inputs(config, shape, p)
    return [HostLoad(*load) for load in zip(held, arriving, leaving, strict=True)]


def offloaded(
    config: Config, sharded: ShardedModel, mesh: str = "trainer", adapters: AdapterCounts = ONE_POLICY
) -> int:
    """Return the bytes of weights, gradients and optimizer states of a rank: in host memory, if they are offloaded."""
    values = (1 + 2 * adapters.banked) * BYTES[config.training.dtype]  # gradients, and values of other policies
    others = 2 * (adapters.optimizers - 1) * moment_bytes(config)
    trained = (saved_bytes(config, mesh) + values + others) * (sharded.adapters or sharded.held)
    frozen = sharded.held - sharded.adapters if sharded.adapters else 0
    return trained + frozen * BYTES[config.lora.base_dtype]


def trained_meshes(config: Config) -> dict[str, ParallelismSection]:
    return {"trainer": config.parallelism} | {n: r.parallelism for n, r in config.roles.items() if n == "critic"}


def trained_by(config: Config, mesh: str, shape: ModelShape) -> int:
    """Return the number of parameters that a mesh trains."""
    return trained_parameters(config.lora, shape) if mesh == "trainer" else shape.parameters
