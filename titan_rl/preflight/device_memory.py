"""Estimates the memory that each rank needs on a GPU, without one.

Weights, optimizer states, caches and activations follow from the shapes: tests/unit/preflight/test_device_memory.py
counts the activations in TorchTitan's own blocks. CONTEXT, COLLECTIVES, GRAPHS, FRAGMENTED and the engine's working
memory are allowances, not measurements. docs/gpu.md has the formulas.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from titan_rl.config.sections import BYTES, Config, ParallelismSection
from titan_rl.wire.model_shape import ModelShape

GIB = 2**30
CONTEXT = 3 * GIB // 4  # of CUDA, in every process
COLLECTIVES = GIB  # NCCL's buffers, in every process that has peers
GRAPHS = GIB  # CUDA graphs of one engine
FRAGMENTED = 0.05  # of what a process allocates
PREFILL_TOKENS = 2048  # of one vLLM step, unless max_num_seqs is larger
TILE_BYTES = 192 * 2**20  # kernels/token_logprob.py: one tile of 2^25 logits, with a float32 head


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of one process on its GPU, by what they are for. `kept`: all the time, while an engine on the same GPU
    samples too. `peak`: during a forward, a backward or an engine step."""

    kept: Mapping[str, int]
    peak: Mapping[str, int]
    peers: int = 0  # processes with which it communicates

    @property
    def idle(self) -> int:
        return _with_overhead(sum(self.kept.values()), self.peers)

    @property
    def total(self) -> int:
        return _with_overhead(sum(self.kept.values()) + sum(self.peak.values()), self.peers)

    def __str__(self) -> str:
        parts = {**self.kept, **self.peak}
        named = [f"{name} {gib(nbytes)}" for name, nbytes in parts.items() if nbytes >= GIB / 20]
        return ", ".join([*named, f"CUDA and fragmentation {gib(self.total - sum(parts.values()))}"])


def _with_overhead(allocated: int, peers: int) -> int:
    return int(allocated * (1 + FRAGMENTED)) + CONTEXT + (COLLECTIVES if peers else 0)


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"


def trained(config: Config, shape: ModelShape, p: ParallelismSection, *, lent: int = 0) -> Estimate:
    """Estimate one rank of a model in training, which holds `lent` frozen copies of the weights besides its own."""
    t = config.training
    weights = _sharded_weights(config, shape, p)
    state = {"weights": weights * (1 + lent), "optimizer": 2 * weights}
    reduced = {"gradients": weights}
    if t.enable_cpu_offload:
        state = reduced = {}
    whole = shape.parameters * BYTES[t.mixed_precision_reduce] // p.tensor_parallel_degree
    peak = {
        **reduced,
        "gradients before reduction": whole if t.gradient_sync == "update" else of_one_group(config, shape, p),
        "gathered weights": gathered(config, shape, p),
        "activations": activations(config, shape, p),
        "head": head(config, shape),
    }
    return Estimate(state, peak, p.world_size - 1)


def frozen(config: Config, shape: ModelShape, p: ParallelismSection) -> Estimate:
    """Estimate one rank of a model that only runs forward."""
    layer = tokens(config) * kept_per_token(config, shape, p, "none")
    peak = {"gathered weights": gathered(config, shape, p), "activations": layer, "head": head(config, shape)}
    weights = {} if config.training.enable_cpu_offload else {"weights": _sharded_weights(config, shape, p)}
    return Estimate(weights, peak, p.world_size - 1)


