#!/usr/bin/env python3
"""What it brings, and costs, that rollouts lag behind: time, room, cached prefixes, learning. Appends rows to CSVs.

    .venv/bin/python scripts/bench_async.py overlap              # about 15 minutes
    .venv/bin/python scripts/bench_async.py capacity             # about 7 minutes
    .venv/bin/python scripts/bench_async.py prefix               # about 1 minute
    .venv/bin/python scripts/bench_async.py learning             # about 25 minutes; goes on where it was stopped

overlap    real runs, one trainer process and one engine, of rollouts whose lengths have a long tail: throughput at a
           lag over that of the synchronous run of the same round. Were generation (G) and training (T) as long as
           they are there, and perfectly beside each other, it would be (G + T) / max(G, T): the bound
capacity   the real stream and generator mesh over processes that answer after a timer, with no model: what a rollout
           costs the controller, how much later than its timer it arrives, whether memory grows
prefix     one engine with the prefix cache beside one without, in turn: a group's samples of one long prompt, and a
           second turn whose prompts go on where the first turn's samples ended
learning   held-out score by samples seen, at lags with and without a correction, from equal cold starts; and a plot
"""

import argparse
import asyncio
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from monarch.actor import Actor, ProcMesh, concurrent_endpoint, this_host
from rich.console import Console
from rich.table import Table

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import ENV, Done, EngineReport, EngineSettings
from titan_rl.actors.vllm.generator import News, drain
from titan_rl.config import sections as c
from titan_rl.config.toml import find, load
from titan_rl.environment import CONTROLLER_ENV
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.healing import GeneratorPolicy
from titan_rl.meshes.replica import Replica
from titan_rl.meshes.spawn import spawn
from titan_rl.preflight.setup import write_model_folder
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.ledger import Ledger
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.record.provenance import git_commit, machine, versions
from titan_rl.rollout.judges import by_rule
from titan_rl.rollout.sampling import StreamSettings
from titan_rl.rollout.stream import RolloutStream
from titan_rl.tasks import tokenizer as characters
from titan_rl.tasks.prompts import PromptSource
from titan_rl.tasks.rewards import reward_for
from titan_rl.tasks.task import load_task
from titan_rl.tasks.tokenizer import TextTokenizer
from titan_rl.wire.clock import Clock
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Completion, Generates, ReaderCost, Request, Sampling

HERE = Path(__file__).resolve().parents[1]
BENCHMARKS = HERE / "docs" / "benchmarks"
SECONDS = 300.0  # a deadline: nothing here should take so long


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    case: str
    measure: str
    values: Sequence[float]
    note: str = ""


def main() -> None:
    if sys.argv[1:2] == ["drive"]:  # a run of `overlap`, in a process of its own
        drive(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    part = {name: parts.add_parser(name) for name in ("overlap", "capacity", "prefix", "learning")}
    for name, repeats in (("overlap", 3), ("prefix", 7)):
        part[name].add_argument("--repeats", type=int, default=repeats)
    for name in ("overlap", "capacity", "prefix"):
        part[name].add_argument("--csv", type=Path, default=BENCHMARKS / "async.csv")
    part["overlap"].add_argument("--steps", type=int, default=15, help="that count, of each run")
    part["overlap"].add_argument("--modes", nargs="+", choices=list(MODES)[1:], default=list(MODES)[1:])
    part["overlap"].add_argument("--set", action="append", default=[], help="a flag of the runs: --set=--model.dim=64")
    part["capacity"].add_argument("--steps", type=int, default=100)
    part["capacity"].add_argument("--rollouts", type=int, default=1600, help="admitted at a time")
    part["capacity"].add_argument("--seconds", type=float, default=2.0, help="that a rollout takes, on average")
    part["learning"].add_argument("--csv", type=Path, default=BENCHMARKS / "learning_by_lag.csv")
    part["learning"].add_argument("--svg", type=Path, default=BENCHMARKS / "learning_by_lag.svg")
    part["learning"].add_argument("--folder", type=Path, default=HERE / "outputs" / "learning_by_lag")
    part["learning"].add_argument("--seeds", type=int, default=3)
    part["learning"].add_argument("--steps", type=int, default=60)
    part["learning"].add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4])
    part["learning"].add_argument("--plot", action="store_true", help="only draw what the CSV holds")
    a = parser.parse_args()
    if a.part == "overlap":
        report(a.csv, overlap(a.modes, a.repeats, a.steps, a.set))
    elif a.part == "capacity":
        for group_size in (1, 10):
            report(a.csv, asyncio.run(capacity(a.rollouts, group_size, a.steps, a.seconds)))
    elif a.part == "prefix":
        report(a.csv, asyncio.run(prefix(a.repeats)))
    else:
        if not a.plot:
            learning(a.csv, a.folder, a.seeds, a.steps, a.lags)
        a.svg.write_text(plot(a.csv))


