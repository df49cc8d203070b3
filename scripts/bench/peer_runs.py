"""Runs of titan_rl and of TorchTitan's RL loop on the task of peer_shapes.py, measured from outside."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import psutil

from bench.peak_memory import WAIT_FACTOR, memory_of
from bench.peer_shapes import LR, SHAPES
from bench.rows import metric_lines, run_command
from bench.startup import cpu_seconds
from titan_rl.actors.vllm import launch_env, vllm_cpu
from titan_rl.environment import CONTROLLER_ENV
from titan_rl.text import tokenizer

OURS, PEER = "titan_rl", "TorchTitan"
WAYS = (OURS, PEER)
SCRIPTS = Path(__file__).resolve().parents[1]
LOOP_FILE = Path("torchtitan/experiments/rl/train.py")
ATTENTION = Path("torchtitan/overrides/varlen_sdpa.py")  # docs/upstream/rl-on-cpu adds it
PROBE = "import renderers, torchstore, torchtitan.models.qwen3, torchtitan.experiments.rl.controller"
PROBE_SECONDS = 300
MOST_SECONDS, POLL_SECONDS = 5400, 0.5
PLAIN = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
QUESTIONS = 4000
WEIGHTS = ("trainer_push_model_state_dict", "generator_pull_model_state_dict")
SPANS = (*WEIGHTS, "wait_for_training_batch", "forward_backward", "optim_step", "train_step")
PARTS = ("rollouts", "training", "sync")


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. `ended` is seconds since the epoch; the parts are seconds."""

    step: int
    ended: float
    rollouts: float = 0.0
    training: float = 0.0
    sync: float = 0.0


@dataclass(frozen=True, slots=True)
class Launch:
    command: list[str]
    env: dict[str, str]
    codes: tuple[int, ...] = (0,)

    def run(self, log: Path) -> "Observed":
        """Run to the end, and observe all processes meanwhile."""
        seen, ends = Observed(), time.monotonic() + MOST_SECONDS
        with log.open("wb") as out, subprocess.Popen(self.command, env=self.env, stdout=out, stderr=out) as process:
            while process.poll() is None:
                if time.monotonic() > ends:
                    process.kill()
                    raise TimeoutError(f"{' '.join(self.command)} took more than {MOST_SECONDS} seconds")
                seen.look(process.pid)
                time.sleep(POLL_SECONDS)
        if process.returncode not in self.codes:
            raise RuntimeError(f"{self.command} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        return seen


@dataclass
class Observed:
    """Samples of a run's processes: the most memory in bytes, and CPU seconds by time."""

    peak: int = 0
    cpu: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    next_memory: float = 0.0

    def look(self, pid: int) -> None:
        with suppress(psutil.Error):
            self.cpu.append((time.time(), cpu_seconds(pid)))
        if (began := time.monotonic()) >= self.next_memory:
            self.peak = max(self.peak, memory_of(pid))
            self.next_memory = time.monotonic() + WAIT_FACTOR * (time.monotonic() - began)

    def cpu_at(self, moment: float) -> float:
        """Return the CPU seconds used until a moment, between two samples in proportion."""
        place = bisect(self.cpu, (moment, 0.0))
        (a, low), (b, high) = self.cpu[max(0, place - 1)], self.cpu[min(place, len(self.cpu) - 1)]
        return low if a == b else low + (high - low) * (moment - a) / (b - a)


def refusal(checkout: Path | None) -> str:
    """Return why a checkout's loop cannot run here, or an empty text."""
    if checkout is None:
        return "expected --torchtitan PATH, a checkout of TorchTitan, found none"
    for file, reason in (
        (LOOP_FILE, "no checkout of TorchTitan with its RL loop"),
        (ATTENTION, "docs/upstream/rl-on-cpu is not applied"),
    ):
        if not (checkout / file).exists():
            return f"--torchtitan: {reason}: {checkout / file} does not exist"
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE], env=peer_env(checkout), capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"--torchtitan: importing the loop of {checkout} took more than {PROBE_SECONDS} s"
    if probe.returncode:
        error = (probe.stderr.strip().splitlines() or ["no error"])[-1]
        return f"--torchtitan: the loop of {checkout} cannot be imported: {error}"
    return ""


def peer_env(checkout: Path) -> dict[str, str]:
    """Return the environment of TorchTitan's processes. What they need besides may be on PYTHONPATH."""
    places = [str(checkout), str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **launch_env.ENV, **vllm_cpu.ENV, "PYTHONPATH": os.pathsep.join(places)}


