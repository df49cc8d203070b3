"""Keys of earlier versions: removed ones, and ones that have another name.

A removed key that is set to its old default changes nothing and loads as before. Another value is refused with advice;
in the config of a finished or interrupted run it has no effect, unless the run's files depend on it.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Removed(NamedTuple):
    default: Any  # a tuple: any of these
    advice: str
    decides_files: bool = False

    def is_default(self, value: Any) -> bool:
        """Compare with a value of a TOML file, or with a flag's text."""
        if isinstance(self.default, tuple):
            return any(self._replace(default=each).is_default(value) for each in self.default)
        if isinstance(self.default, str):
            return value == self.default
        if isinstance(self.default, bool):
            return str(value).lower() == str(self.default).lower()
        with contextlib.suppress(ValueError, TypeError):
            return float(value) == self.default and not isinstance(value, bool)
        return False


class Renamed(NamedTuple):
    """A key that is still read, under the names that it has now."""

    section: str
    names: tuple[str, ...]
    like: str  # a key of its type and range
    becomes: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
    """Returns the values of the new keys, from the old one's value and the section's values so far."""


REMOVED = {
    "sandbox.workers": Removed(2, "a process that uses the sandbox runs 2 executions at once; more processes run more"),
    "sandbox.cpu_seconds": Removed(5, "sandbox.wall_seconds bounds the CPU time of each process too"),
    "sandbox.processes": Removed(16, "an execution has at most 16 processes and threads"),
    "sandbox.file_mb": Removed(16, "a file has at most 16 MiB"),
    "sandbox.disk_mb": Removed(64, "the scratch folder has 64 MiB"),
    "sandbox.output_kb": Removed(64, "an execution prints at most 64 KiB"),
    "model.flavor": Removed("", "set model.hf_assets_path, or model.dim and its siblings", decides_files=True),
    "model.max_seq_len": Removed(2048, "a model without model.hf_assets_path takes rows of at most 32,768 tokens"),
    "model.rope_theta": Removed(10000.0, "a model without model.hf_assets_path has 10,000", decides_files=True),
    "model.norm_eps": Removed(1e-06, "a model without model.hf_assets_path has 1e-6", decides_files=True),
    "generator.block_size": Removed((16, 32), "a block of the KV cache has 32 tokens on a CPU, 16 on a GPU"),
    "generator.enable_prefix_caching": Removed(True, "samples of a group always share the KV cache of their prompt"),
    "curriculum.solved_rate": Removed(1.0, "a visit counts as solved if all answers are correct"),
    "curriculum.hopeless_rate": Removed(0.0, "a visit counts as hopeless if no answer is correct"),
    "algorithm.overlong_penalty": Removed(1.0, "a rollout of maximum length loses 1; scale the rewards instead"),
    "reference.data_parallel_replicate_degree": Removed(1, "shard it over more ranks by data_parallel_shard_degree"),
    "critic.data_parallel_replicate_degree": Removed(1, "shard it over more ranks by data_parallel_shard_degree"),
    "reward_model.data_parallel_replicate_degree": Removed(1, "shard it over more ranks by data_parallel_shard_degree"),
    "teacher.data_parallel_replicate_degree": Removed(1, "shard it over more ranks by data_parallel_shard_degree"),
    "critic.value_clip": Removed(0.2, "values change by at most 0.2 within one step"),
    "training.share_prompts": Removed(True, "prompts are always shared: losses are the same"),
    "training.mixed_precision_reduce": Removed("float32", "gradients are always reduced in float32"),
    "training.gc_freq": Removed(50, "garbage is collected every 50 steps"),
    "optimizer.name": Removed(
        "AdamW",
        "the optimizer is AdamW, which with weight_decay = 0 is Adam; TorchTitan's Muon (DistMuon) refuses CPUs",
    ),
    "optimizer.implementation": Removed("fused", "the fused implementation is always used"),
    "parallelism.enable_sequence_parallel": Removed(True, "tensor parallelism always has sequence parallelism"),
    "parallelism.fsdp_reshard_after_forward": Removed("default", "TorchTitan's default applies"),
    "cold_start.warmup_steps": Removed(20, "the rate warms up over 20 steps"),
    "cold_start.decay_ratio": Removed(0.0, "the rate is constant after its warm-up"),
    "cold_start.interval": Removed(500, "a checkpoint is written every 500 steps, and after the last one"),
    "weight_sync.slice_mb": Removed(8, "an RDMA read has 8 MiB"),
    "fault.restart_window_seconds": Removed(600.0, "fault.max_restarts counts within 10 minutes"),
    "fault.reward_attempts": Removed(2, "a reward has two attempts; retry in your function what fails at random"),
    "fault.environment_attempts": Removed(2, "a rollout has two attempts"),
    "fault.straggler_factor": Removed(2.0, "a straggler takes more than twice its peers' median"),
    "fault.straggler_steps": Removed(5, "a straggler is reported after 5 slow steps"),
    "launch.name": Removed("", "the job has the name of job.dump_folder"),
    "launch.qos": Removed("", 'launch.extra_args = ["--qos=NAME"] passes it on'),
    "launch.gpus_per_node": Removed(0, "hosts.slots is the number of GPUs of each node"),
    "launch.retries": Removed(1, "a failed run starts again once"),
    "launch.requeues": Removed(100, "a job goes back to the queue at most 100 times"),
    "metrics.save_tb_folder": Removed("tb", "TensorBoard events are in tb/ of job.dump_folder"),
    "metrics.timeline": Removed(True, "timeline.json is always written"),
    "profiling.save_traces_folder": Removed("profiling/traces", "traces are in profiling/traces of job.dump_folder"),
    "profiling.save_memory_snapshot_folder": Removed(
        "profiling/memory_snapshot", "snapshots are in profiling/memory_snapshot of job.dump_folder"
    ),
    "profiling.profiler_warmup": Removed(3, "a trace is recorded after 3 steps of warm-up"),
    "profiling.profiler_active": Removed(1, "a trace has one step"),
    "checkpoint.folder": Removed(
        "checkpoint",
        "checkpoints are in checkpoint/ of job.dump_folder: rename the folder of the run's checkpoints to that, and "
        "delete the key from its config.toml",
        decides_files=True,
    ),
    "rollout.pace": Removed(True, "with rollout.max_staleness_steps >= 2 sampling always keeps the trainers' pace"),
    "debug.exact": Removed(
        False,
        "it was retired: in float32 log-probs of trainers and generators differ by less than 1e-5, and a run whose "
        "engines compute something else ends at its first weight sync (weight_sync.gap_tolerance)",
    ),
}


