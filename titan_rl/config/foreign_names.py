"""Names of other projects' settings, and the keys that do the same here.

`--max_steps 200` is answered with `training.steps`; docs/environments.md has the names that most people know.
"""

KEYS = {
    # TRL: GRPOConfig, with the fields of transformers' TrainingArguments
    "bf16": "training.mixed_precision_param",
    "chat_template_path": "task.chat_template",
    "dataset_name": "task.path",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "eval.interval",
    "gradient_checkpointing": "activation_checkpoint.mode",
    "learning_rate": "optimizer.lr",
    "log_completions": "metrics.sample_interval",
    "loss_type": "algorithm.aggregation",
    "lr_scheduler_type": "lr_scheduler.decay_type",
    "mask_truncated_completions": "algorithm.overlong_filter",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "training.max_norm",
    "max_steps": "training.steps",
    "model_name_or_path": "model.hf_assets_path",
    "num_generations": "rollout.group_size",
    "num_iterations": "algorithm.epochs",
    "output_dir": "job.dump_folder",
    "per_device_train_batch_size": "rollout.groups_per_step",
    "report_to": "metrics.trackers",
    "reward_funcs": "task.reward",
    "run_name": "metrics.run_name",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_latest_k",
    "scale_rewards": "algorithm.normalize",
    "top_entropy_quantile": "algorithm.top_entropy_share",
    "use_adaptive_entropy": "algorithm.entropy_target",
    "vllm_gpu_memory_utilization": "generator.gpu_memory_utilization",
    "vllm_importance_sampling_correction": "algorithm.correction",
    "vllm_tensor_parallel_size": "generator.tensor_parallel_degree",
    # verl: PPO and GRPO trainers
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.grad_clip": "training.max_norm",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.epochs",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "training.local_batch_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.minibatches",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "parallelism.context_parallel_degree",
    "actor_rollout_ref.model.path": "model.hf_assets_path",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "generator.gpu_memory_utilization",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "generator.tensor_parallel_degree",
    "algorithm.adv_estimator": "algorithm.name",
    "critic.optim.lr": "critic.lr",
    "custom_reward_function.path": "task.reward",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.train_batch_size": "rollout.groups_per_step",
    "data.train_files": "task.path",
    "data.val_files": "task.eval_path",
    "trainer.default_local_dir": "job.dump_folder",
    "trainer.experiment_name": "metrics.run_name",
    "trainer.log_val_generations": "metrics.sample_interval",
    "trainer.logger": "metrics.trackers",
    "trainer.n_gpus_per_node": "hosts.slots",
    "trainer.nnodes": "hosts.count",
    "trainer.project_name": "metrics.project",
    "trainer.save_freq": "checkpoint.interval",
    "trainer.test_freq": "eval.interval",
    "trainer.total_epochs": "training.steps",
    "trainer.total_training_steps": "training.steps",
    # prime-rl
    "monitors.wandb": "metrics.trackers",
    "monitors.wandb.name": "metrics.run_name",
    "monitors.wandb.project": "metrics.project",
    "wandb": "metrics.trackers",
    "wandb.name": "metrics.run_name",
    "wandb.project": "metrics.project",
    # OpenRLHF
    "actor_learning_rate": "optimizer.lr",
    "generate_max_len": "rollout.max_new_tokens",
    "init_kl_coef": "algorithm.kl_coef",
    "n_samples_per_prompt": "rollout.group_size",
    "pretrain": "model.hf_assets_path",
    "prompt_data": "task.path",
    "rollout_batch_size": "rollout.groups_per_step",
    "save_path": "job.dump_folder",
    "use_tensorboard": "metrics.trackers",
    "use_wandb": "metrics.trackers",
    "vllm_num_engines": "generator.replicas",
    "wandb_project": "metrics.project",
    "wandb_run_name": "metrics.run_name",
}
"""Dashes are read as underscores, as in our own flags."""

NO_KEY = {
    "logging_steps": "every step is logged: to metrics.jsonl and metrics.trackers",
    "monitors.wandb.offline": "set WANDB_MODE=offline in the environment",
    "trackio_space_id": "set TRACKIO_SPACE_ID in the environment",
    "wandb.offline": "set WANDB_MODE=offline in the environment",
}
"""Settings that need no key here, and what holds instead."""


def foreign_hint(name: str) -> str:
    """Return the end of a message about an unknown flag: our key, if another project has a setting of that name."""
    name = name.removeprefix("--").replace("-", "_")
    if instead := NO_KEY.get(name):
        return f"; {instead}"
    return f"; here it is --{KEYS[name]} (docs/environments.md)" if name in KEYS else ""


VALUES = {
    ("hosts", "kind", "slurm"): "python -m titan_rl launch --on slurm runs a config on a cluster",
    ("hosts", "kind", "kubernetes"): "python -m titan_rl launch --on kubernetes runs a config on a cluster",
    ("hosts", "kind", "k8s"): "python -m titan_rl launch --on kubernetes runs a config on a cluster",
}
"""Values that a key does not have, by section, key and value, and what does the same."""