# ------------------------------------------------------------------------------------------------------------- overlap

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
    "algorithm.max_dead_steps": 0,  # nobody learns anything here
    "eval.size": 0,
    "checkpoint.enable": "false",
    "metrics.enable_tensorboard": "false",
    "metrics.timeline": "false",
}
MEDIAN, SIGMA = 40, 0.8  # tokens; of a lognormal that is truncated at rollout.max_new_tokens
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "synchronous, streamed": {"training.stream_groups": 4},
    "lag 1": {"rollout.lag": 1},
    "lag 2": {"rollout.lag": 2},
    "lag 2, window 2": {"rollout.lag": 2, "rollout.window": 2},
    "lag 4": {"rollout.lag": 4},
    "lag 4, not paced": {"rollout.lag": 4, "rollout.pace": "false"},
}
FIRST = 6  # steps until the backlog with which a run begins is used up, and the pace is found
LAST = 5  # steps beside which nothing is left to generate, at the largest lag


class LongTailed:
    """Generators that end a sample where its drawn length says, not where a stop token does. A request has one length,
    so a group becomes as many requests as it has samples; they enter the engine in one tick, as the group would."""

    def __init__(self, generators: GeneratorMesh) -> None:
        self._generators = generators

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generators, name)

    async def generate(self, request: Request) -> list[Completion]:
        parts = []
        for k, seed in enumerate(request.seeds):
            length = drawn_length(request.id, k, request.sampling.max_new_tokens)
            sampling = replace(request.sampling, max_new_tokens=length, stop_token_ids=())
            parts.append(replace(request, id=f"{request.id}/{k}", seeds=[seed], sampling=sampling))
        return [sample for (sample,) in await asyncio.gather(*map(self._generators.generate, parts))]


def drawn_length(request: str, sample: int, most: int) -> int:
    """The same for a sample in every run, at every lag."""
    draws = random.Random(derive(0, "length", request, sample))
    while True:
        if 1 <= (length := round(draws.lognormvariate(np.log(MEDIAN), SIGMA))) <= most:
            return length


def drive(flags: Sequence[str]) -> None:
    """titan_rl.run, whose controller is given long-tailed generators."""
    from titan_rl import run, session

    real = session.launch

    @asynccontextmanager
    async def launch(*arguments: Any) -> AsyncIterator[Any]:
        async with real(*arguments) as (meshes, watch):
            assert meshes.generators is not None
            generators: Any = LongTailed(meshes.generators)
            yield replace(meshes, generators=generators), watch

    session.launch = launch
    code = run.main(flags)
    sys.stdout.flush()
    os._exit(code)


def overlap(modes: Sequence[str], repeats: int, steps: int, more: Sequence[str]) -> Iterator[Row]:
    """Rounds of all modes in turn; what is compared is of one round."""
    measured: dict[str, dict[str, list[float]]] = {mode: {} for mode in ("synchronous", *modes)}
    for _ in range(repeats):
        found = {mode: long_tailed(MODES[mode], steps, more) for mode in measured}
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


def long_tailed(mode: Mapping[str, Any], steps: int, more: Sequence[str]) -> dict[str, float]:
    """Means over the steps of one run that count."""
    keys = {**WORKLOAD, **mode, "training.steps": FIRST + steps + LAST}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--config", "grpo_llama", *flagged(keys), "--job.dump_folder", folder, *more]
        lines = metrics_of([str(Path(__file__)), "drive", *flags], Path(folder), "rl")[FIRST : FIRST + steps]

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


# ------------------------------------------------------------------------------------------------------------ capacity

PROCS, LAG = 4, 1
TOKENS = 64  # of a rollout
SETTLED = 10  # steps
SPREAD = 0.5  # timers differ by at most this share of the average