def _lag(value: int, rollout: Mapping[str, Any]) -> dict[str, Any]:
    return {"max_staleness_steps": value + rollout.get("overtake_steps", 0)}


def _window(value: int, rollout: Mapping[str, Any]) -> dict[str, Any]:
    lag = rollout.get("max_staleness_steps", 0) - rollout.get("overtake_steps", 0)
    return {"max_staleness_steps": lag + value, "overtake_steps": value}


def _skipped(value: bool, task: Mapping[str, Any]) -> dict[str, Any]:
    return {"bad_rows": "drop"} if value else {}


def _tensorboard(value: bool, metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {} if value else {"trackers": [name for name in metrics.get("trackers", ()) if name != "tensorboard"]}


RENAMED = {
    "metrics.enable_tensorboard": Renamed("metrics", ("trackers",), "job.fresh", _tensorboard),
    "task.on_unfit_rows": Renamed("task", ("bad_rows",), "task.bad_rows", lambda value, _: {"bad_rows": value}),
    "task.skip_bad_rows": Renamed("task", ("bad_rows",), "job.fresh", _skipped),
    "rollout.lag": Renamed("rollout", ("max_staleness_steps",), "rollout.max_staleness_steps", _lag),
    "rollout.window": Renamed("rollout", ("max_staleness_steps", "overtake_steps"), "rollout.overtake_steps", _window),
}
