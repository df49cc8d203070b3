#!/usr/bin/env python3
"""Measure and check titan_rl on a machine with GPUs, for ten minutes or longer, and write one report.

    ./scripts/gpu_visit/run --out OUT                       # in a checkout that installs itself
    ./scripts/gpu_visit/run --out OUT --minutes 40          # everything
    ./scripts/gpu_visit/run --out OUT --only update heads   # some parts
    ./scripts/gpu_visit/run --out OUT --device cpu          # tries itself: tiny shapes, no part that needs a GPU
    PYTHONPATH=$PWD VENV/bin/python scripts/gpu_visit/visit.py --out OUT    # by a bundle's Python, without a network

Every part runs in its own processes within its own limit, the most telling first, and the next one runs also if it
fails; parts for which no time is left are named. OUT/report.md has each part's tables, OUT/PART its output, metrics and
timeline.json (for ui.perfetto.dev). The report names this machine's hardware, drivers and packages, and no
environment variables but the few that the doctor prints. --only with an unknown name lists the parts.

The race needs trl 1.16 and vLLM in one Python: --trl PYTHON, by default this one.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from titan_rl.config.toml import load
from titan_rl.preflight.memory import needs, on_gpus
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.provenance import git_commit, versions
from titan_rl.record.summary import known_lines
from titan_rl.wire.gpus import PLANNED, Gpus, found_gpus

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "scripts/gpu_visit"
GRACE = 5.0  # seconds from SIGINT to SIGKILL of a part at its limit
TAIL = 60  # lines of a part's output in the report, if it did not pass
KEPT = ("timeline.json", "metrics.jsonl", "config.toml", "summary.json")  # files in a run's folder
WARM = 2  # first steps of a run, which compile; no median has them
MEASURED = (
    *("time/step", "engine/sampling_seconds", "engine/training_seconds", "time/sync", "time/wait", "time/wake"),
    *("logprob_gap/mean", "logprob_gap/max", "sync/write_seconds", "sync/verify_seconds"),
    *("throughput/mfu", "memory/max_active_gib", "memory/max_reserved_gib"),
)
EXPANDABLE = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
"""What a run's trainers are launched with (train/bring_up.py), under torch's names before and after 2.9."""
EAGER = {"generator.enforce_eager": "true", "compile.enable": "false"}  # a start of seconds
TINY_RUN = {  # for the runs of shipped configs: several weight syncs, an evaluation and a checkpoint
    "cold_start.steps": 30,
    "cold_start.stop_at": 0,
    "training.steps": 6,
    "checkpoint.interval": 3,
    "rollout.groups_per_step": 32,
    "eval.size": 64,
    "hosts.gpu_memory_gb": 0,
}
STREAMED = {"rollout.max_staleness_steps": 1, "training.stream_groups": 8}
BFLOAT16 = {
    "training.mixed_precision_param": "bfloat16",
    "generator.dtype": "bfloat16",
    "generator.kv_cache_memory_mb": 1024,
    "generator.enforce_eager": "false",
}
FLOAT32 = {"training.mixed_precision_param": "float32", "generator.dtype": "float32"}


@dataclass(slots=True)
class Part:
    name: str
    what: str
    commands: Sequence[Sequence[str]]  # one after the other
    seconds: int  # limit
    env: Mapping[str, str] = field(default_factory=dict)
    run: Path | None = None  # folder of the run that it makes
    needs_gpu: bool = False
    ended: str = "not run"
    took: float = 0.0
    output: Sequence[str] = ()  # lines

    @property
    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the output's lines that are JSON objects."""
        for line in self.output:
            if line.startswith("{"):
                with suppress(ValueError):  # the last line of a process that was killed may be cut
                    yield json.loads(line)


@dataclass(frozen=True, slots=True)
class Race:
    """A model and a batch on which titan_rl and TRL take steps."""

    model: str
    groups: int
    size: int
    answer: int  # tokens
    microbatch: int  # TRL's, samples: titan_rl sizes its own