def timer(seed: int, seconds: float) -> float:
    return seconds * random.Random(seed).uniform(1 - SPREAD, 1 + SPREAD)


class Timer(Actor):
    """A generator rank without an engine: a request is answered after its timer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._version = 0
        self._done: asyncio.Queue[Done] = asyncio.Queue()
        self._over = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    @concurrent_endpoint
    async def start(self) -> None: ...

    @concurrent_endpoint
    async def watch(self) -> None:
        await self._over.wait()

    @concurrent_endpoint
    async def submit(self, requests: list[Request]) -> None:
        for request in requests:
            task = asyncio.create_task(self._answer(request, self._version))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    @concurrent_endpoint
    async def take(self, within: float | None = None) -> News:
        return News(await drain(self._done, within), EngineReport())

    @concurrent_endpoint
    async def fetch_weights(self, manifests: list[Any], timeout: float) -> ReaderCost:
        return ReaderCost()

    @concurrent_endpoint
    async def switch(self, version: int, timeout: float) -> ReaderCost:
        self._version = version
        return ReaderCost()

    @concurrent_endpoint
    async def close(self) -> None:
        self._over.set()

    async def _answer(self, request: Request, version: int) -> None:
        await asyncio.sleep(timer(request.seeds[0], self._seconds))
        samples = [
            Completion([8 + k % 2] * TOKENS, [-0.5] * TOKENS, [version] * TOKENS, "length")
            for k in range(len(request.seeds))
        ]
        self._done.put_nowait(Done(request.id, samples))


class Timers:
    """Processes in which a replica's actor is a timer."""

    def __init__(self, procs: ProcMesh, seconds: float) -> None:
        self._procs, self._seconds = procs, seconds

    def spawn(self, name: str, *_: object) -> Timer:
        return self._procs.spawn(name, Timer, self._seconds)

    def stop(self) -> Any:
        return self._procs.stop()


class Stopwatch:
    """How much later than its timer each request is answered."""

    def __init__(self, generators: Generates, seconds: float) -> None:
        self._generators, self._seconds = generators, seconds
        self.late = array("d")  # eight bytes each: it must not look as if memory grew

    async def generate(self, request: Request) -> list[Completion]:
        began = time.perf_counter()
        samples = await self._generators.generate(request)
        self.late.append(time.perf_counter() - began - timer(request.seeds[0], self._seconds))
        return samples


