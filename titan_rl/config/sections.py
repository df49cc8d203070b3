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

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "ppo",
    "dapo",
    "gspo",
    "cispo",
    "opd",
    "sft",
    "dpo",
    "ipo",
    "reward_model",
]


def bounds(default: Any, *, ge: float | None = None, gt: float | None = None, le: float | None = None) -> Any:
    """A field with a default and a range that config_file.py enforces."""
    return field(default=default, metadata={"ge": ge, "gt": gt, "le": le})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSection:
    dump_folder: str = "./outputs/run"
    """Where everything of this run lies. A checkpoint in it is resumed."""
    description: str = ""
    """One line about the experiment, shown in the plan."""
    fresh: bool = False
    """Move an existing dump folder aside (never delete it) and start anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugSection:
    seed: int = bounds(0, ge=0)
    """The one seed: data order, sampling and initialization all derive from it."""
    deterministic: bool = False
    """Ask torch for deterministic algorithms (slower on GPU; the CPU path is deterministic anyway)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
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
class TrainingSection:
    steps: int = bounds(100, ge=0)
    """Steps of the algorithm; 0 runs the cold start only."""
    global_batch_size: int = bounds(64, ge=1)
    """Examples of sft, or pairs of dpo and reward_model, in one step. RL's size is rollout.groups_per_step."""
    seq_len: int = bounds(256, ge=2)
    """Length of a packed row."""
    stream_groups: int = bounds(0, ge=0)
    """Train on so many groups as soon as they are finished, while the step's others are still sampled; 0 waits for all.
    The update is the same one, summed in another order."""
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
    gc_freq: int = bounds(50, ge=1)
    """Collect a trainer's Python garbage every gc_freq steps, on all ranks at once, and at no other time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
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
class LRSchedulerSection:
    warmup_steps: int = bounds(0, ge=0)
    """Linear warm-up."""
    decay_ratio: float = bounds(0.0, ge=0, le=1)
    """The last share of the steps that decays; 0 keeps the rate constant after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = bounds(0.0, ge=0, le=1)
    """Floor of the decay, as a factor of lr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSection:
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
class ActivationCheckpointSection:
    mode: Literal["none", "selective", "full"] = "none"
    """What the backward recomputes instead of keeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSection:
    enable: bool = False
    """torch.compile each transformer block (GPU; on CPU it does not pay)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    enable: bool = True
    """Write checkpoints. Off: a run cannot be resumed."""
    folder: str = "checkpoint"
    """Folder below the dump folder."""
    interval: int = bounds(20, ge=1)
    """Save every so many RL steps; the last step and a clean stop always save."""
    keep_latest_k: int = bounds(3, ge=0)
    """Keep so many (0: all; 1 is not possible, one may be half-written)."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write while training continues: "async" copies first, "async_with_pinned_mem" copies in parallel too (GPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSection:
    enable_tensorboard: bool = True
    """Write TensorBoard events."""
    save_tb_folder: str = "tb"
    """Folder below the dump folder."""
    timeline: bool = True
    """Write timeline.json: what every process did when, for ui.perfetto.dev or chrome://tracing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingSection:
    enable_profiling: bool = False
    """Write a torch.profiler trace of the trainers every profile_freq steps."""
    save_traces_folder: str = "profiling/traces"
    """Folder of the traces below the dump folder."""
    profile_freq: int = bounds(10, ge=1)
    """Steps of one profiling cycle: idle, warm-up, active."""
    profiler_warmup: int = bounds(3, ge=0)
    """Steps that run under the profiler before it records."""
    profiler_active: int = bounds(1, ge=1)
    """Steps that a trace records."""
    enable_memory_snapshot: bool = False
    """Write a snapshot of the allocator's history every profile_freq steps (GPU), for pytorch.org/memory_viz."""
    save_memory_snapshot_folder: str = "profiling/memory_snapshot"
    """Folder of the snapshots below the dump folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideSection:
    imports: list[str] = field(default_factory=list)
    """TorchTitan overrides, each "module.function", applied to every model. They must keep the parameters' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSection:
    init_timeout_seconds: int = bounds(300, ge=1)
    """Deadline for spawning, loading engines and building process groups."""
    train_timeout_seconds: int = bounds(600, ge=1)
    """Deadline for one trainer step, one weight sync, or one checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSection:
    detect_seconds: float = bounds(2.0, gt=0)
    """How soon a dead process is known: at once on this host, by asking every half of this on others."""
    hang_seconds: float = bounds(60.0, gt=0)
    """A generator rank that shows no sign of life for so long is replaced. Keep it above the longest engine step."""
    max_restarts: int = bounds(3, ge=0)
    """So many times within restart_window_seconds a role is respawned; once more ends the run, resumable. 0: never."""
    restart_window_seconds: float = bounds(600.0, gt=0)
    """See max_restarts."""
    min_replicas: int = bounds(1, ge=1)
    """The run goes on with fewer generators where some cannot be replaced, down to so many."""
    snapshot_interval: int = bounds(5, ge=0)
    """Keep the trainers' state in memory that outlives them every so many steps: all that a lost trainer costs. 0: only
    checkpoints."""
    reward_attempts: int = bounds(2, ge=1)
    """How often a group whose reward raises is judged before it is dropped and another prompt takes its place."""
    max_failed_saves: int = bounds(3, ge=0)
    """A checkpoint that cannot be written is tried again after the next step; stop after so many in a row."""
    straggler_factor: float = bounds(2.0, gt=1)
    """Name a replica or rank that is so many times slower than its peers' median ..."""
    straggler_steps: int = bounds(5, ge=0)
    """... in so many steps in a row; 0 names nobody."""
    max_bad_steps: int = bounds(3, ge=0)
    """An update whose gradient is not finite is skipped; act after so many such steps in a row. 0 never does."""
    on_bad_steps: Literal["stop", "rollback"] = "stop"
    """End the run, or go back to the newest snapshot from before those steps or the newest checkpoint, max_restarts
    times at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection:
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
    chosen_key: str = "chosen"
    """Column with the preferred answer (dpo, ipo, reward_model)."""
    rejected_key: str = "rejected"
    """Column with the other answer."""
    reward: str = "exact"
    """"exact", "last_number", "model" ([reward_model]), or your own "package.module:function", called as
    f(completion, answer, row) -> float."""
    eval_reward: str = ""
    """What held-out answers are judged by, as for reward; empty is the same. A reward model does not judge itself."""
    template: Literal["plain", "chat"] = "plain"
    """"plain" feeds BOS and the prompt's text, "chat" the tokenizer's chat template."""
    system_prompt: str = ""
    """First message under template = "chat"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
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
    lag: int = bounds(0, ge=0)
    """How many optimizer steps a token may be behind when it is trained on; sampling and training overlap. 0 is exact
    on-policy."""
    window: int = bounds(0, ge=0)
    """Steps by which finished groups may overtake a straggler: it is trained so much later, hence lag + window old."""
    pace: bool = True
    """Under a lag of 2 or more, keep no more groups in flight than keep the trainers busy: fresher, and as fast."""
    timeout_seconds: int = bounds(600, ge=1)
    """Deadline for one prompt's group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    """The defaults are those of "grpo"; presets.py has what each other name changes."""

    name: AlgorithmName = "grpo"
    """A preset: the values of the keys below that the file does not set. docs/algorithms.md has the table."""
    advantage: Literal["group", "leave_one_out", "return", "gae", "teacher"] = "group"
    """What a reward is compared with: siblings, nothing ("return"), a critic ("gae"); or a teacher's log-prob."""
    normalize: Literal["none", "group", "batch"] = "group"
    """Scale of advantages: as they are, over the group's standard deviation, or whitened over the step's tokens."""
    gamma: float = bounds(1.0, ge=0, le=1)
    """Discount per token ("return", "gae")."""
    gae_lambda: float = bounds(0.95, ge=0, le=1)
    """GAE's lambda."""
    ratio: Literal["token", "sequence"] = "token"
    """Level of the importance ratio: per token, or the geometric mean over a sequence (GSPO)."""
    clip: Literal["ppo", "cispo", "none"] = "ppo"
    """PPO clips the objective, CISPO the weight in front of the log-prob."""
    clip_low: float = bounds(0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounds(0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float = bounds(0.0, ge=0)
    """Where the advantage is negative, the ratio counts at most this much; 0 is off, 3 is usual."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """Mean over the step's tokens; mean over sequences of their means; or of their sums over length_constant."""
    length_constant: int = bounds(0, ge=0)
    """Divisor of "sequence_sum"; 0 is rollout.max_new_tokens."""
    kl_coef: float = bounds(0.0, ge=0)
    """Weight of the KL to a frozen reference, the policy as RL began; 0 builds no reference."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL enters; "reward" charges each token its own share."""
    entropy_coef: float = bounds(0.0, ge=0)
    """Weight of the entropy bonus."""
    minibatches: int = bounds(1, ge=1)
    """Optimizer updates that a step's groups are split over."""
    epochs: int = bounds(1, ge=1)
    """Passes over a step's groups."""
    proximal: Literal["generator", "trainer"] = "generator"
    """Whose log-probs the ratio is against: the sampling ones, or the trainer's before the step's first update."""
    correction: Literal["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask"] = "none"
    """Weight of the gap between trainer and generator: truncated, or zero outside its bounds (IcePop: "token_mask")."""
    correction_low: float = bounds(0.5, ge=0)
    """Lower bound of the two masks."""
    correction_high: float = bounds(2.0, gt=0)
    """Where the weight is truncated, or the masks' upper bound."""
    rejection: Literal["none", "token", "geometric"] = "none"
    """Drop tokens, or whole sequences by the geometric mean, whose gap lies outside the bounds."""
    rejection_low: float = bounds(0.5, ge=0)
    """Lower bound of what is kept."""
    rejection_high: float = bounds(2.0, gt=0)
    """Upper bound of what is kept."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by new ones, until the step is full (DAPO)."""
    max_refills: int = bounds(10, ge=1)
    """Rounds of replacements after which a step goes on with the groups it has."""
    overlong_filter: bool = False
    """Do not train on truncated rollouts."""
    overlong_buffer: int = bounds(0, ge=0)
    """Soft overlong punishment: the last so many tokens before rollout.max_new_tokens cost up to overlong_penalty."""
    overlong_penalty: float = bounds(1.0, ge=0)
    """Reward taken from a rollout of full length."""
    max_dead_steps: int = bounds(20, ge=0)
    """Stop after so many steps in a row without any learning signal; 0 never stops."""
    beta: float = bounds(0.1, gt=0)
    """DPO's and IPO's beta."""
    label_smoothing: float = bounds(0.0, ge=0, le=0.5)
    """Share of preferences taken to be mislabeled (conservative DPO)."""

    @property
    def kind(self) -> Literal["rl", "supervised", "preference", "reward"]:
        """What a step is made of: rollouts; examples; pairs for a policy; pairs for a reward model."""
        kinds: dict[str, Literal["supervised", "preference", "reward"]] = {
            "sft": "supervised",
            "dpo": "preference",
            "ipo": "preference",
            "reward_model": "reward",
        }
        return kinds.get(self.name, "rl")

    @property
    def needs_reference(self) -> bool:
        return self.kind == "preference" or (self.kind == "rl" and self.kl_coef > 0)

    @property
    def needs_critic(self) -> bool:
        return self.kind == "rl" and self.advantage == "gae"

    @property
    def needs_teacher(self) -> bool:
        return self.kind == "rl" and self.advantage == "teacher"

    @property
    def updates(self) -> int:
        """Optimizer updates a step."""
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSection:
    """A model beside the policy, on a mesh of its own or in the trainer's processes."""

    data_parallel_replicate_degree: int = bounds(1, ge=1)
    """Replicas on its own mesh (HSDP)."""
    data_parallel_shard_degree: int = bounds(1, ge=1)
    """FSDP2 ranks of its own mesh."""
    tensor_parallel_degree: int = bounds(1, ge=1)
    """Tensor-parallel ranks of its own mesh."""

    @property
    def parallelism(self) -> "ParallelismSection":
        return ParallelismSection(
            data_parallel_replicate_degree=self.data_parallel_replicate_degree,
            data_parallel_shard_degree=self.data_parallel_shard_degree,
            tensor_parallel_degree=self.tensor_parallel_degree,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSection(RoleSection):
    mesh: Literal["trainer", "own", "none"] = "trainer"
    """"trainer" swaps the frozen weights into the trainer's model; "own" spawns a mesh for them. Built where needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection(RoleSection):
    lr: float = bounds(0.0, ge=0)
    """Peak learning rate of the critic; ppo needs one above 0."""
    warmup_steps: int = bounds(0, ge=0)
    """Linear warm-up of that rate."""
    value_clip: float = bounds(0.2, ge=0)
    """A value moves at most this far from what it was before the step; 0 does not clip."""
    hf_assets_path: str = ""
    """A Hugging Face folder to start from (a reward model, say). Empty: the policy as RL begins, with a new head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSection(RoleSection):
    hf_assets_path: str = ""
    """The folder that a reward_model run exported (its hf/). task.reward = "model" needs one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection(RoleSection):
    mesh: Literal["trainer", "own"] = "own"
    """"own" spawns a mesh; "trainer" swaps its weights into the trainer's model: then it has the policy's shape."""
    hf_assets_path: str = ""
    """The teacher's Hugging Face folder, with the policy's tokenizer. opd needs one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSection:
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
class WeightSyncSection:
    transport: Literal["auto", "shm", "rdma"] = "auto"
    """"shm": generators map the trainers' memory; "rdma": one-sided RDMABuffer reads; "auto": the first on one host."""
    slice_mb: int = bounds(8, ge=1, le=64)
    """Size of one RDMA read; 4 to 8 measured best over Monarch's TCP fallback."""
    block_kb: int = bounds(1024, ge=1, le=65536)
    """What has a checksum of its own; it is computed right after packing, so it should fit in a core's cache."""
    verify: Literal["off", "transfer", "live"] = "live"
    """What must match the trainer's checksums before it is served: nothing, the bytes received, the live parameters."""
    in_flight: Literal["swap", "drain"] = "swap"
    """Unfinished requests go on with the new weights (each token has its version), or finish on the old ones first."""
    delta: bool = False
    """Transfer and write only the blocks that changed, unless that is most of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsSection:
    kind: Literal["local"] = "local"
    """Where processes run: this host."""
    slots: int = bounds(0, ge=0)
    """Processes that the host may carry; 0 is its GPU count, or 16 where the run is on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes CUDA where there is a GPU."""
    threads: int = bounds(1, ge=1)
    """OpenMP threads of a process; those that compute at the same time should have no more than there are cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    kind: Literal["disaggregated", "colocated"] = "disaggregated"
    """"colocated": generators and trainers take turns on the same devices; engines sleep while the trainers compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartSection:
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
class EvalSection:
    size: int = bounds(256, ge=0)
    """Held-out problems; 0 switches evaluation off."""
    interval: int = bounds(20, ge=0)
    """Evaluate every so many RL steps; 0 only at the start and at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run. Sections in the order in which --help prints them."""

    job: JobSection = field(default_factory=JobSection)
    task: TaskSection = field(default_factory=TaskSection)
    model: ModelSection = field(default_factory=ModelSection)
    cold_start: ColdStartSection = field(default_factory=ColdStartSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    reference: ReferenceSection = field(default_factory=ReferenceSection)
    critic: CriticSection = field(default_factory=CriticSection)
    reward_model: RewardModelSection = field(default_factory=RewardModelSection)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    eval: EvalSection = field(default_factory=EvalSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    lr_scheduler: LRSchedulerSection = field(default_factory=LRSchedulerSection)
    parallelism: ParallelismSection = field(default_factory=ParallelismSection)
    activation_checkpoint: ActivationCheckpointSection = field(default_factory=ActivationCheckpointSection)
    compile: CompileSection = field(default_factory=CompileSection)
    override: OverrideSection = field(default_factory=OverrideSection)
    generator: GeneratorSection = field(default_factory=GeneratorSection)
    weight_sync: WeightSyncSection = field(default_factory=WeightSyncSection)
    placement: PlacementSection = field(default_factory=PlacementSection)
    hosts: HostsSection = field(default_factory=HostsSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    profiling: ProfilingSection = field(default_factory=ProfilingSection)
    comm: CommSection = field(default_factory=CommSection)
    fault: FaultSection = field(default_factory=FaultSection)
    debug: DebugSection = field(default_factory=DebugSection)

    @property
    def samples_rollouts(self) -> bool:
        """Whether the run has generators at all: to train on what they sample, or to be evaluated by it."""
        return self.algorithm.kind == "rl" or (self.algorithm.kind != "reward" and self.eval.size > 0)

    @property
    def roles(self) -> dict[str, RoleSection]:
        """The models beside the policy that have a mesh of their own."""
        a = self.algorithm
        found: dict[str, RoleSection] = {}
        if a.needs_reference and self.reference.mesh == "own":
            found["reference"] = self.reference
        if a.needs_teacher and self.teacher.mesh == "own":
            found["teacher"] = self.teacher
        if a.kind == "rl" and self.task.reward == "model":
            found["reward_model"] = self.reward_model
        if a.needs_critic:
            found["critic"] = self.critic
        return found
