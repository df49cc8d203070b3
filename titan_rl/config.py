"""Every key of a run's TOML: one frozen dataclass a section, one line of docs under each key.

TorchTitan's section and key names wherever it has them ([job] [model] [optimizer] [lr_scheduler] [training]
[parallelism] [activation_checkpoint] [compile] [checkpoint] [metrics] [comm] [debug]); ours beside them. Only data is
here, and no import of torch: reading is config_file.py, cross-key rules are checks.py. `--help` prints these
docs; `bounds(...)` gives a key's range, which is checked on reading.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16"]
BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


def bounds(default: Any, *, ge: float | None = None, gt: float | None = None, le: float | None = None) -> Any:
    """A field with a default and a range that config_file.py enforces."""
    return field(default=default, metadata={"ge": ge, "gt": gt, "le": le})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    dump_folder: str = "./outputs/run"
    """Where everything of this run lies. A checkpoint in it is resumed."""
    description: str = ""
    """One line about the experiment, shown in the plan."""
    fresh: bool = False
    """Move an existing dump folder aside (never delete it) and start anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Debug:
    seed: int = bounds(0, ge=0)
    """The one seed: data order, sampling and initialization all derive from it."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms (slower on GPU; the CPU path is deterministic anyway)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: Literal["llama3", "qwen3"] = "llama3"
    """Model family."""
    hf_assets_path: str = ""
    """A Hugging Face folder: config.json, safetensors weights and tokenizer. Empty: built from the keys below."""
    flavor: str = ""
    """A TorchTitan flavor name ("debugmodel", "8B", ...) instead of the dimensions below."""
    dim: int = bounds(128, ge=1)
    """Hidden size."""
    n_layers: int = bounds(4, ge=1)
    """Transformer blocks."""
    n_heads: int = bounds(4, ge=1)
    """Query heads."""
    n_kv_heads: int = bounds(2, ge=1)
    """Key/value heads (grouped-query attention)."""
    head_dim: int = bounds(0, ge=0)
    """Size of a head; 0 is dim / n_heads."""
    hidden_dim: int = bounds(384, ge=1)
    """Feed-forward size."""
    vocab_size: int = bounds(64, ge=1)
    """Rows of the embedding; at least the tokenizer's size."""
    max_seq_len: int = bounds(2048, ge=1)
    """The context length written into the model's config.json."""
    rope_theta: float = bounds(10000.0, gt=0)
    """RoPE base."""
    norm_eps: float = bounds(1e-6, gt=0)
    """RMSNorm epsilon."""
    enable_weight_tying: bool = False
    """Embedding and output head share one weight."""
    initializer_range: float = bounds(0.02, ge=0)
    """Standard deviation of random weights, as in Hugging Face; 0 takes TorchTitan's own per-layer initializers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    steps: int = bounds(100, ge=0)
    """RL steps; 0 runs the cold start only."""
    seq_len: int = bounds(256, ge=2)
    """Length of a packed row."""
    local_batch_size: int = bounds(8, ge=1)
    """Packed rows in one microbatch of one data-parallel rank; more rows accumulate gradients."""
    max_norm: float = bounds(1.0, gt=0)
    """Gradient clipping norm."""
    dtype: Dtype = "float32"
    """Dtype of the master weights, gradients and optimizer states."""
    mixed_precision_param: Dtype = "float32"
    """Dtype of the forward and backward (FSDP2 mixed precision)."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Dtype of gradient reduction."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory (GPU runs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    name: Literal["AdamW", "Adam"] = "AdamW"
    """Optimizer."""
    lr: float = bounds(1e-5, gt=0)
    """Peak learning rate."""
    beta1: float = bounds(0.9, ge=0, le=1)
    """Adam's beta1."""
    beta2: float = bounds(0.95, ge=0, le=1)
    """Adam's beta2."""
    eps: float = bounds(1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = bounds(0.0, ge=0)
    """Decoupled weight decay."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Which of torch's implementations steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LRScheduler:
    warmup_steps: int = bounds(0, ge=0)
    """Linear warm-up."""
    decay_ratio: float = bounds(0.0, ge=0, le=1)
    """The last share of the steps that decays; 0 keeps the rate constant after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = bounds(0.0, ge=0, le=1)
    """Floor of the decay, as a factor of lr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    data_parallel_replicate_degree: int = bounds(1, ge=1)
    """Replicas of the sharded trainer (HSDP)."""
    data_parallel_shard_degree: int = bounds(1, ge=1)
    """Ranks that one copy of the weights is sharded over (FSDP2)."""
    tensor_parallel_degree: int = bounds(1, ge=1)
    """Tensor-parallel ranks of the trainer."""
    enable_sequence_parallel: bool = True
    """Sequence parallelism within tensor parallelism."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """When FSDP2 frees gathered parameters."""

    @property
    def dp(self) -> int:
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree

    @property
    def world_size(self) -> int:
        return self.dp * self.tensor_parallel_degree


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full"] = "none"
    """What the backward recomputes instead of keeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile:
    enable: bool = False
    """torch.compile each transformer block (GPU; on CPU it does not pay)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    enable: bool = True
    """Write checkpoints. Off: a run cannot be resumed."""
    folder: str = "checkpoint"
    """Folder below the dump folder."""
    interval: int = bounds(20, ge=1)
    """Save every so many RL steps; the last step and a clean stop always save."""
    keep_latest_k: int = bounds(3, ge=0)
    """Keep so many (0: all; 1 is not possible, one may be half-written)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    enable_tensorboard: bool = True
    """Write TensorBoard events."""
    save_tb_folder: str = "tb"
    """Folder below the dump folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm:
    init_timeout_seconds: int = bounds(300, ge=1)
    """Deadline for spawning, loading engines and building process groups."""
    train_timeout_seconds: int = bounds(600, ge=1)
    """Deadline for one trainer step, one weight sync, or one checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    name: Literal["addition", "jsonl"] = "addition"
    """"addition" makes its own data; "jsonl" reads files."""
    path: str = ""
    """JSONL with the training prompts."""
    eval_path: str = ""
    """JSONL with the held-out prompts."""
    prompt_key: str = "question"
    """Column with the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the reference answer."""
    reward: str = "exact"
    """"exact", "last_number", or your own "package.module:function" called as f(completion, answer, row) -> float."""
    template: Literal["plain", "chat"] = "plain"
    """"plain" feeds BOS and the prompt's text, "chat" the tokenizer's chat template."""
    system_prompt: str = ""
    """First message under template = "chat"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    groups_per_step: int = bounds(16, ge=1)
    """Prompts per RL step."""
    group_size: int = bounds(16, ge=1)
    """Samples per prompt."""
    max_new_tokens: int = bounds(64, ge=1)
    """Most tokens that one turn may sample."""
    temperature: float = bounds(1.0, gt=0)
    """Sampling temperature; the trainer's log-probs are taken at it too."""
    top_p: float = bounds(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the sampling log-probs are those of the truncated distribution: a warning says so."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Stop tokens besides EOS."""
    lag: int = bounds(0, ge=0, le=0)
    """How many optimizer steps a rollout may be behind. 0 is exact on-policy, the only value so far."""
    timeout_seconds: int = bounds(600, ge=1)
    """Deadline for one prompt's group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    name: Literal["grpo"] = "grpo"
    """Group-relative policy optimization."""
    clip_low: float = bounds(0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounds(0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    normalize_std: bool = True
    """Divide group advantages by the group's standard deviation."""
    kl_coef: float = bounds(0.0, ge=0)
    """Weight of the k3 KL to a frozen reference, the policy as RL began; 0 builds no reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    replicas: int = bounds(1, ge=1)
    """Independent vLLM engines."""
    tensor_parallel_degree: int = bounds(1, ge=1)
    """Processes of one engine."""
    dtype: Dtype = "float32"
    """Dtype of the rollout weights."""
    max_num_seqs: int = bounds(256, ge=1)
    """Most sequences in one engine's batch."""
    max_model_len: int = bounds(0, ge=0)
    """Longest sequence; 0 is training.seq_len."""
    kv_cache_memory_mb: int = bounds(256, ge=0)
    """KV cache of one process in MiB; 0 lets vLLM size it by gpu_memory_utilization (GPU)."""
    gpu_memory_utilization: float = bounds(0.9, gt=0, le=1)
    """Share of a GPU's memory that the engine may take."""
    block_size: int = bounds(32, ge=1)
    """Tokens in a KV-cache block: the unit of prefix caching."""
    enable_prefix_caching: bool = True
    """Siblings of a group share their prompt's KV cache."""
    enforce_eager: bool = True
    """No CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSync:
    transport: Literal["rdma"] = "rdma"
    """One-sided reads of registered staging buffers (ibverbs where there is one, else Monarch's TCP fallback)."""
    slice_mb: int = bounds(8, ge=1, le=64)
    """Size of one read; 4 to 8 measured best over TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    kind: Literal["local"] = "local"
    """Where processes run: this host."""
    slots: int = bounds(0, ge=0)
    """Processes that the host may carry; 0 is its GPU count, or 16 where the run is on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes CUDA where there is a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart:
    steps: int = bounds(0, ge=0)
    """Supervised steps on the task's own answers before RL; 0 skips them."""
    batch_size: int = bounds(64, ge=1)
    """Examples per supervised step."""
    lr: float = bounds(1e-3, gt=0)
    """Peak learning rate of the supervised steps."""
    warmup_steps: int = bounds(20, ge=0)
    """Linear warm-up of the supervised steps."""
    decay_ratio: float = bounds(0.0, ge=0, le=1)
    """The last share of the supervised steps that decays the rate linearly to 0; 0 keeps it constant."""
    stop_at: float = bounds(0.0, ge=0, le=1)
    """End early once the greedy score on eval.size training problems reaches this; 0 takes all steps."""
    stop_interval: int = bounds(25, ge=1)
    """Look at that score every so many supervised steps."""
    interval: int = bounds(500, ge=1)
    """Save a checkpoint every so many supervised steps; the last one always saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval:
    size: int = bounds(256, ge=0)
    """Held-out problems; 0 switches evaluation off."""
    interval: int = bounds(20, ge=0)
    """Evaluate every so many RL steps; 0 only at the start and at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run. Sections in the order in which --help prints them."""

    job: Job = field(default_factory=Job)
    task: Task = field(default_factory=Task)
    model: Model = field(default_factory=Model)
    cold_start: ColdStart = field(default_factory=ColdStart)
    rollout: Rollout = field(default_factory=Rollout)
    algorithm: Algorithm = field(default_factory=Algorithm)
    eval: Eval = field(default_factory=Eval)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    generator: Generator = field(default_factory=Generator)
    weight_sync: WeightSync = field(default_factory=WeightSync)
    hosts: Hosts = field(default_factory=Hosts)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
