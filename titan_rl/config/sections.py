"""Every key of a run's TOML: one frozen dataclass per section, one docstring per key.

Section and key names are TorchTitan's where it has them ([job] [model] [optimizer] [lr_scheduler] [training]
[parallelism] [activation_checkpoint] [compile] [checkpoint] [metrics] [comm] [debug]). This file holds data only and
imports no torch: toml.py reads files, preflight/checks checks keys against each other. `--help` prints these docs;
`bounds(...)` gives a key's range, which toml.py checks on reading.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16"]
BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
Family = Literal["llama3", "qwen3"]

Level = Literal["token", "sequence"]
Clip = Literal["ppo", "cispo", "none"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
Estimator = Literal["k1", "k2", "k3"]
Weight = Literal["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask"]
Rejection = Literal["none", "token", "geometric"]

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
    """Return a field with a default and a range, which toml.py enforces."""
    return field(default=default, metadata={"ge": ge, "gt": gt, "le": le})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSection:
    dump_folder: str = "./outputs/run"
    """Output folder of the run. A run resumes from the newest checkpoint in it."""
    description: str = ""
    """One line about the experiment, printed with the plan."""
    fresh: bool = False
    """Rename an existing dump folder (it is never deleted) and start from scratch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugSection:
    seed: int = bounds(0, ge=0)
    """The only seed: data order, sampling and initialization all derive from it."""
    deterministic: bool = False
    """Use deterministic torch algorithms. Slower on GPU; on CPU runs are deterministic anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    name: Family = "llama3"
    """Model family."""
    hf_assets_path: str = ""
    """Hugging Face folder with config.json, safetensors weights and tokenizer. Empty: build the model from the keys
    below."""
    flavor: str = ""
    """TorchTitan flavor ("debugmodel", "8B", ...) to use instead of the dimensions below."""
    dim: int = bounds(128, ge=1)
    """Hidden size."""
    n_layers: int = bounds(4, ge=1)
    """Number of transformer blocks."""
    n_heads: int = bounds(4, ge=1)
    """Number of query heads."""
    n_kv_heads: int = bounds(2, ge=1)
    """Number of key/value heads (grouped-query attention)."""
    head_dim: int = bounds(0, ge=0)
    """Dimension of a head. 0: dim / n_heads."""
    hidden_dim: int = bounds(384, ge=1)
    """Hidden size of the feed-forward layers."""
    vocab_size: int = bounds(64, ge=1)
    """Rows of the embedding. At least the tokenizer's size."""
    max_seq_len: int = bounds(2048, ge=1)
    """Context length written to the model's config.json."""
    rope_theta: float = bounds(10000.0, gt=0)
    """Base of the rotary position embedding (RoPE)."""
    norm_eps: float = bounds(1e-6, gt=0)
    """Epsilon of RMSNorm."""
    enable_weight_tying: bool = False
    """Share one weight between the embedding and the output head."""
    initializer_range: float = bounds(0.02, ge=0)
    """Standard deviation of random initial weights, as in Hugging Face. 0: TorchTitan's per-layer initializers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSection:
    steps: int = bounds(100, ge=0)
    """Number of training steps. 0: run the cold start only."""
    global_batch_size: int = bounds(64, ge=1)
    """Examples (sft) or pairs (dpo, ipo, reward_model) per step. RL uses rollout.groups_per_step instead."""
    seq_len: int = bounds(256, ge=2)
    """Length of a packed row in tokens."""
    stream_groups: int = bounds(0, ge=0)
    """Train on this many groups as soon as they finish, while the rest of the step is still being sampled. The update
    is the same, summed in another order. 0: wait for the whole step."""
    local_batch_size: int = bounds(8, ge=1)
    """Packed rows per microbatch on one data-parallel rank. Further rows accumulate gradients."""
    max_norm: float = bounds(1.0, gt=0)
    """Maximum gradient norm; larger gradients are clipped to it."""
    dtype: Dtype = "float32"
    """Dtype of master weights, gradients and optimizer states."""
    mixed_precision_param: Dtype = "float32"
    """Dtype of forward and backward (FSDP2 mixed precision)."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Dtype of gradient reduction."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory (GPU runs)."""
    gc_freq: int = bounds(50, ge=1)
    """Collect a trainer's Python garbage every gc_freq steps, on all ranks at once, and at no other time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    name: Literal["AdamW", "Adam"] = "AdamW"
    """Optimizer class."""
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
    """Torch implementation of the optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedulerSection:
    warmup_steps: int = bounds(0, ge=0)
    """Steps of linear warm-up."""
    decay_ratio: float = bounds(0.0, ge=0, le=1)
    """Fraction of the steps, at the end, over which the rate decays. 0: constant after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = bounds(0.0, ge=0, le=1)
    """Lowest rate of the decay, as a factor of lr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSection:
    data_parallel_replicate_degree: int = bounds(1, ge=1)
    """Number of replicas of the sharded trainer (HSDP)."""
    data_parallel_shard_degree: int = bounds(1, ge=1)
    """Number of ranks that one copy of the weights is sharded over (FSDP2)."""
    tensor_parallel_degree: int = bounds(1, ge=1)
    """Tensor-parallel degree of the trainer."""
    enable_sequence_parallel: bool = True
    """Use sequence parallelism within tensor parallelism."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """When FSDP2 frees gathered parameters: always after the forward, never, or TorchTitan's default."""

    @property
    def dp(self) -> int:
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree

    @property
    def world_size(self) -> int:
        return self.dp * self.tensor_parallel_degree


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointSection:
    mode: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward instead of storing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSection:
    enable: bool = False
    """Apply torch.compile to each transformer block. GPU only in practice: on CPU it does not pay off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    enable: bool = True
    """Write checkpoints. Without them a run cannot be resumed."""
    folder: str = "checkpoint"
    """Checkpoint folder, relative to job.dump_folder."""
    interval: int = bounds(20, ge=1)
    """Training steps between checkpoints. The last step and a clean stop always write one."""
    keep_latest_k: int = bounds(3, ge=0)
    """Number of checkpoints to keep. 0: all. 1 is refused, because the newest may be half-written."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write while training continues: "async" copies first, "async_with_pinned_mem" copies in parallel too (GPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSection:
    enable_tensorboard: bool = True
    """Write TensorBoard events."""
    save_tb_folder: str = "tb"
    """TensorBoard folder, relative to job.dump_folder."""
    timeline: bool = True
    """Write timeline.json, the activity of every process, for ui.perfetto.dev or chrome://tracing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingSection:
    enable_profiling: bool = False
    """Write a torch.profiler trace of the trainers every profile_freq steps."""
    save_traces_folder: str = "profiling/traces"
    """Folder of the traces, relative to job.dump_folder."""
    profile_freq: int = bounds(10, ge=1)
    """Steps of one profiling cycle: idle, warm-up, active."""
    profiler_warmup: int = bounds(3, ge=0)
    """Steps that run under the profiler before it records."""
    profiler_active: int = bounds(1, ge=1)
    """Steps that a trace records."""
    enable_memory_snapshot: bool = False
    """Write a snapshot of the allocator's history every profile_freq steps (GPU), for pytorch.org/memory_viz."""
    save_memory_snapshot_folder: str = "profiling/memory_snapshot"
    """Folder of the snapshots, relative to job.dump_folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideSection:
    imports: list[str] = field(default_factory=list)
    """TorchTitan overrides, each "module.function", applied to every model. They must keep the parameters' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSection:
    init_timeout_seconds: int = bounds(300, ge=1)
    """Timeout for spawning processes, loading engines and building process groups."""
    train_timeout_seconds: int = bounds(600, ge=1)
    """Timeout for one trainer step, weight sync or checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSection:
    detect_seconds: float = bounds(2.0, gt=0)
    """Maximum time until a dead process is noticed. On this host it is immediate; processes on other hosts are polled
    every half of this."""
    hang_seconds: float = bounds(60.0, gt=0)
    """Replace a generator rank that shows no progress for this long. Keep it above the longest engine step."""
    max_restarts: int = bounds(3, ge=0)
    """Maximum respawns of one role within restart_window_seconds. The next failure ends the run, which can be resumed.
    0 disables respawning."""
    restart_window_seconds: float = bounds(600.0, gt=0)
    """Length of the window in which max_restarts counts."""
    min_replicas: int = bounds(1, ge=1)
    """Minimum generator replicas. The run continues with fewer replicas when some cannot be replaced, down to this
    number."""
    snapshot_interval: int = bounds(5, ge=0)
    """Steps between in-memory snapshots of the trainers. A lost trainer costs at most this many steps. 0: only
    checkpoints."""
    reward_attempts: int = bounds(2, ge=1)
    """Attempts to score a group when the reward raises. After the last one the group is dropped and replaced by another
    prompt."""
    max_failed_saves: int = bounds(3, ge=0)
    """Consecutive failed checkpoints before the run stops. A failed one is retried after the next step."""
    straggler_factor: float = bounds(2.0, gt=1)
    """Report a replica or rank as a straggler when it takes this many times its peers' median."""
    straggler_steps: int = bounds(5, ge=0)
    """Consecutive slow steps before a straggler is reported. 0: never report."""
    max_bad_steps: int = bounds(3, ge=0)
    """Consecutive steps with a non-finite gradient, whose updates are skipped, before on_bad_steps applies. 0:
    never."""
    on_bad_steps: Literal["stop", "rollback"] = "stop"
    """"stop" ends the run; "rollback" returns to the newest snapshot or checkpoint from before those steps, at most
    max_restarts times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection:
    name: Literal["addition", "jsonl"] = "addition"
    """"addition" generates its own data; "jsonl" reads files."""
    path: str = ""
    """JSONL file with the training prompts."""
    eval_path: str = ""
    """JSONL file with the held-out prompts."""
    prompt_key: str = "question"
    """Column of the prompt: a string or a list of chat messages."""
    answer_key: str = "answer"
    """Column of the reference answer."""
    chosen_key: str = "chosen"
    """Column of the preferred answer (dpo, ipo, reward_model)."""
    rejected_key: str = "rejected"
    """Column of the rejected answer (dpo, ipo, reward_model)."""
    reward: str = "exact"
    """"exact", "last_number", "model" (see [reward_model]), or your own "package.module:function", called with those of
    the keywords prompt, completion, answer and row that it takes, and returning a number."""
    eval_reward: str = ""
    """Reward of the held-out answers, as in reward. Empty: the same as reward. "model" is not allowed: a reward model
    cannot measure a policy trained against it."""
    template: Literal["plain", "chat"] = "plain"
    """"plain" feeds BOS and the prompt text; "chat" applies the tokenizer's chat template."""
    system_prompt: str = ""
    """System message put before the prompt when template = "chat"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    groups_per_step: int = bounds(16, ge=1)
    """Number of prompts per RL step."""
    group_size: int = bounds(16, ge=1)
    """Number of samples per prompt."""
    max_new_tokens: int = bounds(64, ge=1)
    """Maximum number of tokens sampled in one turn."""
    temperature: float = bounds(1.0, gt=0)
    """Sampling temperature. The trainer computes its log-probs at the same temperature."""
    top_p: float = bounds(1.0, gt=0, le=1)
    """Nucleus sampling. Below 1 the sampling log-probs are those of the truncated distribution, and the run prints a
    warning."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Additional stop tokens. EOS always stops."""
    lag: int = bounds(0, ge=0)
    """Maximum age, in optimizer steps, of the weights that sampled a token when it is trained on. Above 0, sampling and
    training overlap. 0: exact on-policy."""
    window: int = bounds(0, ge=0)
    """Number of steps by which finished groups may overtake a slow one. The maximum age becomes lag + window."""
    pace: bool = True
    """When lag is 2 or more, keep only as many groups in flight as the trainers need: fresher samples at the same
    speed."""
    timeout_seconds: int = bounds(600, ge=1)
    """Timeout for sampling one prompt's group, and for scoring it with your own reward function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    """The defaults are those of "grpo"; presets.py lists what every other name changes."""

    name: AlgorithmName = "grpo"
    """Preset: sets every key below that the file does not set. See docs/algorithms.md for the table."""
    advantage: Literal["group", "leave_one_out", "return", "gae", "teacher"] = "group"
    """Baseline of a reward: the mean of its group ("group"), of the other samples ("leave_one_out"), none ("return"), a
    critic ("gae"). "teacher" uses the teacher's log-probs instead of rewards."""
    normalize: Literal["none", "group", "batch"] = "group"
    """Scale of the advantages: unchanged, divided by the group's standard deviation, or whitened over the step's
    tokens."""
    gamma: float = bounds(1.0, ge=0, le=1)
    """Discount per token (advantage "return" and "gae")."""
    gae_lambda: float = bounds(0.95, ge=0, le=1)
    """Lambda of GAE."""
    ratio: Level = "token"
    """Importance ratio: per token, or the geometric mean over a sequence (GSPO)."""
    clip: Clip = "ppo"
    """"ppo" clips the objective; "cispo" clips the weight in front of the log-prob."""
    clip_low: float = bounds(0.2, ge=0, le=1)
    """Clip the ratio from below at 1 - clip_low."""
    clip_high: float = bounds(0.2, ge=0)
    """Clip the ratio from above at 1 + clip_high."""
    dual_clip: float = bounds(0.0, ge=0)
    """Upper limit of the ratio where the advantage is negative. 0: off. 3 is a common value."""
    aggregation: Aggregation = "token_mean"
    """Loss of a step: mean over its tokens, mean over sequences of each sequence's token mean, or mean over sequences
    of each sequence's sum / length_constant."""
    length_constant: int = bounds(0, ge=0)
    """Divisor for "sequence_sum". 0: rollout.max_new_tokens."""
    kl_coef: float = bounds(0.0, ge=0)
    """Weight of the KL to the reference, a frozen copy of the policy at the start of RL. 0: no reference is loaded."""
    kl: Estimator = "k3"
    """Estimator of the KL to the reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL is added. "reward" subtracts each token's KL from its reward."""
    entropy_coef: float = bounds(0.0, ge=0)
    """Weight of the entropy bonus."""
    minibatches: int = bounds(1, ge=1)
    """Number of optimizer updates that the groups of a step are split into."""
    epochs: int = bounds(1, ge=1)
    """Number of passes over the groups of a step."""
    proximal: Literal["generator", "trainer"] = "generator"
    """Log-probs in the denominator of the ratio: those of the generator at sampling time, or those of the trainer
    before the step's first update."""
    correction: Weight = "none"
    """Weight by the probability ratio of trainer to generator: truncated above ("*_tis"), or 0 outside its bounds
    ("*_mask"; IcePop is "token_mask")."""
    correction_low: float = bounds(0.5, ge=0)
    """Lower bound of "token_mask" and "sequence_mask"."""
    correction_high: float = bounds(2.0, gt=0)
    """Value at which "*_tis" truncates the weight; upper bound of "*_mask"."""
    rejection: Rejection = "none"
    """Drop tokens ("token"), or whole sequences by their geometric mean ("geometric"), whose probability ratio of
    trainer to generator is outside the bounds."""
    rejection_low: float = bounds(0.5, ge=0)
    """Lower bound of the ratio that is kept."""
    rejection_high: float = bounds(2.0, gt=0)
    """Upper bound of the ratio that is kept."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal until the step is full (DAPO)."""
    max_refills: int = bounds(10, ge=1)
    """Maximum rounds of replacements per step. After that the step continues with the groups it has."""
    overlong_filter: bool = False
    """Exclude truncated rollouts from training."""
    overlong_buffer: int = bounds(0, ge=0)
    """Soft overlong punishment: number of tokens before rollout.max_new_tokens over which the penalty grows from 0 to
    overlong_penalty. 0: off."""
    overlong_penalty: float = bounds(1.0, ge=0)
    """Reward subtracted from a rollout of maximum length."""
    max_dead_steps: int = bounds(20, ge=0)
    """Stop after this many consecutive steps without any learning signal. 0: never stop."""
    beta: float = bounds(0.1, gt=0)
    """Beta of DPO and IPO."""
    label_smoothing: float = bounds(0.0, ge=0, le=0.5)
    """Fraction of preferences assumed to be mislabeled (conservative DPO)."""

    @property
    def kind(self) -> Literal["rl", "supervised", "preference", "reward"]:
        """Return what a step trains on: rollouts, examples, pairs for a policy, or pairs for a reward model."""
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
        """Optimizer updates per step."""
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSection:
    """A model besides the policy, on its own mesh or in the trainer's processes."""

    data_parallel_replicate_degree: int = bounds(1, ge=1)
    """Number of replicas on its own mesh (HSDP)."""
    data_parallel_shard_degree: int = bounds(1, ge=1)
    """FSDP2 sharding degree on its own mesh."""
    tensor_parallel_degree: int = bounds(1, ge=1)
    """Tensor-parallel degree on its own mesh."""

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
    """"trainer" swaps the frozen weights into the trainer's model; "own" spawns processes for them. Loaded only if the
    algorithm needs a reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection(RoleSection):
    lr: float = bounds(0.0, ge=0)
    """Peak learning rate of the critic. ppo requires a value above 0."""
    warmup_steps: int = bounds(0, ge=0)
    """Steps of linear warm-up of the critic's rate."""
    value_clip: float = bounds(0.2, ge=0)
    """Maximum change of a value within one step. 0: no clipping."""
    hf_assets_path: str = ""
    """Hugging Face folder to start from, such as a reward model. Empty: the policy at the start of RL, with a new
    head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSection(RoleSection):
    hf_assets_path: str = ""
    """Folder that a reward_model run exported (its hf/). Required by task.reward = "model"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection(RoleSection):
    mesh: Literal["trainer", "own"] = "own"
    """"own" spawns processes for the teacher; "trainer" swaps its weights into the trainer's model, which requires the
    policy's shape."""
    hf_assets_path: str = ""
    """Hugging Face folder of the teacher, with the policy's tokenizer. Required by opd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSection:
    replicas: int = bounds(1, ge=1)
    """Number of independent vLLM engines."""
    tensor_parallel_degree: int = bounds(1, ge=1)
    """Tensor-parallel degree of one engine, which is its number of processes."""
    dtype: Dtype = "float32"
    """Dtype of the rollout weights."""
    max_num_seqs: int = bounds(256, ge=1)
    """Maximum number of sequences in one engine's batch."""
    max_model_len: int = bounds(0, ge=0)
    """Maximum length of a sequence. 0: training.seq_len."""
    kv_cache_memory_mb: int = bounds(256, ge=0)
    """Size of the KV cache of one process in MiB. 0: vLLM derives it from gpu_memory_utilization (GPU)."""
    gpu_memory_utilization: float = bounds(0.9, gt=0, le=1)
    """Fraction of a GPU's memory that the engine may use."""
    block_size: int = bounds(32, ge=1)
    """Tokens per KV-cache block, the unit of prefix caching."""
    enable_prefix_caching: bool = True
    """Share the KV cache of the prompt between the samples of a group."""
    enforce_eager: bool = True
    """Run vLLM without CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncSection:
    transport: Literal["auto", "shm", "rdma"] = "auto"
    """"shm": generators map the trainers' memory; "rdma": one-sided RDMABuffer reads; "auto": "shm" when all processes
    share a host."""
    slice_mb: int = bounds(8, ge=1, le=64)
    """Size of one RDMA read. 4 to 8 measured best over Monarch's TCP fallback."""
    block_kb: int = bounds(1024, ge=1, le=65536)
    """Size of a block, the unit of checksums. They are computed right after packing, so a block should fit in a core's
    cache."""
    verify: Literal["off", "transfer", "live"] = "live"
    """Compare with the trainer's checksums before serving new weights: nothing, the bytes received, or the live
    parameters."""
    in_flight: Literal["swap", "drain"] = "swap"
    """Unfinished requests at a weight update: "swap" continues them with the new weights (each token records its
    version), "drain" finishes them with the old weights first."""
    delta: bool = False
    """Transfer and write only the blocks that changed, unless most of them did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsSection:
    kind: Literal["local"] = "local"
    """Where processes run. "local": on this host."""
    slots: int = bounds(0, ge=0)
    """Maximum number of processes on the host. 0: the number of GPUs, or 16 for a run on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" uses CUDA if the host has a GPU."""
    threads: int = bounds(1, ge=1)
    """OpenMP threads per process. Processes that compute at the same time should not use more threads than there are
    cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    kind: Literal["disaggregated", "colocated"] = "disaggregated"
    """"disaggregated" gives generators and trainers devices of their own; "colocated" makes them take turns on the same
    devices: engines sleep while the trainers compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartSection:
    steps: int = bounds(0, ge=0)
    """Supervised steps on the task's reference answers before RL. 0: none."""
    batch_size: int = bounds(64, ge=1)
    """Examples per supervised step."""
    lr: float = bounds(1e-3, gt=0)
    """Peak learning rate of the supervised steps."""
    warmup_steps: int = bounds(20, ge=0)
    """Steps of linear warm-up of the supervised rate."""
    decay_ratio: float = bounds(0.0, ge=0, le=1)
    """Fraction of the supervised steps, at the end, over which the rate decays linearly to 0. 0: constant."""
    stop_at: float = bounds(0.0, ge=0, le=1)
    """End early once the greedy score on eval.size training problems reaches this. 0: take all steps."""
    stop_interval: int = bounds(25, ge=1)
    """Supervised steps between checks of that score."""
    interval: int = bounds(500, ge=1)
    """Supervised steps between checkpoints. The last step always writes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    size: int = bounds(256, ge=0)
    """Number of held-out problems. 0: no evaluation."""
    interval: int = bounds(20, ge=0)
    """Steps between evaluations. 0: only at the start and at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run. --help prints the sections in this order."""

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
        """Return True if the run has generators, to sample training data or to evaluate the policy."""
        return self.algorithm.kind == "rl" or (self.algorithm.kind != "reward" and self.eval.size > 0)

    @property
    def roles(self) -> dict[str, RoleSection]:
        """Return the models besides the policy that have their own mesh."""
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
