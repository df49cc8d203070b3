"""Keys of the model and its training: [model] [lora] [training] [optimizer] [lr_scheduler] [parallelism]
[activation_checkpoint] [compile] [checkpoint] [cold_start]."""

import os
from dataclasses import dataclass, field, replace
from typing import Literal

from titan_rl.config.choices import MOST_RANKS, Dtype, DtypeChoice, FamilyChoice, HeadDtype, Switch, bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    name: FamilyChoice = "auto"
    """Model family, see docs/models.md. "auto": the Hugging Face folder's; without one, llama3."""
    hf_assets_path: str = ""
    """Hugging Face folder with config.json, safetensors weights and tokenizer. Empty: build the model from the keys
    below."""
    spec: str = ""
    """Function "package.module:name" that returns a TorchTitan ModelSpec for the keys of the folder's config.json, see
    docs/models.md. Empty: the model_type's own."""
    vision: Literal["none", "frozen", "projection", "all"] = "none"
    """Whether prompts have images (idefics3, smolvlm), and which parts of the folder's vision tower are trained beside
    the text model. "frozen": none. "projection": the projection to the text model. "all": the projection and the
    encoder, but no embeddings of patches. "none": prompts have text only, without the tower's memory."""
    hub_name: str = ""
    """Name of these weights on a model hub, as in "Qwen/Qwen3-0.6B". Exported adapters name it as their base. Empty:
    they name the folder, which other machines lack."""
    dim: int = bounds(128, ge=1, le=2**17)
    """Hidden size."""
    n_layers: int = bounds(4, ge=1, le=1000)
    """Number of transformer blocks."""
    n_heads: int = bounds(4, ge=1, le=2**12)
    """Number of query heads."""
    n_kv_heads: int = bounds(2, ge=1, le=2**12)
    """Number of key/value heads (grouped-query attention)."""
    head_dim: int = bounds(0, ge=0, le=2**12)
    """Dimension of a head. 0: dim / n_heads."""
    hidden_dim: int = bounds(384, ge=2, le=2**20)
    """Hidden size of the feed-forward layers; in a mixture of experts of each expert."""
    experts: int = bounds(8, ge=1, le=2**14)
    """Experts in each layer of a mixture of experts (qwen3_moe, gpt_oss, glm4_moe)."""
    experts_per_token: int = bounds(2, ge=1, le=2**14)
    """Experts that compute each token, in a mixture of experts (qwen3_moe, gpt_oss, glm4_moe)."""
    vocab_size: int = bounds(64, ge=1, le=2**24)
    """Rows of the embedding. At least the tokenizer's size."""
    enable_weight_tying: bool = False
    """Share one weight between the embedding and the output head."""
    initializer_range: float = bounds(0.02, ge=0, le=10)
    """Standard deviation of random initial weights, as in Hugging Face. 0: TorchTitan's per-layer initializers."""
    head_dtype: HeadDtype = "model"
    """Dtype of the logits, in the trainers and in vLLM. "model": as in the forward, so bfloat16 rounds each logit to
    8 bits. "float32": keep the float32 sums of the products, for a smaller gap between the two log-probs."""

    @property
    def base(self) -> str:
        """Where adapters find these weights: their name on a hub, or their folder."""
        return self.hub_name or (os.path.abspath(self.hf_assets_path) if self.hf_assets_path else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSection:
    rank: int = bounds(0, ge=0, le=4096)
    """Rank of the adapters that are trained in place of the policy's weights, which stay as they are (LoRA,
    docs/models.md). 0: train all weights."""
    alpha: float = bounds(32.0, gt=0, le=1e6)
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Linear layers of every block with an adapter: q, k, v, o, gate, up, down; of model.spec also others, by their
    names in a block of the folder. k and v go together. Empty: all that the model has; with experts q, k, v, o."""
    base_dtype: DtypeChoice = "auto"
    """Dtype in which the trainer keeps the frozen weights. Adapters have training.dtype. "auto":
    training.mixed_precision_param."""
    sync: Literal["auto", "adapter", "merge"] = "auto"
    """What a weight sync moves: "adapter" the adapters alone, which vLLM applies; "merge" the whole model, with the
    adapters added to its weights: in 16 bits that rounds most of an update away. "auto": "adapter" where vLLM can."""

    @property
    def in_vllm(self) -> "LoraSection | None":
        """These keys if vLLM applies the adapters; None if it gets merged weights, or there are none."""
        return self if self.on and self.sync == "adapter" else None

    @property
    def on(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSection:
    steps: int = bounds(100, ge=0, le=10**9)
    """Number of training steps. 0: run the cold start only."""
    global_batch_size: int = bounds(64, ge=1, le=2**16)
    """Examples (sft) or pairs (dpo, simpo, reward_model, ...) per step. RL uses rollout.groups_per_step instead."""
    seq_len: int = bounds(256, ge=2, le=2**20)
    """Length of a packed row in tokens."""
    stream_groups: int = bounds(0, ge=0, le=2**14)
    """Train on this many groups as soon as they finish, while the rest of the step is still being sampled. The update
    is the same, summed in another order. 0: wait for the whole step."""
    local_batch_size: int = bounds(0, ge=0, le=2**12)
    """Packed rows per microbatch on one data-parallel rank. Further rows accumulate gradients. 0: the most that fit
    a GPU by estimate, or that keep a CPU's caches warm."""
    max_norm: float = bounds(1.0, ge=1e-10, le=1e30)
    """Maximum gradient norm; larger gradients are clipped to it."""
    dtype: Dtype = "float32"
    """Dtype of master weights, gradients and optimizer states."""
    mixed_precision_param: DtypeChoice = "auto"
    """Dtype of forward and backward (FSDP2 mixed precision). "auto": float32 on a CPU; on a GPU generator.dtype, or
    bfloat16 if that is "auto" too."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory (GPU runs)."""
    gradient_sync: Literal["auto", "update", "microbatch"] = "auto"
    """Add up gradients over the mesh once per "update", for which ranks keep them unsharded (4 bytes per parameter /
    tensor_parallel_degree), or after each "microbatch". "auto": on a GPU the faster one with the rows that then fit, by
    the planner's estimate."""
    parameter_gather: Literal["auto", "update", "microbatch"] = "auto"
    """Gather parameters once per "update", and keep them until its end (in mixed_precision_param), or block by block in
    every forward and backward of each "microbatch". On one rank "update" copies them once and needs no FSDP2. "auto":
    per update if it fits an eighth of a CPU's memory; on a GPU as gradient_sync."""
    keep_logits: Switch = "auto"
    """Keep the logits of trained tokens from the forward to the backward, as their product left them (in
    mixed_precision_param, or float32 with model.head_dtype), instead of computing them again: the same bits by three
    products of the head instead of four. "auto": false on a CPU; on a GPU as gradient_sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    lr: float = bounds(1e-5, gt=0, le=10)
    """Peak learning rate."""
    beta1: float = bounds(0.9, ge=0, lt=1)
    """Adam's beta1."""
    beta2: float = bounds(0.95, ge=0, lt=1)
    """Adam's beta2."""
    eps: float = bounds(1e-8, ge=1e-20, le=1)
    """Adam's epsilon."""
    weight_decay: float = bounds(0.0, ge=0, le=100)
    """Decoupled weight decay."""
    moments: Literal["master", "bfloat16"] = "master"
    """Dtype in which Adam's two moments are stored: the master weights' (training.dtype), or bfloat16, which takes 4
    bytes per float32 parameter less on ranks, in checkpoints and in snapshots. Updates are computed in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedulerSection:
    warmup_steps: int = bounds(0, ge=0, le=10**9)
    """Steps of linear warm-up."""
    decay_ratio: float = bounds(0.0, ge=0, le=1)
    """Fraction of the steps, at the end, over which the rate decays. 0: constant after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = bounds(0.0, ge=0, le=1)
    """Lowest rate of the decay, as a factor of lr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismSection:
    data_parallel_replicate_degree: int = bounds(1, ge=1, le=MOST_RANKS)
    """Number of replicas of the sharded trainer (HSDP)."""
    data_parallel_shard_degree: int = bounds(1, ge=1, le=MOST_RANKS)
    """Number of ranks that one copy of the weights is sharded over (FSDP2)."""
    tensor_parallel_degree: int = bounds(1, ge=1, le=MOST_RANKS)
    """Tensor-parallel degree of the trainer."""
    context_parallel_degree: int = bounds(1, ge=1, le=MOST_RANKS)
    """Number of ranks that each packed row is cut over, for rows whose activations exceed one GPU's memory. Each
    computes a part of the row, against the keys and values of all of it; the weights are sharded over them too."""
    expert_parallel_degree: int = bounds(1, ge=1, le=MOST_RANKS)
    """Number of ranks that the experts of a layer are dealt to; data_parallel_shard_degree x context_parallel_degree x
    tensor_parallel_degree is a multiple of it. Tokens travel to them and back. 1: every rank computes all experts."""

    @property
    def dp(self) -> int:
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree

    @property
    def row_ranks(self) -> int:
        """Return the number of ranks of a dp row, which compute the same packed rows."""
        return self.context_parallel_degree * self.tensor_parallel_degree

    @property
    def shards(self) -> int:
        """Return the number of ranks that FSDP2 shards one copy of the weights over."""
        return self.data_parallel_shard_degree * self.context_parallel_degree

    @property
    def world_size(self) -> int:
        return self.dp * self.row_ranks

    def of_rows(self, rows: int) -> "ParallelismSection":
        """Return the same layout with another number of dp rows: copies of the weights are left out as long as whole
        ones remain; then one is sharded over the rows."""
        whole = rows % self.data_parallel_shard_degree == 0
        shard = self.data_parallel_shard_degree if whole else rows
        return replace(self, data_parallel_shard_degree=shard, data_parallel_replicate_degree=rows // shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointSection:
    mode: Literal["auto", "none", "selective", "full", "offload"] = "auto"
    """Activations to recompute in the backward instead of storing. "auto": on a GPU the fastest of
    "none", "selective" and "full" with the rows that then fit, by the planner's estimate; else "none". "offload" is
    "full" with each block's input in pinned host memory (GPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSection:
    enable: Switch = "auto"
    """Apply torch.compile to each transformer block. "auto": on GPUs, if training.mixed_precision_param is bfloat16:
    float32 attention cannot be compiled, and on a CPU it does not pay off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideSection:
    imports: list[str] = field(default_factory=list)
    """TorchTitan overrides, each "module.function", applied to every model. They must keep the parameters' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    enable: bool = True
    """Write checkpoints. Without them a run cannot be resumed."""
    interval: int = bounds(20, ge=1, le=10**9)
    """Training steps between checkpoints. The last step and a clean stop always write one."""
    keep_latest_k: int = bounds(3, ge=0, le=10**9)
    """Number of checkpoints to keep. 0: all. 1 is refused, because the newest may be half-written."""
    async_mode: Literal["auto", "disabled", "async", "async_with_pinned_mem"] = "auto"
    """Write while training continues: "async" copies first, "async_with_pinned_mem" copies in parallel too (GPU).
    "auto": "async_with_pinned_mem" on a GPU, "disabled" on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartSection:
    steps: int = bounds(0, ge=0, le=10**9)
    """Supervised steps on the task's reference answers before RL. 0: none."""
    batch_size: int = bounds(64, ge=1, le=2**16)
    """Examples per supervised step."""
    lr: float = bounds(1e-3, gt=0, le=10)
    """Peak learning rate of the supervised steps."""
    stop_at: float = bounds(0.0, ge=0, le=1)
    """End early once the score on eval.size training problems, drawn by the seed, reaches this. 0: take all steps."""
    stop_temperature: float = bounds(0.0, ge=0, le=2)
    """Temperature at which that score is sampled. 0: greedy. 1 suits a cold start that teaches a choice by its share of
    the demonstrations: a greedy score jumps as the share of the choice passes one half."""
    stop_interval: int = bounds(25, ge=1, le=10**9)
    """Supervised steps between checks of that score."""
    teacher_prompts: bool = False
    """Train on each example once more after the prompt that the teacher will read (algorithm.teacher_context): a model
    that starts from random weights cannot read it otherwise."""
