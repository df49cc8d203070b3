"""Throughput of real runs at a lag, divided by the throughput of the synchronous run of the same round."""

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.rows import Row, metric_lines, run_to_end

LONG_TAILED = Path(__file__).with_name("long_tailed.py")
WORKLOAD = {  # tuned on two cores so that a synchronous step generates for as long as it trains, about a second in all
    "model.dim": 128,
    "model.n_layers": 4,
    "cold_start.steps": 0,
    "cold_start.stop_at": 0,
    "rollout.groups_per_step": 16,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 160,
    "training.seq_len": 256,
    "training.local_batch_size": 4,
    "parallelism.data_parallel_shard_degree": 1,
    "generator.max_num_seqs": 1024,
    "generator.kv_cache_memory_mb": 512,
    "algorithm.max_dead_steps": 0,  # random weights learn nothing here
    "eval.size": 0,
    "checkpoint.enable": "false",
    "metrics.trackers": "[]",
}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "synchronous, streamed": {"training.stream_groups": 4},
    "lag 1": {"rollout.max_staleness_steps": 1},
    "lag 2": {"rollout.max_staleness_steps": 2},
    "lag 2, window 2": {"rollout.max_staleness_steps": 4, "rollout.overtake_steps": 2},
    "lag 4": {"rollout.max_staleness_steps": 4},
}
FIRST = 6  # steps until a run's initial backlog is used up and the pace is found
LAST = 5  # steps during which nothing is left to generate, at the largest lag


def overlap(repeats: int, steps: int) -> Iterator[Row]:
    """Run all modes in turn, `repeats` times. Ratios compare runs of one round."""
    measured: dict[str, dict[str, list[float]]] = {mode: {} for mode in MODES}
    for _ in range(repeats):
        found = {mode: long_tailed(keys, steps) for mode, keys in MODES.items()}
        synchronous = found["synchronous"]
        g, t = synchronous["waiting for rollouts, s"], synchronous["training, s"]
        bound = synchronous["bound: (G + T) / max(G, T)"] = (g + t) / max(g, t)
        for mode, values in found.items():
            if mode != "synchronous":
                values["throughput / synchronous"] = ratio = values["tokens / s"] / synchronous["tokens / s"]
                values["of the bound"] = ratio / bound
            for name, value in values.items():
                measured[mode].setdefault(name, []).append(value)
    names = {"waiting for rollouts, s": "generation: G, s", "training, s": "training: T, s"}
    for mode, values in measured.items():
        for name, each in values.items():
            yield Row("overlap", mode, names.get(name, name) if mode == "synchronous" else name, each)


def long_tailed(mode: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Return means over the steps of one run between FIRST and LAST."""
    keys = {**WORKLOAD, **mode, "training.steps": FIRST + steps + LAST}
    with tempfile.TemporaryDirectory() as folder:
        run_to_end(keys | {"job.dump_folder": folder}, program=[str(LONG_TAILED)])
        lines = metric_lines(Path(folder), "rl")[FIRST : FIRST + steps]

    def mean(key: str) -> float:
        return statistics.fmean(line[key] for line in lines)

    return {
        "step, s": mean("time/step"),
        "tokens / s": sum(line["tokens/trained"] for line in lines) / sum(line["time/step"] for line in lines),
        "waiting for rollouts, s": mean("time/generate"),
        "training, s": mean("time/train"),
        "weight sync in the controller's way, s": mean("time/sync"),
        "packing, scoring, messages, s": mean("time/wait"),
        "inside vLLM, s": mean("engine/sampling_seconds"),
        "inside TorchTitan, s": mean("engine/training_seconds"),
        "policy age, mean": mean("policy_age/mean"),
        "policy age, most": max(line["policy_age/max"] for line in lines),
        "groups under way": mean("inflight/groups"),
    }