def write_assets(folder: Path, name: str) -> None:
    """Write what both loops read: a tokenizer without a chat format, and the questions."""
    tokenizer.build(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": PLAIN}))
    rows = [json.dumps({"question": each, "answer": ""}) for each in islice(SHAPES[name].questions(0), QUESTIONS)]
    (folder / "questions.jsonl").write_text("\n".join(rows) + "\n")


def launch(way: str, name: str, assets: Path, dump: Path, checkout: Path, steps: int, save_every: int = 0) -> Launch:
    """Return the command that trains `steps` steps. It continues from the last checkpoint in `dump`, if there is one.
    `save_every` 0: without checkpoints."""
    shape = SHAPES[name]
    threads = {"OMP_NUM_THREADS": str(shape.threads), "HF_HUB_OFFLINE": "1"}
    if way == OURS:
        env = {**CONTROLLER_ENV, **os.environ, **threads, "PYTHONPATH": f"{SCRIPTS.parent}{os.pathsep}{SCRIPTS}"}
        return Launch(run_command(our_keys(name, assets, steps, save_every) | {"job.dump_folder": dump}), env)
    # With Monarch 0.7 the controller aborts while Python exits, after a run that finished.
    command = [sys.executable, "-m", "torchtitan.experiments.rl.train", "--module", "bench.torchtitan_peer"]
    command += ["--config", name, "--dump_folder", str(dump), "--async_loop.num_training_steps", str(steps)]
    if save_every:
        command += ["--trainer.checkpoint.enable", "--trainer.checkpoint.interval", str(save_every)]
    return Launch(command, {**peer_env(checkout), **threads, "PEER_ASSETS": str(assets)}, codes=(0, -signal.SIGABRT))


def our_keys(name: str, assets: Path, steps: int, save_every: int) -> dict[str, Any]:
    """Return what differs from grpo_llama."""
    shape = SHAPES[name]
    return {
        "task.name": "jsonl",
        "task.path": assets / "questions.jsonl",
        "task.reward": "bench.peer_shapes:reward",
        "model.name": "qwen3",
        "model.dim": shape.model.dim,
        "model.n_layers": shape.model.n_layers,
        "model.n_heads": shape.model.n_heads,
        "model.n_kv_heads": shape.model.n_kv_heads,
        "model.hidden_dim": shape.model.hidden_dim,
        "model.vocab_size": shape.model.vocab_size,
        "model.enable_weight_tying": str(shape.tied).lower(),
        "model.initializer_range": 0.02,
        "cold_start.steps": 0,
        "cold_start.stop_at": 0,
        "rollout.groups_per_step": shape.groups,
        "rollout.group_size": shape.group_size,
        "rollout.max_new_tokens": shape.new_tokens,
        "algorithm.entropy_coef": 0,
        "algorithm.max_dead_steps": 0,
        "training.steps": steps,
        "optimizer.lr": LR,
        "optimizer.beta2": 0.95,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0,
        "parallelism.data_parallel_shard_degree": 1,
        "generator.max_num_seqs": shape.samples,
        "hosts.threads": shape.threads,
        "eval.size": 0,
        **({"checkpoint.interval": save_every} if save_every else {"checkpoint.enable": "false"}),
    }


def steps_of(way: str, dump: Path) -> list[Step]:
    """Return the steps that a run has finished, in the order in which it finished them."""
    return our_steps(dump) if way == OURS else peer_steps(dump)


def our_steps(dump: Path) -> list[Step]:
    if not (dump / "metrics.jsonl").exists():
        return []
    return [
        Step(line["step"], line["time"], line["time/generate"], line["time/train"], line["sync/seconds"])
        for line in metric_lines(dump, "rl")
    ]


def peer_steps(dump: Path) -> list[Step]:
    """Read the spans that TorchTitan's controller writes. It waits for the weights together with the rollouts: the
    seconds of their transfer are subtracted."""
    steps = list[Step]()
    seconds = dict[str, float]()
    for line in peer_trace(dump, "rl_controller", SPANS):
        span, _, kind = line["log_type_name"].rpartition("_")
        if (span, kind) == ("train_step", "error"):
            seconds["failed"] = 1.0  # its end follows
        if kind != "end":
            continue
        seconds[span] = seconds.get(span, 0.0) + line["value"] / 1000
        if span == "train_step":
            sync = sum(seconds.get(each, 0.0) for each in WEIGHTS)
            waited = seconds.get("wait_for_training_batch", 0.0)
            training = seconds.get("forward_backward", 0.0) + seconds.get("optim_step", 0.0)
            if "failed" not in seconds:
                steps.append(Step(line["step"], line["time_us"] / 1e6, waited - sync, training, sync))
            seconds.clear()
    return steps


def peer_trace(dump: Path, source: str, spans: Sequence[str]) -> list[dict[str, Any]]:
    """Return a role's records of these spans, oldest first. A line that is being written is left out."""
    found = list[dict[str, Any]]()
    for file in dump.rglob(f"{source}.*.jsonl"):
        with file.open() as lines:  # hundreds of megabytes, if the loop repeats failing rollouts
            wanted = (line for line in lines if line.endswith("\n") and any(f'"{span}_' in line for span in spans))
            found += map(json.loads, wanted)
    return sorted(found, key=lambda line: line["time_us"])


def timed(way: str, name: str, checkout: Path, folder: Path) -> dict[str, float]:
    """Run a shape to its end. Return seconds and the peak memory of all processes."""
    shape, dump = SHAPES[name], folder / "run"
    write_assets(folder / "assets", name)
    start = launch(way, name, folder / "assets", dump, checkout, shape.steps)
    began = time.time()
    seen = start.run(folder / "log")
    all_in = time.time() - began
    steps = steps_of(way, dump)
    if [step.step for step in steps] != list(range(1, shape.steps + 1)):
        raise ValueError(f"{way}, {name}: expected {shape.steps} steps, found {[step.step for step in steps]}")
    return {
        "step, s": statistics.median(b.ended - a.ended for a, b in pairwise(steps[shape.warm_up - 1 :])),
        **{f"{part}, s": statistics.median(getattr(step, part) for step in steps[shape.warm_up :]) for part in PARTS},
        "CPU seconds of a step": (seen.cpu_at(steps[-1].ended) - seen.cpu_at(steps[shape.warm_up - 1].ended))
        / (shape.steps - shape.warm_up),
        "command to first step, s": steps[0].ended - began,
        "command to first step, CPU s": seen.cpu_at(steps[0].ended),
        f"command to end, {shape.steps} steps, s": all_in,
        "memory at the peak, GiB": seen.peak / 2**30,
    }


def with_env(start: Launch, more: Mapping[str, str]) -> Launch:
    return replace(start, env={**start.env, **more})


def temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="peer-")
