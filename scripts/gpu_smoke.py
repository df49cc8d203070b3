#!/usr/bin/env python3
"""Run titan_rl's CUDA paths on a machine with GPUs for ten to forty minutes, and write one report to send to us.

    ./scripts/gpu_smoke                           # everything
    ./scripts/gpu_smoke --only doctor tests       # some parts
    ./scripts/gpu_smoke --device cpu              # without a GPU: tries this script itself

Every part runs in its own process within its time limit, and the next part runs also if it fails. The report
has the output of each part and the measurements of each run. It names this machine's hardware, drivers and packages;
it holds no environment variables but the few that the doctor prints.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.config.toml import load
from titan_rl.preflight.memory import needs, on_gpus
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.provenance import git_commit, versions
from titan_rl.record.summary import known_lines
from titan_rl.wire.gpus import Gpus, found_gpus

ROOT = Path(__file__).resolve().parents[1]
TAIL = 200  # lines of each part's output that the report keeps
GRACE = 30  # seconds to stop in
RUN_SECONDS = {"cpu": 180, "cuda": 480}
"""Limit of each part that is a run. A cold start on a GPU compiles vLLM's graphs and the trainers' blocks, for which
comm.init_timeout_seconds allows 300 s."""
TINY = {  # small enough for any GPU, long enough for several weight syncs, an evaluation and a checkpoint
    "cold_start.steps": 30,
    "cold_start.stop_at": 0,
    "training.steps": 6,
    "checkpoint.interval": 3,
    "rollout.groups_per_step": 32,
    "eval.size": 64,
    "hosts.gpu_memory_gb": 0,
}
STREAMED = {"rollout.max_staleness_steps": 1, "training.stream_groups": 8}
CUDA = {
    "training.mixed_precision_param": "bfloat16",
    "generator.dtype": "bfloat16",
    "generator.kv_cache_memory_mb": 1024,
    "generator.enforce_eager": "false",
}
FLOAT32 = {"training.mixed_precision_param": "float32", "generator.dtype": "float32"}
MEASURED = (
    *("time/step", "logprob_gap/mean", "logprob_gap/max", "sync/write_seconds", "sync/verify_seconds"),
    *("engine/sampling_seconds", "engine/training_seconds", "memory/max_active_gib", "memory/max_reserved_gib"),
)


@dataclass(slots=True)
class Part:
    name: str
    what: str
    command: Sequence[str]
    seconds: int  # limit
    run: Path | None = None  # folder of the run that it makes
    ended: str = "not run"
    took: float = 0.0
    output: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.ended == "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts to run, by name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "gpu_smoke")
    a = parser.parse_args()
    gpus = found_gpus()
    if a.device == "cuda" and not gpus.count:
        parser.error("expected a GPU that nvidia-smi shows, found none; --device cpu tries this script itself")
    parts = parts_for(a.device, gpus, a.folder)
    unknown = set(a.only or ()) - {part.name for part in parts}
    if unknown:
        parser.error(f"--only: expected parts of {[part.name for part in parts]}, found {sorted(unknown)}")
    a.folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if not a.only or part.name in a.only:
            print(f"gpu_smoke: {part.name}: {part.what} (at most {part.seconds} s)", flush=True)
            execute(part)
            print(f"gpu_smoke: {part.name}: {part.ended} after {part.took:.0f} s", flush=True)
    path = a.folder / "report.md"
    path.write_text(report(parts, a.device, gpus))
    print(f"gpu_smoke: the report is {path}: please attach it to an issue")
    return int(any(part.ended not in ("passed", "not run") for part in parts))


def parts_for(device: str, gpus: Gpus, folder: Path) -> list[Part]:
    python = sys.executable

    def run(name: str, what: str, config: str, keys: Mapping[str, object]) -> Part:
        dump = folder / name
        flags = {**TINY, **(CUDA if device == "cuda" else {}), **keys, "hosts.device": device, "job.dump_folder": dump}
        named = [f"--{key}={value}" for key, value in flags.items()]
        command = [python, "-m", "titan_rl.run", "--config", config, "--job.fresh", *named]
        return Part(name, what, command, RUN_SECONDS[device], dump)

    trainers = max(1, min(4, gpus.count // 2))
    apart = {
        "parallelism.data_parallel_shard_degree": trainers,
        "generator.replicas": max(1, min(4, gpus.count - trainers)),
    }
    together = {"parallelism.data_parallel_shard_degree": 1, "placement.kind": "colocated"}
    runs = [
        run("one_gpu", "the cousin of grpo_qwen3_0_6b_1gpu: colocated", "grpo_qwen3", together),
        run("float32", "the same in float32: the log-prob gap should be below 1e-4", "grpo_qwen3", together | FLOAT32),
    ]
    if gpus.count > 1 or device == "cpu":
        runs += [
            run("node", "the cousin of grpo_llama3_8b: FSDP2, replicas", "grpo_llama", apart),
            run("lag", "the same, asynchronous and streamed", "grpo_llama", apart | STREAMED),
        ]
    return [
        Part("machine", "hardware and links", ["sh", "-c", "nvidia-smi; nvidia-smi topo -m"], 60),
        Part("doctor", "this machine and its install", [python, "-m", "titan_rl", "doctor"], 120),
        Part(
            "tests",
            "kernels against their references",
            [python, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests")],
            300,
        ),
        *runs,
        Part(
            "kernels",
            "kernels against plain torch",
            [python, str(ROOT / "scripts/bench_kernels.py"), "--csv", str(folder / "kernels.csv")],
            300,
        ),
    ]


def execute(part: Part) -> None:
    """Run a part's command in its own process group, which ends with it."""
    began = time.monotonic()
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=part.seconds)
        part.ended = "passed" if process.returncode == 0 else f"failed with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            text, _ = process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
        part.ended = f"stopped by this script's limit of {part.seconds} s"
    part.took = time.monotonic() - began
    part.output = text.splitlines()[-TAIL:]