def engine(config: Config, shape: ModelShape, cache: int) -> Estimate:
    """Estimate one rank of a generator with a KV cache of `cache` bytes."""
    g = config.generator
    size, tp = BYTES[g.dtype], g.tensor_parallel_degree
    batch = max(PREFILL_TOKENS, g.max_num_seqs)
    wide = batch * (4 * shape.dim + 3 * shape.hidden_dim // tp) * size
    logits = 4 * g.max_num_seqs * shape.vocab_size * BYTES["float32"]  # logits, log-probs, and the sampler's two copies
    graphs = {} if g.enforce_eager else {"graphs": GRAPHS}
    weights = shape.parameters * size // tp
    return Estimate({"weights": weights, "KV cache": cache}, {"step": wide + logits, **graphs}, tp - 1)


def cache_bytes_per_token(config: Config, shape: ModelShape) -> int:
    heads = max(1, shape.n_kv_heads // config.generator.tensor_parallel_degree)
    return 2 * shape.n_layers * heads * shape.head_dim * BYTES[config.generator.dtype]


def _sharded_weights(config: Config, shape: ModelShape, p: ParallelismSection) -> int:
    shards = p.data_parallel_shard_degree * p.tensor_parallel_degree
    return shape.parameters * BYTES[config.training.dtype] // shards


def tokens(config: Config) -> int:
    return config.training.local_batch_size * config.training.seq_len


def gathered(config: Config, shape: ModelShape, p: ParallelismSection) -> int:
    """Return the bytes of weights in the compute dtype that FSDP2 has gathered at once: the block at work, the next
    one, and the last group (norm and head), which TorchTitan keeps; or all of them."""
    size, tp = BYTES[config.training.mixed_precision_param], p.tensor_parallel_degree
    if p.fsdp_reshard_after_forward == "never":
        return shape.parameters * size // tp
    return (2 * block_parameters(shape) + head_parameters(shape)) * size // tp


def of_one_group(config: Config, shape: ModelShape, p: ParallelismSection) -> int:
    """Return the bytes of one FSDP2 group's gradients, as computed and as they are reduced."""
    t = config.training
    each = BYTES[t.mixed_precision_param] + BYTES[t.mixed_precision_reduce]
    return max(block_parameters(shape), head_parameters(shape)) * each // p.tensor_parallel_degree


def activations(config: Config, shape: ModelShape, p: ParallelismSection) -> int:
    """Return the bytes that the forward keeps for the backward, and those of the block that the backward works on."""
    mode = config.activation_checkpoint.mode
    at_work = gradients_per_token(config, shape, p)
    if mode != "none":  # the block is computed again
        at_work += kept_per_token(config, shape, p, "none")
    return tokens(config) * (shape.n_layers * kept_per_token(config, shape, p, mode) + at_work)


def kept_per_token(config: Config, shape: ModelShape, p: ParallelismSection, mode: str) -> int:
    """Return the bytes that one block keeps per token: what its operations save for their backward, less weights."""
    size, tp = BYTES[config.training.mixed_precision_param], p.tensor_parallel_degree
    stream = shape.dim * size // (tp if p.enable_sequence_parallel else 1)  # one tensor of the residual stream
    queries, keys = (heads * shape.head_dim * size // tp for heads in (shape.n_heads, shape.n_kv_heads))
    wide = shape.hidden_dim * size // tp
    attention = queries + 4 * shape.n_heads // tp  # its output, and a float32 per head
    if config.training.mixed_precision_param == "float32":  # SDPA may keep the scores too: at most
        attention += 4 * shape.n_heads // tp * config.training.seq_len
    if mode == "full":
        return stream
    if mode == "selective":  # the block's input, the attention, every second projection: query, value, gate, down
        return 2 * stream + attention + queries + keys + wide
    norms = 2 * (stream + 4)  # the input, and a float32
    rotary = 8 * shape.head_dim  # its cosines and sines
    if shape.parts.head_norms:
        norms += queries + keys + 4 * (shape.n_heads + shape.n_kv_heads) // tp
    # then the attention's inputs, and the projections': two of the stream, gate, its SiLU, up, and their product
    return norms + rotary + attention + queries + 2 * keys + 2 * stream + 4 * wide


def gradients_per_token(config: Config, shape: ModelShape, p: ParallelismSection) -> int:
    """Return the bytes of gradients of activations that are alive at once in a block's backward, at most."""
    size = BYTES[config.training.mixed_precision_param]
    return (2 * shape.dim + 3 * shape.hidden_dim // p.tensor_parallel_degree) * size


def head(config: Config, shape: ModelShape) -> int:
    """Return the bytes of the log-prob head: masked positions, their gradient in float32 (twice) and in
    the compute dtype, one tile of logits, and the masks of kept sets. A value head has a fraction of them."""
    size = BYTES[config.training.mixed_precision_param]
    kept = tokens(config) * shape.vocab_size // 8 if config.rollout.truncates else 0
    return tokens(config) * shape.dim * (2 * size + 8) + (TILE_BYTES + kept if shape.head == "lm" else 0)


def block_parameters(shape: ModelShape) -> int:
    own = 0 if shape.tied else head_parameters(shape)
    return (shape.parameters - shape.vocab_size * shape.dim - own) // shape.n_layers


def head_parameters(shape: ModelShape) -> int:
    return shape.dim if shape.head == "value" else shape.vocab_size * shape.dim
