"""Estimates the memory that each rank needs on a GPU, without one.

Weights, optimizer states, caches and activations follow from the shapes: tests/unit/preflight/test_device_memory.py
counts the activations in TorchTitan's own blocks. CONTEXT and FRAGMENTED are what a trainer rank took on an H200
(docs/benchmarks/gpu); COLLECTIVES, GRAPHS and the engine's working memory are allowances, not measurements. docs/gpu.md
has the formulas.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from titan_rl.batch.prefixes import MOST_TARGETS
from titan_rl.config.sections import BYTES, Config, ParallelismSection
from titan_rl.preflight.quantities import GIB, count, gib, size
from titan_rl.wire.model_shape import ModelShape, ShardedModel

CONTEXT = 5 * GIB // 4  # CUDA's context with the loaded kernels and libraries, in every process
COLLECTIVES = GIB  # NCCL's buffers, in every process that has peers
GRAPHS = GIB  # CUDA graphs of one engine
FRAGMENTED = 0.08  # share of a process's allocations that the caching allocator takes in addition
PREFILL_TOKENS = 2048  # vLLM computes in one step by default, unless max_num_seqs is larger
TILE_BYTES = 192 * 2**20  # kernels/token_logprob.py: one tile of 2^25 logits, with a float32 head


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
        peers = f" + {gib(COLLECTIVES)} GiB with peers" if self.peers else ""
        formula = f"{gib(CONTEXT)} GiB{peers} + {FRAGMENTED:.0%} (allowances)"
        return MemoryPart(self.total - sum(part.nbytes for part in self.parts.values()), formula)

    def _with_overhead(self, parts: Mapping[str, MemoryPart]) -> int:
        allocated = sum(part.nbytes for part in parts.values())
        return int(allocated * (1 + FRAGMENTED)) + CONTEXT + (COLLECTIVES if self.peers else 0)

    def __str__(self) -> str:
        named = [f"{name} {gib(part.nbytes)}" for name, part in self.parts.items() if part.nbytes >= GIB / 20]
        return ", ".join([*named, f"CUDA and fragmentation {gib(self.overhead.nbytes)}"])


def by_formula(shape: ModelShape, p: ParallelismSection) -> ShardedModel:
    """Return how a model is cut where every size divides evenly; a dry run asks TorchTitan (sharding.py)."""
    tp, ep = p.tensor_parallel_degree, p.expert_parallel_degree
    again = head_parameters(shape) if shape.tied and tp > 1 else 0  # FSDP2 then gathers a tied weight for both users
    stack = 3 * shape.experts * shape.dim * shape.hidden_dim  # the experts of a block, of which a rank gathers its own
    fewer = stack // tp - stack // ep if ep > 1 else 0
    return ShardedModel(
        held=shape.parameters // (p.data_parallel_shard_degree * tp),
        whole=(shape.parameters + again) // tp - shape.n_layers * fewer,
        block=block_parameters(shape) // tp - fewer,
        last=(head_parameters(shape) + again) // tp,
    )


def trained(
    config: Config, shape: ModelShape, p: ParallelismSection, sharded: ShardedModel | None = None, *, lent: int = 0
) -> Estimate:
    """Estimate one rank of a model in training, which holds `lent` frozen copies of the weights besides its own."""
    t, sharded = config.training, sharded or by_formula(shape, p)
    each, held = BYTES[t.dtype], count(sharded.held)
    weights = sharded.held * each
    copies = f" x {1 + lent} models" if lent else ""
    state = {
        "weights": MemoryPart(weights * (1 + lent), f"{held} parameters of its own x {each}{copies}"),
        "optimizer": MemoryPart(2 * weights, f"{held} x {each} x 2 moments"),
    }
    reduced = {"gradients": MemoryPart(weights, f"{held} x {each}, from the first backward to the update")}
    if t.enable_cpu_offload:
        state = reduced = {}
    peak = {
        **reduced,
        "gradients before reduction": unreduced(config, sharded),
        "gathered weights": gathered(config, p, sharded),
        "activations": activations(config, shape, p),
        "head": head(config, shape),
    }
    return Estimate(state, peak, p.world_size - 1)


def frozen(config: Config, shape: ModelShape, p: ParallelismSection, sharded: ShardedModel | None = None) -> Estimate:
    """Estimate one rank of a model that only runs forward."""
    t, sharded = config.training, sharded or by_formula(shape, p)
    layer, each = kept_per_token(config, shape, p, "none"), BYTES[t.dtype]
    peak = {
        "gathered weights": gathered(config, p, sharded),
        "activations": MemoryPart(tokens(config) * layer, f"{tokens(config):,} tokens x {size(layer)}"),
        "head": head(config, shape),
    }
    weights = MemoryPart(sharded.held * each, f"{count(sharded.held)} parameters of its own x {each}")
    return Estimate({} if t.enable_cpu_offload else {"weights": weights}, peak, p.world_size - 1)


def engine(config: Config, shape: ModelShape, cache: int) -> Estimate:
    """Estimate one rank of a generator with a KV cache of `cache` bytes."""
    g = config.generator
    each, tp = BYTES[g.dtype], g.tensor_parallel_degree
    batch = g.max_num_batched_tokens or max(PREFILL_TOKENS, g.max_num_seqs)
    wide = (4 * shape.dim + 3 * shape.hidden_per_token // tp) * each
    logits = 4 * shape.vocab_size * BYTES["float32"]  # logits, log-probs, and the sampler's two copies
    graphs = {} if g.enforce_eager else {"graphs": MemoryPart(GRAPHS, "allowance for CUDA graphs")}
    token = cache_bytes_per_token(config, shape)
    kept = {
        "weights": MemoryPart(
            shape.parameters * each // tp, f"{count(shape.parameters)} parameters x {each} / TP {tp}"
        ),
        "KV cache": MemoryPart(cache, f"{count(cache // token)} tokens x {size(token)}"),
    }
    formula = f"{batch:,} tokens x {size(wide)} + {g.max_num_seqs} sequences x {size(logits)}"
    return Estimate(kept, {"step": MemoryPart(batch * wide + g.max_num_seqs * logits, formula), **graphs}, tp - 1)


def cache_bytes_per_token(config: Config, shape: ModelShape) -> int:
    heads = max(1, shape.n_kv_heads // config.generator.tensor_parallel_degree)
    return 2 * shape.n_layers * heads * shape.head_dim * BYTES[config.generator.dtype]


def tokens(config: Config) -> int:
    return config.training.local_batch_size * config.training.seq_len


def gathered(config: Config, p: ParallelismSection, sharded: ShardedModel) -> MemoryPart:
    """Return the weights in the compute dtype that FSDP2 has gathered at once: the block at work, the next one, and the
    last group (norm and head), which TorchTitan keeps; or all of them."""
    each = BYTES[config.training.mixed_precision_param]
    if p.fsdp_reshard_after_forward == "never":
        return MemoryPart(sharded.whole * each, f"all {count(sharded.whole)} x {each}")
    formula = f"(2 blocks of {count(sharded.block)} + the head's {count(sharded.last)}) x {each}"
    return MemoryPart((2 * sharded.block + sharded.last) * each, formula)


def unreduced(config: Config, sharded: ShardedModel) -> MemoryPart:
    """Return a rank's gradients before they are reduced: of all parameters, or of one FSDP2 group, as computed and as
    they are reduced."""
    t = config.training
    reduced = BYTES[t.mixed_precision_reduce]
    if t.gradient_sync == "update":
        return MemoryPart(sharded.whole * reduced, f"all {count(sharded.whole)} x {reduced}, kept until the update")
    group, computed = max(sharded.block, sharded.last), BYTES[t.mixed_precision_param]
    return MemoryPart(group * (computed + reduced), f"one group of {count(group)} x ({computed} + {reduced})")


def activations(config: Config, shape: ModelShape, p: ParallelismSection) -> MemoryPart:
    """Return what the forward keeps for the backward, and what the block needs that the backward works on."""
    mode = config.activation_checkpoint.mode
    kept, at_work = kept_per_token(config, shape, p, mode), gradients_per_token(config, shape, p)
    if mode != "none":  # the block is computed again
        at_work += kept_per_token(config, shape, p, "none")
    formula = f"{tokens(config):,} tokens x ({shape.n_layers} layers x {size(kept)} + {size(at_work)} in the backward)"
    return MemoryPart(tokens(config) * (shape.n_layers * kept + at_work), formula)


def kept_per_token(config: Config, shape: ModelShape, p: ParallelismSection, mode: str) -> int:
    """Return the bytes that one block keeps per token: what its operations save for their backward, less weights."""
    each, tp = BYTES[config.training.mixed_precision_param], p.tensor_parallel_degree
    stream = shape.dim * each // (tp if p.enable_sequence_parallel else 1)  # one tensor of the residual stream
    queries, keys = (heads * shape.head_dim * each // tp for heads in (shape.n_heads, shape.n_kv_heads))
    wide = shape.hidden_dim * each // tp
    attention = queries + 4 * shape.n_heads // tp  # its output, and a float32 per head
    if config.training.mixed_precision_param == "float32":  # SDPA may keep the scores too: at most
        attention += 4 * shape.n_heads // tp * config.training.seq_len
    if mode == "full":
        return stream
    if mode == "selective" and shape.experts:  # their products are computed again
        return stream + attention + queries + keys + 12 * shape.experts_per_token
    if mode == "selective":  # the block's input, the attention, every second projection: query, value, gate, down
        return 2 * stream + attention + queries + keys + wide
    norms = 2 * (stream + 4)  # the input, and a float32
    rotary = 8 * shape.head_dim  # its cosines and sines
    if shape.parts.head_norms:
        norms += queries + keys + 4 * (shape.n_heads + shape.n_kv_heads) // tp
    # then the attention's inputs, and the projections': two of the stream, gate, its SiLU, up, and their product
    routed = routed_per_token(config, shape, p) if shape.experts else 4 * wide
    return norms + rotary + attention + queries + 2 * keys + 2 * stream + routed


def routed_per_token(config: Config, shape: ModelShape, p: ParallelismSection) -> int:
    """Return the bytes that router and experts keep per token: probabilities; and for each expert of the token its
    input, its output in float32, its number, place and weights, gate, SiLU, up and product.

    All experts are taken to get equally many tokens. Tensor-parallel ranks route other tokens each if experts are dealt
    to ranks; otherwise all ranks route all tokens, and have a part of each expert."""
    each, tp = BYTES[config.training.mixed_precision_param], p.tensor_parallel_degree
    of_stream, of_hidden = shape.dim * (each + 4) + 32, 4 * shape.hidden_dim * each
    if p.expert_parallel_degree > 1:
        return (4 * shape.experts + 4 + shape.experts_per_token * (of_stream + of_hidden)) // tp
    return 4 * shape.experts + 4 + shape.experts_per_token * (of_stream + of_hidden // tp)


def gradients_per_token(config: Config, shape: ModelShape, p: ParallelismSection) -> int:
    """Return the bytes of gradients of activations that are alive at once in a block's backward, at most."""
    each = BYTES[config.training.mixed_precision_param]
    dense = (2 * shape.dim + 3 * shape.hidden_per_token // p.tensor_parallel_degree) * each
    # of each expert's output: as it was computed, in float32 before and after its weight, and of its input
    routed = shape.dim * each + shape.experts_per_token * (shape.dim * (2 * each + 8) + 4)
    return max(dense, routed) if shape.experts else dense


def head(config: Config, shape: ModelShape) -> MemoryPart:
    """Return what the log-prob head needs: the places of masked targets, their gradient in float32 (twice) and in the
    compute dtype, one tile of logits, and the masks of kept sets. A value head has a fraction of them."""
    each = 2 * BYTES[config.training.mixed_precision_param] + 8
    targets = tokens(config) * (MOST_TARGETS if config.training.share_prompts else 1)
    formula, extra = f"{targets:,} targets x {shape.dim:,} x {each}", 0
    if shape.head == "lm":
        kept = targets * shape.vocab_size // 8 if config.rollout.truncates else 0
        extra = TILE_BYTES + kept
        formula += f" + a tile of {size(TILE_BYTES)}" + (f" + kept sets of {size(kept)}" if kept else "")
    return MemoryPart(targets * shape.dim * each + extra, formula)


def block_parameters(shape: ModelShape) -> int:
    own = 0 if shape.tied else head_parameters(shape)
    return (shape.parameters - shape.vocab_size * shape.dim - own) // shape.n_layers


def head_parameters(shape: ModelShape) -> int:
    return shape.dim if shape.head == "value" else shape.vocab_size * shape.dim