def report(parts: Sequence[Part], device: str, gpus: Gpus) -> str:
    names = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        "# titan_rl on GPUs: report of scripts/gpu_smoke",
        "",
        f"commit {git_commit(ROOT)}, device {device}, {gpus.count} GPUs of {gpus.nbytes / 2**30:.1f} GiB, "
        f"driver {gpus.driver or 'unknown'} for CUDA up to {gpus.cuda or 'unknown'}",
        "",
        names,
        "",
        "| part | what | result | seconds |",
        "|---|---|---|---|",
        *(f"| {part.name} | {part.what} | {part.ended} | {part.took:.0f} |" for part in parts),
        "",
        *figures([part for part in parts if part.run and part.ended != "not run"], gpus),
    ]
    for part in parts:
        if part.output:
            lines += [
                f"## {part.name}",
                "",
                f"`{' '.join(map(str, part.command))}`",
                "",
                "```",
                *part.output,
                "```",
                "",
            ]
    return "\n".join(lines)


def figures(parts: Sequence[Part], gpus: Gpus) -> list[str]:
    """Return a table of each run's medians over its RL steps, next to the memory that the dry run expected."""
    if not parts:
        return []
    columns = [*MEASURED, "trainer GiB by estimate"]
    rows = []
    for part in parts:
        assert part.run is not None
        steps = (
            [line for line in known_lines(part.run / "metrics.jsonl") if line["kind"] == "rl"]
            if part.run.exists()
            else []
        )
        medians = [median([line[name] for line in steps if line.get(name) is not None]) for name in MEASURED]
        rows.append(f"| {part.name} ({len(steps)} steps) | {' | '.join([*medians, estimate(part.run, gpus)])} |")
    return [f"| run | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", *rows, ""]


def median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g}" if values else "-"


def estimate(folder: Path, gpus: Gpus) -> str:
    with suppress(Exception):  # the run did not come so far, or has no GPU
        config = load(folder / "config.toml")
        shape = shape_of(config.model)
        found = needs(on_gpus(config, shape, gpus.nbytes), shape, gpus.nbytes)
        return f"{found['trainer'].nbytes / 2**30:.1f}"
    return "-"


if __name__ == "__main__":
    sys.exit(main())
