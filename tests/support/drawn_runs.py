"""Draws small runs in which features meet by chance."""

import contextlib
import io
import random
from pathlib import Path
from typing import Any

from titan_rl.preflight.checks import checked_run

SMALL: dict[str, Any] = {
    **{"cold_start.steps": 3, "cold_start.stop_at": 0, "rollout.groups_per_step": 4, "rollout.group_size": 4},
    **{"training.steps": 3, "eval.size": 8, "eval.interval": 2, "checkpoint.interval": 1, "hosts.threads": 1},
    **{"lr_scheduler.decay_ratio": 0, "lr_scheduler.warmup_steps": 0},
}
SMALL_MODEL = "model.n_layers=2 model.hidden_dim=128"
CONFIGS: dict[str, str] = {  # and keys that make their runs small
    **dict.fromkeys(("grpo_llama", "gdpo_llama", "dapo_llama", "ppo_llama", "hunt_llama", "calc_llama"), SMALL_MODEL),
    **dict.fromkeys(("calc_agent_llama", "sdft_calc_llama", "online_dpo_llama"), SMALL_MODEL),
    **dict.fromkeys(("sft_llama", "dpo_llama", "kto_llama"), f"{SMALL_MODEL} training.global_batch_size=8"),
    **dict.fromkeys(("kuhn_llama", "kuhn_pair_llama"), f"{SMALL_MODEL} cold_start.steps=0"),
    **dict.fromkeys(("tic_tac_toe_llama", "count_squares", "read_digits_tower"), ""),
}
FEATURES: dict[str, tuple[str, ...]] = {  # choices, each with the keys that it sets
    "16 bits": (
        *("training.mixed_precision_param=bfloat16", "training.dtype=bfloat16", "generator.dtype=bfloat16"),
        "training.mixed_precision_param=bfloat16 generator.dtype=bfloat16",
    ),
    "adapters": (
        *("lora.rank=4", "lora.rank=4 lora.sync=merge", "lora.rank=8 lora.base_dtype=bfloat16"),
        'lora.rank=4 lora.targets=["q_proj","down_proj"]',
    ),
    "lag": (
        *("rollout.max_staleness_steps=1", "rollout.max_staleness_steps=2"),
        "rollout.max_staleness_steps=1 rollout.overtake_steps=1",
    ),
    "unfinished answers": ("weight_sync.in_flight=swap", "weight_sync.in_flight=keep", "weight_sync.in_flight=drain"),
    "transport": ("weight_sync.transport=rdma", "weight_sync.transport=broadcast", "weight_sync.relay=true"),
    "sent blocks": ("weight_sync.delta=true", "weight_sync.block_kb=64", "weight_sync.verify=transfer"),
    "trainers": (
        *("parallelism.data_parallel_shard_degree=1", "parallelism.tensor_parallel_degree=2"),
        "parallelism.data_parallel_shard_degree=1 parallelism.tensor_parallel_degree=2",
        "parallelism.data_parallel_shard_degree=1 parallelism.context_parallel_degree=2",
        "parallelism.data_parallel_shard_degree=1 parallelism.data_parallel_replicate_degree=2",
    ),
    "engines": ("generator.replicas=2", "generator.tensor_parallel_degree=2"),
    "algorithm": (
        *(f"algorithm.name={name}" for name in ("rloo", "dr_grpo", "reinforce_pp", "gspo", "cispo", "sapo", "m2po")),
        *(f"algorithm.name={name}" for name in ("maxrl", "opo", "remax", "otb", "vespo", "luspo", "gmpo", "kl_cov")),
        *("algorithm.name=pass_at_k algorithm.pass_k=2", "algorithm.name=ppo critic.lr=1e-3"),
        "algorithm.name=ppo critic.lr=1e-3 critic.tensor_parallel_degree=2",
    ),
    "reference": (
        *("algorithm.kl_coef=0.01", "algorithm.kl_coef=0.01 algorithm.kl_in=reward algorithm.kl=k1"),
        "algorithm.kl_coef=0.01 reference.mesh=own reference.tensor_parallel_degree=2",
    ),
    "entropy": ("algorithm.entropy_coef=0.01 algorithm.entropy_target=0.5", "algorithm.top_entropy_share=0.5"),
    "sampling": ("rollout.top_k=8", "rollout.top_p=0.9", "rollout.min_p=0.05", "rollout.temperature=0.7"),
    "updates": (
        *("algorithm.minibatches=2", "algorithm.epochs=2", "algorithm.minibatches=2 algorithm.proximal=trainer"),
        "algorithm.minibatches=2 algorithm.epochs=2",
    ),
    "correction": ("algorithm.correction=token_tis", "algorithm.correction=sequence_mask"),
    "rejection": ("algorithm.rejection=token", "algorithm.rejection=geometric", "algorithm.rejection=second_moment"),
    "groups": (
        *("algorithm.dynamic_sampling=true algorithm.max_refills=2", "algorithm.overlong_filter=true"),
        *("algorithm.length_reward=kimi", "algorithm.credit=turn", "training.stream_groups=2"),
    ),
    "recompute": tuple(f"activation_checkpoint.mode={mode}" for mode in ("none", "selective", "full", "offload")),
    "rows": ("training.local_batch_size=1", "training.local_batch_size=3"),
    "gradients": ("training.gradient_sync=microbatch", "training.parameter_gather=microbatch"),
    "logits": ("training.keep_logits=true", "training.keep_logits=false", "model.head_dtype=float32"),
    "moments": ("optimizer.moments=bfloat16",),
    "drafts": ("generator.drafts=siblings", "generator.drafts=ngram"),
    "quantization": ("generator.quantization=int8",),
    "family": (
        *(f"model.name={name}" for name in ("qwen2", "qwen3", "mistral", "smollm3", "olmo2", "olmo3", "phi3", "glm4")),
        *("model.name=gemma3", "model.name=glm4_moe", "model.name=gpt_oss", "model.enable_weight_tying=true"),
        "model.name=qwen3_moe algorithm.routing_replay=true",
        "model.name=qwen3_moe parallelism.expert_parallel_degree=2",
    ),
    "curriculum": ("curriculum.solved_visits=1 curriculum.hopeless_wait=2",),
    "saves": ("checkpoint.async_mode=async", "checkpoint.async_mode=disabled", "record.batches=2"),
    "snapshots": ("fault.snapshot_interval=1", "fault.snapshot_interval=0"),
    "placement": ("placement.kind=colocated", "placement.kind=colocated placement.sleep=true", "hosts.kind=processes"),
    "batches": ("generator.max_num_seqs=3", "generator.max_num_batched_tokens=64", "generator.async_scheduling=false"),
    "opponents": ('opponents.pool=["history"] opponents.interval=1',),
    "vision": ("model.vision=projection", "model.vision=all"),
    "deterministic": ("debug.deterministic=true",),
    "chat": ("task.template=chat",),
}


def accepted(config: str, keys: dict[str, Any]) -> bool:
    """Return True if the checks before a run have nothing against it."""
    flags = [f"--{key}={value}" for key, value in keys.items()]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            checked_run(["--config", config, "--hosts.isolation=off", *flags])
    except SystemExit:
        return False
    return True


def parsed(text: str) -> dict[str, str]:
    return dict(each.split("=", 1) for each in text.split())


def drawn(seed: int, folder: Path, features: int = 8) -> tuple[str, dict[str, Any]]:
    """Return the name of a config, and keys of up to `features` features that the checks accept together. `folder`: a
    run's that is not there."""
    r = random.Random(seed)
    config = r.choice([*CONFIGS])
    keys: dict[str, Any] = {**SMALL, **parsed(CONFIGS[config]), "debug.seed": r.randrange(100)}
    taken = 0
    for name in r.sample([*FEATURES], len(FEATURES)):
        option = parsed(r.choice(FEATURES[name]))
        if taken < features and accepted(config, {**keys, **option, "job.dump_folder": folder}):
            keys, taken = keys | option, taken + 1
    return config, keys