SMOLLM2, QWEN3 = Race("smollm2", 8, 8, 16, 64), Race("qwen3-0.6b", 16, 16, 512, 32)
TINY = Race("tiny", 2, 2, 4, 4)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where and with which Pythons the parts run."""

    device: str  # "cuda" or "cpu"
    out: Path
    work: Path  # models and runs' folders: too large for `out`
    trl: str  # Python
    gpus: Gpus

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    def model(self, name: str) -> str:
        return str(self.work / ("tiny" if self.on_cpu else name))

    def part(self, name: str, what: str, *commands: Sequence[object], seconds: int, **facts: Any) -> Part:
        return Part(name, what, [[str(word) for word in command] for command in commands], seconds, **facts)

    def program(self, name: str, *arguments: object) -> list[object]:
        return [sys.executable, HERE / name, *arguments]

    def run(self, name: str, what: str, config: object, keys: Mapping[str, object], seconds: int) -> Part:
        dump = self.work / "runs" / name
        flags = {**keys, "hosts.device": self.device, "job.dump_folder": dump}
        named = [f"--{key}={value}" for key, value in flags.items()]
        command = [sys.executable, "-m", "titan_rl.run", "--config", config, "--job.fresh", *named]
        return self.part(name, what, command, seconds=seconds, run=dump)

    def keys(self, race: Race, steps: int) -> dict[str, object]:
        """Return the keys of a race for race.toml."""
        rows = self.work / "rows.jsonl"
        return {
            "task.path": rows,
            "task.eval_path": rows,
            "model.hf_assets_path": self.model(race.model),
            "rollout.groups_per_step": race.groups,
            "rollout.group_size": race.size,
            "rollout.max_new_tokens": race.answer,
            "training.steps": steps,
            "training.seq_len": race.answer + (112 if race.answer <= 16 else 512),
            "hosts.slots": 2 if self.on_cpu else 1,
        }

    def titans(self, name: str, race: Race, steps: int, seconds: int) -> Part:
        race = TINY if self.on_cpu else race
        what = f"titan_rl: {race.model}, {race.groups} x {race.size} answers of {race.answer}"
        return self.run(name, what, HERE / "race.toml", self.keys(race, steps), seconds)

    def trls(self, name: str, race: Race, steps: int, seconds: int) -> Part:
        race = TINY if self.on_cpu else race
        sizes = {"groups": race.groups, "size": race.size, "answer": race.answer, "microbatch": race.microbatch}
        named = [f"--{key}={value}" for key, value in sizes.items()]
        what = f"TRL{'' if self.on_cpu else ' + vLLM'}: the same rows, batch and lengths"
        command = [self.trl, HERE / "race_trl.py", self.model(race.model), self.work / "rows.jsonl", *named]
        return self.part(name, what, [*command, f"--steps={steps}", "--device", self.device], seconds=seconds)

    def trained(self, name: str, what: str, keys: Mapping[str, object], seconds: int) -> Part:
        """Return three steps of the real SmolLM2, whose log-prob gap tells something."""
        model = {} if self.on_cpu else {"model.hf_assets_path": "fetch:smollm2"}
        keys = self.keys(TINY if self.on_cpu else SMOLLM2, 3) | EAGER | model | dict(keys)
        return self.run(name, what, HERE / "race.toml", keys, seconds)


def ten_minutes(plan: Plan) -> list[Part]:
    """Return the parts of a visit, the most telling first."""
    tiny = plan.on_cpu
    part, program = plan.part, plan.program
    models = ["tiny"] if tiny else ["smollm2", "qwen3-0.6b"]
    folders = [program("model_folder.py", name, plan.work / name) for name in models]
    rows = program("model_folder.py", "rows", plan.work / "rows.jsonl")
    update = program("profile_update.py", *models, "--out", plan.out / "update")
    steps, model = 4 if tiny else 7, plan.model("qwen3-0.6b")
    sampling = program("profile_sampling.py", model, "--seqs", *((4, 8) if tiny else (64, 256)))
    sampling += ["--tokens", 8 if tiny else 96]
    caches = (64, 128) if tiny else (2048, 32768, 98304)
    wakes = [program("profile_sampling.py", model, "--kv-mb", mb, "--sleeps", 3) for mb in caches]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", ROOT / "tests/unit"]
    adapters = {"lora.rank": 16, "lora.sync": "adapter"}
    return [
        part("imports", "all that the visit runs", program("imports.py"), seconds=60),
        part("models", "folders of random weights", *folders, rows, seconds=40),
        part("update", "a trainer's update by span and kernel", update, seconds=120, env=EXPANDABLE),
        part("sampling", "an engine's decode steps", sampling, seconds=75),
        part("sampling_bare", "vLLM's own, with its defaults", [*sampling, "--bare"], seconds=60),
        plan.titans("race_large", QWEN3, steps, 100),
        plan.trls("race_large_trl", QWEN3, steps, 90),
        plan.titans("race_small", SMOLLM2, 2 * steps, 75),
        plan.trls("race_small_trl", SMOLLM2, 2 * steps, 60),
        part("wake", "seconds of a wake by the size of the KV cache", *wakes, seconds=75),
        part("heads", "log-prob heads: titan_rl, TRL, Liger, whole logits", program("heads.py"), seconds=45),
        part("tests", "kernels against their references", tests, seconds=75, needs_gpu=True),
        plan.trained("adapter", "adapters, synced as adapters", adapters, 45),
        plan.trained("fp8", "an engine with 8-bit weights", {"generator.quantization": "fp8"}, 45),
        killed(plan),
    ]


def killed(plan: Plan) -> Part:
    """Return a run whose trainer is killed once, with the audits of `titan_rl chaos`."""
    dump = plan.work / "runs/killed"
    keys = plan.keys(TINY if plan.on_cpu else SMOLLM2, 8) | EAGER
    keys |= {"hosts.device": plan.device, "checkpoint.enable": "true"}
    command = [sys.executable, "-m", "titan_rl", "chaos", "--config", HERE / "race.toml", "--run", dump]
    command += ["--kills", 1, "--only", "kill:trainer", *(f"--{key}={value}" for key, value in keys.items())]
    return plan.part("killed", "kill -9 of the trainer", command, seconds=90, run=dump)


def longer(plan: Plan) -> list[Part]:
    """Return the parts that follow where there is more time: checks of each part, and runs of shipped configs."""
    tiny = plan.on_cpu
    interpreted = {"TRITON_INTERPRET": "1"} if tiny else {}
    dtypes = {} if tiny else BFLOAT16
    together = TINY_RUN | dtypes | {"parallelism.data_parallel_shard_degree": 1, "placement.kind": "colocated"}
    trainers = max(1, min(4, plan.gpus.count // 2))
    apart = TINY_RUN | dtypes | {
        "parallelism.data_parallel_shard_degree": trainers,
        "generator.replicas": max(1, min(4, plan.gpus.count - trainers)),
    }  # fmt: skip

    def checks(name: str, what: str, *modes: str, seconds: int, **env: str) -> Part:
        command = [sys.executable, "-m", "bench.gpu", *modes]
        return plan.part(name, what, command, seconds=seconds * (4 if tiny else 1), env=env | interpreted)

    runs = [
        plan.run("one_gpu", "the cousin of grpo_qwen3_0_6b_1gpu: colocated", "grpo_qwen3", together, 480),
        plan.run(
            "float32",
            "the same in float32: the log-prob gap should be below 1e-4",
            "grpo_qwen3",
            together | FLOAT32,
            480,
        ),
    ]
    if plan.gpus.count > 1 or tiny:
        runs += [
            plan.run("node", "the cousin of grpo_llama3_8b: FSDP2, replicas", "grpo_llama", apart, 480),
            plan.run("lag", "the same, asynchronous and streamed", "grpo_llama", apart | STREAMED, 480),
        ]
    return [
        plan.part(
            "machine", "hardware and links", ["sh", "-c", "nvidia-smi; nvidia-smi topo -m"], seconds=30, needs_gpu=True
        ),
        plan.part("doctor", "this machine and its install", [sys.executable, "-m", "titan_rl", "doctor"], seconds=120),
        checks("card", "the card's rates, attention, checksums", "machine", "varlen", "checksums", seconds=60),
        checks("numbers", "the head and a trainer against references", "head", "float32", "bfloat16", seconds=90),
        checks("steps", "a trainer's steps at 0.6B: MFU, memory", "eager", "recompute", seconds=120, **EXPANDABLE),
        checks("compiled", "the same with compiled blocks", "compiled", seconds=90, **EXPANDABLE),
        checks("deterministic", "equal bits", "deterministic", seconds=60, CUBLAS_WORKSPACE_CONFIG=":4096:8"),
        checks("weights", "a weight sync between two processes", "weights", seconds=60),
        *runs,
        plan.part(
            "kernels",
            "kernels against plain torch",
            [
                sys.executable,
                ROOT / "scripts/bench_kernels.py",
                *(["--tiny"] if tiny else []),
                "--csv",
                plan.out / "kernels.csv",
            ],
            seconds=300,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts to run, by name")
    parser.add_argument("--minutes", type=float, default=10, help="for all parts; default 10")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--trl", default=sys.executable, metavar="PYTHON")
    a = parser.parse_args()
    gpus = found_gpus()
    if a.device == "cuda" and not gpus.count:
        parser.error("expected a GPU that nvidia-smi shows, found none; --device cpu tries this script itself")
    with tempfile.TemporaryDirectory(prefix="gpu_visit.") as work:
        plan = Plan(a.device, a.out.resolve(), Path(work), a.trl, gpus)
        parts = [*ten_minutes(plan), *longer(plan)]
        unknown = set(a.only or ()) - {part.name for part in parts}
        if unknown:
            parser.error(f"--only: expected parts of {[part.name for part in parts]}, found {sorted(unknown)}")
        wanted = [part for part in parts if not a.only or part.name in {*a.only, "models"}]
        return visit(plan, wanted, time.monotonic() + 60 * a.minutes)


def visit(plan: Plan, parts: Sequence[Part], deadline: float) -> int:
    """Run the parts until the deadline. Return 1 if one of them failed."""
    plan.out.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, PLANNED: plan.device, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "PYTHONUNBUFFERED": "1"}
    env |= {"HF_HUB_OFFLINE": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if plan.on_cpu else preloaded(plan.work))
    if path := os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] += f":{path}"
    for part in parts:
        if part.needs_gpu and plan.on_cpu:
            part.ended = "not run: needs a GPU"
            continue
        left = deadline - time.monotonic()
        if left < 1:
            part.ended = "not run: no time was left"
            continue
        print(f"gpu_visit: {part.name}: {part.what} (at most {min(part.seconds, left):.0f} s)", flush=True)
        execute(part, plan.out / part.name, {**env, **part.env}, min(part.seconds, left))
        print(f"gpu_visit: {part.name}: {part.ended} after {part.took:.0f} s", flush=True)
        (plan.out / "report.md").write_text(report(parts, plan))  # so far: this process may be ended, too
    (plan.out / "report.md").write_text(report(parts, plan))
    print(f"gpu_visit: the report is {plan.out / 'report.md'}")
    return int(not all(part.ended == "passed" or part.ended.startswith("not run") for part in parts))


def preloaded(work: Path) -> dict[str, str]:
    """Return the environment that lets torch load an NCCL older than its own, if that is the one it will find."""
    found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    folders = found.submodule_search_locations if found else None
    library = next((path for each in folders or () for path in Path(each).glob("lib/libnccl.so.2")), None)
    if library is None or hasattr(ctypes.CDLL(str(library)), "ncclCommSuspend"):
        return {}
    shim = work / "nccl_shim.so"
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", shim, HERE / "nccl_shim.c"], check=True)
    return {"LD_PRELOAD": str(shim)}


def execute(part: Part, folder: Path, env: Mapping[str, str], seconds: float) -> None:
    """Run a part's commands, each in a process group that ends with it. Their output is kept as it comes."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    path, part.ended = folder / "output.txt", "passed"
    with path.open("w") as output:
        for command in part.commands:
            print("$", *command, file=output, flush=True)
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if code := process.wait(max(0.0, began + seconds - time.monotonic())):
                    part.ended = f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                part.ended = f"stopped by its limit of {seconds:.0f} s"
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGINT)
                    process.wait(GRACE)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if part.ended.startswith("stopped"):
                break
    part.took = time.monotonic() - began
    part.output = path.read_text(errors="replace").splitlines()
    for name in KEPT if part.run else ():
        if part.run and (kept := part.run / name).exists():
            shutil.copy(kept, folder)


