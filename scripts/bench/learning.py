"""Whole runs of shipped configs over seeds and emulated machines: where they start, how they learn, where they end."""

import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.axes import COLORS, Axes, legend, look_of, svg
from bench.rows import append_rows, metric_lines, ran_on
from titan_rl.environment import CONTROLLER_ENV
from titan_rl.record.metric_docs import EVAL_SCORE

PROMISED = 0.95  # held-out score at the end of grpo_llama
PR_SET_CHILD_SUBREAPER = 36
MEDIAN = "#c0392b"


@dataclass(frozen=True, slots=True)
class Emulated:
    """A machine as torch, oneDNN and MKL see it: it computes the same sums in another order."""

    threads: int = 1  # OpenMP threads of each rank
    env: Mapping[str, str] = field(default_factory=dict[str, str])


def emulated(aten: str, onednn: str, mkl: str, threads: int) -> Emulated:
    """Return a machine that has at most these instruction sets."""
    env = {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_CBWR": mkl}
    return Emulated(threads, env)


MACHINES = {
    "as it is": Emulated(),
    "as it is, 2 threads": Emulated(threads=2),
    "avx512": emulated("avx512", "AVX512_CORE", "AVX512", 1),
    "avx512, 2 threads": emulated("avx512", "AVX512_CORE", "AVX512", 2),
    "avx2": emulated("avx2", "AVX2", "AVX2", 1),
    "avx2, 2 threads": emulated("avx2", "AVX2", "AVX2", 2),
    "avx": emulated("default", "AVX", "AVX", 1),
    "sse4": emulated("default", "SSE41", "SSE4_2", 1),
    "sse4, 2 threads": emulated("default", "SSE41", "SSE4_2", 2),
    "avx2, compatible sums": emulated("avx2", "SSE41", "COMPATIBLE", 1),
}
"""ATEN_CPU_CAPABILITY selects torch's kernels, ONEDNN_MAX_CPU_ISA oneDNN's, MKL_CBWR the matrix products."""
MODELS = ("Muse Glimmer", "Gemma 4")
GRID = ("as it is", "avx2, 2 threads", "sse4", "avx2, compatible sums")
"""Machines whose curves differed on an AMD EPYC with AVX-512. There "avx512" gave the curve of "as it is", "avx" that
of "sse4", and a second thread changed no bit."""


def toy_folder(model: str, folder: Path) -> None:
    """Write a model of grpo_llama's sizes, with random weights and the built-in tokenizer."""
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from support import gemma4, muse_glimmer

    sizes: dict[str, Any] = {
        **{"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    }
    if model == "Muse Glimmer":
        muse_glimmer.make_model(folder, **sizes)
        return
    own = {"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    own |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True}
    gemma4.make_model(folder, gemma4.drawn(0) | sizes | own | {"final_logit_softcapping": 20.0})


def learning(
    path: Path, config: str, machines: Sequence[str], seeds: Sequence[int], rows: Sequence[Any], model: str = ""
) -> None:
    """Run the cases without a row, machine by machine, and append a row after each run. `model`: in place of the
    config's."""
    case = f"{config} as {model}" if model else config
    there = {(row["config"], row["variant"], int(row["seed"])) for row in rows}
    for seed in seeds:
        for name in machines:
            if (case, name, seed) not in there:
                row = {"config": case, "variant": name, "seed": seed} | measured(config, MACHINES[name], seed, model)
                append_rows(path, [row | ran_on()])
                print(f"{case}, {name}, seed {seed}: {row['start']} -> {row['final']}, {row['wall_s']} s", flush=True)


def measured(config: str, machine: Emulated, seed: int, model: str = "") -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        keys = {"debug.seed": seed, "hosts.threads": machine.threads, "job.dump_folder": f"{folder}/run"}
        if model:
            toy_folder(model, Path(folder, "model"))
            keys |= {"model.name": "auto", "model.hf_assets_path": f"{folder}/model"}
        command = [sys.executable, "-m", "titan_rl.run", "--config", config]
        command += [part for key, value in keys.items() for part in (f"--{key}", str(value))]
        env = {**CONTROLLER_ENV, **os.environ, **machine.env, "OMP_NUM_THREADS": str(machine.threads)}
        began = time.monotonic()
        cpu = run_counted(command, env)
        wall = time.monotonic() - began
        lines = metric_lines(Path(folder, "run"), "cold_start", "eval", "rl", "fit")
        summary = json.loads(Path(folder, "run/summary.json").read_text())
    scored = [line for line in lines if EVAL_SCORE in line and line["kind"] != "cold_start"]
    curve = {line["step"]: f"{line[EVAL_SCORE]:.4f}" for line in scored}
    return {
        "threads": machine.threads,
        "start": curve[0],
        "final": curve[summary["steps"]],
        "curve": " ".join(f"{step}:{score}" for step, score in curve.items()),
        "cold_start_steps": sum(line["kind"] == "cold_start" and "loss" in line for line in lines),
        "wall_s": f"{wall:.1f}",
        "cpu_s": f"{cpu:.1f}",
    }


def run_counted(command: Sequence[str], env: Mapping[str, str]) -> float:
    """Run `command`. Return the CPU seconds of all its processes, including processes that outlive their parents."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become ours, and so do their seconds
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def curve_of(row: Mapping[str, str]) -> dict[int, float]:
    return {int(step): float(score) for step, score in (point.split(":") for point in row["curve"].split())}


def summary(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield one line per config: the range of its starts and ends, and how many runs improved."""
    for config in dict.fromkeys(row["config"] for row in rows):
        own = [row for row in rows if row["config"] == config]
        starts, finals = ([float(row[key]) for row in own] for key in ("start", "final"))
        improved = sum(final > start for start, final in zip(starts, finals, strict=True))
        distinct = len({(row["seed"], row["curve"]) for row in own})
        seconds = [statistics.median(float(row[key]) for row in own) for key in ("wall_s", "cpu_s")]
        yield (
            f"{config}: {len(own)} runs with {distinct} different curves, "
            f"{spread(starts)} -> {spread(finals)}, {improved} improved, "
            f"{sum(final >= PROMISED for final in finals)} ended at {PROMISED} or more; "
            f"median wall {seconds[0]:.0f} s, CPU {seconds[1]:.0f} s"
        )


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def plot(rows: Sequence[Mapping[str, str]], config: str) -> str:
    """Draw the curve of every run of a config, in the color of its machine, and the median of all as a thick line."""
    own = [(row["variant"], curve_of(row)) for row in rows if row["config"] == config]
    steps = sorted(own[0][1])
    medians = {step: statistics.median(curve[step] for _, curve in own) for step in steps}
    lowest = min(score for _, curve in own for score in curve.values())
    axes = Axes(most=max(steps), floor=int(lowest * 10) / 10)
    drawn = axes.grid(f"{config}: held-out score by step, {len(own)} runs", "step")
    color = dict(zip(dict.fromkeys(variant for variant, _ in own), COLORS * 9, strict=False))
    drawn += [axes.line(curve, look_of(color[variant], width=1)) for variant, curve in own]
    drawn.append(axes.line(medians, look_of(MEDIAN, width=4)))
    for place, (variant, shade) in enumerate({**color, "median": MEDIAN}.items()):
        drawn += legend(place, variant, look_of(shade, width=4 if shade == MEDIAN else 2))
    return svg(drawn)