async def capacity(rollouts: int, group_size: int, steps: int, seconds: float) -> list[Row]:
    """A step takes a step's worth of groups, gives the processes a new version, and admits as many anew."""
    groups = rollouts // group_size // (LAG + 1)
    settings = EngineSettings(model_dir="", max_model_len=0)
    replicas = []
    for i in range(PROCS):
        timers: Any = Timers(spawn(this_host(), name=f"timer{i}", shape={"tp": 1}), seconds)
        replicas.append(Replica(i, f"timer{i}", timers, settings))
    mesh = GeneratorMesh(replicas, GeneratorPolicy(init_seconds=SECONDS, seconds=SECONDS))
    await mesh.start()
    stopwatch = Stopwatch(mesh, seconds)
    folder = tempfile.TemporaryDirectory()
    characters.build(Path(folder.name))
    tokenizer = TextTokenizer.load(Path(folder.name))
    settings = StreamSettings(
        algorithm=c.AlgorithmSection(),
        rollout=c.RolloutSection(groups_per_step=groups, group_size=group_size, lag=LAG),
        sampling=Sampling(TOKENS),
        seed=0,
        first=1,
        groups=groups * steps,
    )
    stream = RolloutStream(
        settings,
        stopwatch,
        PromptSource(load_task(c.TaskSection(), seed=0, eval_size=0), tokenizer, seed=0),
        by_rule(reward_for("exact")),
        tokenizer.decode,
        Clock(),
        Ledger(Path(folder.name)),
    )
    cpu, wall, settled = 0.0, 0.0, 0
    resident = dict.fromkeys((SETTLED, (SETTLED + steps - LAG) // 2, steps - LAG), 0.0)  # by step; as much under way
    try:
        async with aclosing(stream):
            stream.admit(groups * (LAG + 1))
            for step in range(1, steps + 1):
                stream.trained(step, await stream.take(groups, step))
                await mesh.pull(step)
                stream.admit(groups)
                if step == SETTLED:
                    cpu, wall, settled = time.process_time(), time.perf_counter(), len(stopwatch.late)
                if step in resident:
                    resident[step] = rss()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            answered = group_size * (len(stopwatch.late) - settled)
    finally:
        await mesh.close()
        await mesh.stop()
        folder.cleanup()
    late = 1e3 * np.percentile(stopwatch.late[settled:], [50, 99, 100])
    case = f"{rollouts} rollouts admitted, groups of {group_size}, {PROCS} processes"
    measured = {
        "rollouts whose timer runs, mean": answered / wall * seconds,  # Little's law; the others wait for their step
        "controller: CPU ms a rollout": 1e3 * cpu / answered,
        "controller: share of a core": cpu / wall,
        "rollouts / s": answered / wall,
        "answered later than its timer: median, ms": late[0],
        "answered later than its timer: p99, ms": late[1],
        "answered later than its timer: most, ms": late[2],
        **{f"controller: resident after step {step}, MB": megabytes for step, megabytes in resident.items()},
    }
    note = f"{steps} steps of {groups} groups, {seconds:g} s a rollout, give or take half"
    return [Row("capacity", case, measure, [value], note) for measure, value in measured.items()]


def rss() -> float:
    """Megabytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# -------------------------------------------------------------------------------------------------------------- prefix

PROMPT, GROUPS, SAMPLES, NEW, TOOL = 512, 2, 16, 32, 32  # tokens, but for the two counts


async def prefix(repeats: int) -> list[Row]:
    seconds: dict[tuple[str, bool], list[float]] = {}
    hits: dict[tuple[str, bool], list[float]] = {}
    shape = shape_of(c.ModelSection())
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(Path(folder), shape)
        engines = {cached: await engine(folder, cached) for cached in (True, False)}
        try:
            for i in range(1 + repeats):  # the first warms up
                for cached in (True, False) if i % 2 else (False, True):
                    for turn, took, hit in await two_turns(engines[cached], i, shape.vocab_size):
                        if i:
                            seconds.setdefault((turn, cached), []).append(took)
                            hits.setdefault((turn, cached), []).append(hit)
        finally:
            for mesh in engines.values():
                await mesh.close()
                await mesh.stop()
    rows = []
    note = f"{GROUPS} groups of {SAMPLES}, {NEW} new tokens a sample, {shape.parameters / 1e6:.1f}M parameters"
    for turn in dict.fromkeys(turn for turn, _ in seconds):
        on, off = seconds[turn, True], seconds[turn, False]
        rows += [
            Row("prefix", turn, "with the cache, s", on, note),
            Row("prefix", turn, "without, s", off, note),
            Row("prefix", turn, "without / with", [b / a for a, b in zip(on, off, strict=True)], note),
            Row("prefix", turn, "hit rate", hits[turn, True], note),
        ]
        if any(hits[turn, False]):
            raise RuntimeError(f"expected no hits without a cache, found {hits[turn, False]}")
    return rows


async def engine(folder: str, cached: bool) -> GeneratorMesh:
    """One engine with random weights, which a pull of nothing makes it serve."""
    name = "cached" if cached else "plain"
    settings = EngineSettings(
        model_dir=folder, max_model_len=1024, kv_cache_memory_mb=512, enable_prefix_caching=cached
    )
    procs = spawn(this_host(), name=name, shape={"tp": 1}, env={**ENV, **vllm_cpu.ENV, "CUDA_VISIBLE_DEVICES": ""})
    mesh = GeneratorMesh([Replica(0, name, procs, settings)], GeneratorPolicy(init_seconds=SECONDS, seconds=SECONDS))
    await mesh.start()
    await mesh.connect([[]])
    await mesh.pull(0)
    return mesh


async def two_turns(mesh: GeneratorMesh, repeat: int, vocab_size: int) -> list[tuple[str, float, float]]:
    """Groups of one prompt each; then what a tool answered to each sample, and the sample goes on: seconds, hit rate.
    Both engines are given the same, and nothing of an earlier repeat."""
    draws = random.Random(repeat)

    def tokens(n: int) -> list[int]:
        return draws.choices(range(vocab_size), k=n)

    async def timed(requests: Sequence[Request]) -> tuple[list[list[Completion]], float, float]:
        (before,) = await mesh.stats()
        began = time.perf_counter()
        answers = await asyncio.gather(*map(mesh.generate, requests))
        took = time.perf_counter() - began
        (after,) = await mesh.stats()
        return answers, took, after.since(before).hit_rate

    first = [Request(f"first{g}", tokens(PROMPT), list(range(SAMPLES)), Sampling(NEW)) for g in range(GROUPS)]
    answers, took, hit = await timed(first)
    found = [(f"first turn: prompts of {PROMPT}", took, hit)]
    second = [
        Request(f"second{g}/{k}", [*request.tokens, *sample.tokens, *tokens(TOOL)], [k], Sampling(NEW))
        for g, (request, samples) in enumerate(zip(first, answers, strict=True))
        for k, sample in enumerate(samples)
    ]
    _, took, hit = await timed(second)
    return [*found, (f"second turn: prompts of {PROMPT} + {NEW} + {TOOL}", took, hit)]


# ------------------------------------------------------------------------------------------------------------ learning

CONFIG = "grpo_llama"
LOOK = 5  # steps
UNCORRECTED = {"algorithm.proximal": "trainer", "algorithm.correction": "none"}
Key = tuple[int, int, str]  # seed, lag, correction


def learning(path: Path, folder: Path, seeds: int, steps: int, lags: Sequence[int]) -> None:
    """The curves that the CSV does not hold to their end. Nothing is paced: tokens are as old as a lag lets them be."""
    for (seed, lag, correction), keys in missing(read(path), seeds, steps, lags).items():
        began = time.monotonic()
        curve = learnt(cold_started(folder / f"seed{seed}", seed), seed, steps, keys)
        common = {"seed": seed, "lag": lag, "correction": correction}
        append(path, [common | point | ran_on() for point in curve])
        took, last = time.monotonic() - began, curve[-1]["score"]
        print(f"seed {seed}, lag {lag}, correction {correction}: {last} after {steps} steps, {took:.0f} s", flush=True)


def missing(
    rows: Sequence[Mapping[str, str]], seeds: int, steps: int, lags: Sequence[int]
) -> dict[Key, dict[str, Any]]:
    """With the keys of each run. Where nothing lags there is nothing to correct."""
    there = {(int(row["seed"]), int(row["lag"]), row["correction"]) for row in rows if int(row["step"]) == steps}
    found: dict[Key, dict[str, Any]] = {}
    for seed in range(seeds):
        for lag in lags:
            keys = {"rollout.lag": lag, "rollout.pace": "false"}
            if lag:
                found[seed, lag, "default"] = keys
            found[seed, lag, "none"] = keys | (UNCORRECTED if lag else {})
    return {key: keys for key, keys in found.items() if key not in there}


def cold_started(folder: Path, seed: int) -> Path:
    """The Hugging Face folder that every run of a seed begins with. A finished run is not made again."""
    flags = flagged({"training.steps": 0, "debug.seed": seed, "job.dump_folder": folder})
    metrics_of(["-m", "titan_rl.run", "--config", CONFIG, *flags], folder, "cold_start")
    return folder / "hf"


def learnt(start: Path, seed: int, steps: int, keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "model.hf_assets_path": start,
            "cold_start.steps": 0,
            "training.steps": steps,
            "eval.interval": LOOK,
            "debug.seed": seed,
            "job.dump_folder": folder,
            "checkpoint.enable": "false",
            "metrics.enable_tensorboard": "false",
            **keys,
        }
        lines = metrics_of(["-m", "titan_rl.run", "--config", CONFIG, *flagged(keys)], Path(folder), "eval", "rl")
    groups = load(find(CONFIG), []).rollout
    return [
        {
            "step": line["step"],
            "samples": line["step"] * groups.groups_per_step * groups.group_size,
            "score": f"{line[EVAL_SCORE]:.4f}",
            "reward": f"{line['reward/mean']:.4f}" if "reward/mean" in line else "",
            "policy_age": f"{line['policy_age/mean']:.2f}" if "policy_age/mean" in line else "",
        }
        for line in lines
        if EVAL_SCORE in line
    ]


WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 780, 420, 60, 40, 190, 50
COLORS = ("#7f7f7f", "#2f7ed8", "#d9822b", "#c23b80", "#2e9e6b", "#8a63d2")  # readable on white and on black


def plot(path: Path) -> str:
    """Mean score over the seeds, by samples; a dashed line has no correction."""
    scores: dict[tuple[int, str], dict[int, list[float]]] = {}
    for row in read(path):
        line = scores.setdefault((int(row["lag"]), row["correction"]), {})
        line.setdefault(int(row["samples"]), []).append(float(row["score"]))
    lines = {key: {x: statistics.fmean(ys) for x, ys in points.items()} for key, points in sorted(scores.items())}
    most = max(x for points in lines.values() for x in points) or 1
    least = min(y for points in lines.values() for y in points.values())
    floor = max(0.0, int(least * 10) / 10)
    color = dict(zip(sorted({lag for lag, _ in lines}), COLORS, strict=False))

    def x_of(samples: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * samples / most

    def y_of(score: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (score - floor) / (1 - floor)

    repeats = max(len(ys) for points in scores.values() for ys in points.values())
    drawn = [text(LEFT, TOP - 16, f"Held-out score by samples seen, mean of {repeats} seeds", "title")]
    for tenth in range(round(floor * 10), 11):
        y = y_of(tenth / 10)
        drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        drawn.append(text(LEFT - 8, y + 4, f"{tenth / 10:.1f}", "end"))
    for quarter in range(5):
        samples = most * quarter / 4
        drawn.append(text(x_of(samples), HEIGHT - BOTTOM + 18, f"{samples:,.0f}", "middle"))
    drawn.append(text(x_of(most / 2), HEIGHT - 10, "samples", "middle"))
    for place, ((lag, correction), points) in enumerate(lines.items()):
        line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in sorted(points.items()))
        dashed = ' stroke-dasharray="5 4"' if lag and correction == "none" else ""
        look = f'fill="none" stroke="{color[lag]}" stroke-width="2"{dashed}'
        x, y = WIDTH - RIGHT + 16, TOP + 20 * place
        drawn.append(f'<polyline points="{line}" {look}/>')
        drawn.append(f'<path d="M{x} {y}h24" {look}/>')
        drawn.append(text(x + 32, y + 4, f"lag {lag}" + (", uncorrected" if dashed else ""), ""))
    style = (
        "text{font:13px sans-serif;fill:#333}.title{font-weight:bold}.end{text-anchor:end}"
        ".middle{text-anchor:middle}.grid{stroke:#8886}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    return "\n".join([head, f"<style>{style}</style>", *drawn, "</svg>\n"])


def text(x: float, y: float, words: str, look: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{look}">{words}</text>'


# ---------------------------------------------------------------------------------------------------- runs and reports


def flagged(keys: Mapping[str, Any]) -> list[str]:
    return [part for key, value in keys.items() for part in (f"--{key}", str(value))]


def metrics_of(command: Sequence[str], folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Runs it to its end; answers with these lines of its metrics.jsonl."""
    done = subprocess.run(
        [sys.executable, *command], env={**CONTROLLER_ENV, **os.environ}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] in kinds]


def ran_on() -> dict[str, str]:
    engines, host = versions(), machine()
    vllm = next(f"{name} {engines[name]}" for name in ("vllm", "vllm-cpu") if name in engines)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit()[:12],
        "machine": f"{host['cores']} x {host['cpu']}",
        "engines": f"torch {engines['torch']}, torchtitan {engines['torchtitan']}, "
        f"torchmonarch {engines['torchmonarch']}, {vllm}",
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def report(path: Path, rows: Iterable[Row]) -> None:
    """A table a case, and one CSV row a measure: median, least and most over the repeats, and what it ran on."""
    common, tables, written = ran_on(), dict[str, Table](), []
    for row in rows:
        middle = (f(row.values) for f in (statistics.median, min, max))
        values = dict(zip(("median", "min", "max"), (f"{value:.4g}" for value in middle), strict=True))
        shown = {"measure": row.measure, **values, "runs": str(len(row.values)), "note": row.note}
        written.append({"part": row.part, "case": row.case, **shown, **common})
        if row.case not in tables:
            tables[row.case] = Table(title=row.case, title_justify="left")
            for name in shown:
                tables[row.case].add_column(name, justify="left" if name in ("measure", "note") else "right")
        tables[row.case].add_row(*shown.values())
    append(path, written)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables.values():
        console.print(table)


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