def report(parts: Sequence[Part], plan: Plan) -> str:
    gpus = plan.gpus
    lines = [
        f"# A visit of titan_rl on {f'{gpus.count} GPUs' if gpus.count != 1 else 'one GPU'}",
        "",
        f"commit {git_commit(ROOT)}, device {plan.device}, {gpus.count} GPUs of {gpus.nbytes / 2**30:.1f} GiB, "
        f"driver {gpus.driver or 'unknown'} for CUDA up to {gpus.cuda or 'unknown'}",
        "",
        ", ".join(f"{name} {version}" for name, version in versions().items()),
        "",
        *table([{"part": part.name, "what": part.what, "result": part.ended, "seconds": part.took} for part in parts]),
        *races(parts),
        *runs(parts, plan),
    ]
    for part in parts:
        if rows := list(part.rows):
            lines += [f"## {part.name}", ""]
            for _, alike in groupby(rows, key=lambda row: tuple(row)):
                lines += table(alike)
        if not (part.ended == "passed" or part.ended.startswith("not run")):
            lines += [f"## {part.name}: {part.ended}", "", "```", *part.output[-TAIL:], "```", ""]
    return "\n".join(lines)


def table(rows: Iterator[Mapping[str, Any]] | Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of rows that have the same keys."""
    rows = list(rows)
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    body = [f"| {' | '.join(shown(row.get(name, '')) for name in names)} |" for row in rows]
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|", *body, ""]


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "; ".join(f"{name} {shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return str(value).replace("|", "/")


def races(parts: Sequence[Part]) -> list[str]:
    """Return the table of titan_rl's steps next to TRL's."""
    by_name, rows = {part.name: part for part in parts}, []
    for name, part in by_name.items():
        other = by_name.get(f"{name}_trl")
        if other is None or not part.run:
            continue
        ours = [line["time/step"] for line in steps_of(part) if line.get("time/step")][WARM:]
        theirs = [row["seconds"] for row in other.rows if "step" in row][WARM:]
        if ours and theirs:
            own, peer = statistics.median(ours), statistics.median(theirs)
            rows.append({"race": part.what, "titan_rl, s": own, "TRL, s": peer, "TRL / titan_rl": peer / own})
    return ["## The race: median seconds of a step", "", *table(rows)] if rows else []


def runs(parts: Sequence[Part], plan: Plan) -> list[str]:
    """Return each run's medians over its RL steps, with the memory that the dry run expected, and its spans."""
    figures, spans = [], []
    for part in parts:
        if part.run is None or not (part.run / "metrics.jsonl").exists():
            continue
        steps = steps_of(part)[WARM:]
        medians = {name: median([line[name] for line in steps if line.get(name) is not None]) for name in MEASURED}
        figures.append(
            {
                "run": f"{part.name} ({len(steps)} steps)",
                **medians,
                "trainer GiB by estimate": estimate(part.run, plan.gpus),
            }
        )
        if (timeline := part.run / "timeline.json").exists():
            spans += [{"run": part.name, **row} for row in spans_of(timeline)]
    return ["## Runs", "", *table(figures), *table(spans)] if figures else []


def steps_of(part: Part) -> list[dict[str, Any]]:
    path = part.run / "metrics.jsonl" if part.run else None
    return [line for line in known_lines(path) if line["kind"] == "rl"] if path and path.exists() else []


def spans_of(timeline: Path) -> list[dict[str, Any]]:
    """Return the spans of a run by process and name: how many, and their median, in ms."""
    events = json.loads(timeline.read_text())
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = defaultdict[tuple[str, str], list[float]](list)
    for event in events:
        if event["ph"] == "X":
            found[processes.get(event["pid"], "?"), event["name"]].append(event["dur"] / 1e3)
    return [
        {"process": process, "span": name, "count": len(all_ms), "median, ms": statistics.median(all_ms)}
        for (process, name), all_ms in sorted(found.items())
    ]


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
