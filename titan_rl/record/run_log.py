"""The files of a dump folder that people and scripts read; the trainers write the checkpoints themselves.

    config.toml      the resolved config              metrics.jsonl    one line per step: kind, step, time, metrics
    summary.json     the run in one object            rollouts.jsonl   one line per rollout: text, tokens, reward, ...
    evaluations.jsonl  one line per evaluated set: every problem's rewards, and which answers have none
    evaluation_answers.jsonl  one line per evaluated set: its first problems' answers, and failed ones
    tb/              TensorBoard events; the cold start's steps are a separate run, tb/cold_start
    trackers.json    ids of the run in its experiment trackers (titan_rl/ext/trackers)

A crash loses at most the line that is being written. A resumed run repeats the steps after its checkpoint: their old
lines move to `*.superseded.jsonl` and their points leave TensorBoard's curves, so no step is counted twice.
"""

import json
import math
import re
import shlex
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titan_rl.config.sections import Config
from titan_rl.config.toml import CONFIG, to_toml
from titan_rl.record.config_history import keep_config
from titan_rl.record.curves import Curves
from titan_rl.record.evaluation import Evaluation
from titan_rl.record.lines import LineFile, SelfClosing, encode, must_write, strict, write_whole
from titan_rl.record.run_names import ANSWERS, EVALUATIONS, METRICS, ROLLOUTS, SUMMARY
from titan_rl.record.sample_rows import COLUMNS, has_samples, overview, sample_rows
from titan_rl.record.sinks import NO_SINKS, Event, Sink, State
from titan_rl.wire.program import command_of
from titan_rl.wire.side_columns import logged_extras
from titan_rl.wire.types import Group, Rollout, names_of

TENSORBOARD = "tb"
"""Folder of TensorBoard's events, in the dump folder."""

Kind = Literal["startup", "cold_start", "rl", "fit", "eval"]
# Every line begins so, and resuming parses no more of it. Lines of older versions have spaces.
HEAD = re.compile(rb'\{"kind": ?"(\w+)", ?"step": ?(\d+),')


JOINED = b'}{"kind":'  # two lines in one; within a text the quotes would be escaped


class RunLog(SelfClosing):
    """Writes a run's files.

    RL steps up to `resume_step` are kept; None keeps nothing. A run that resumes inside its cold start passes
    `resume_step` 0 and `cold_start_step`, the last supervised step to keep.
    """

    def __init__(
        self,
        folder: Path,
        config_name: str,
        config: Config,
        *,
        resume_step: int | None = None,
        cold_start_step: int | None = None,
        trackers: Sink = NO_SINKS,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.folder, self._config, self._trackers, self._warn = folder, config, trackers, warn
        self._tb = folder / TENSORBOARD if "tensorboard" in config.metrics.trackers else None
        with must_write(folder / CONFIG):
            folder.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                keep_config(folder, config, resume_step)
            write_whole(folder / CONFIG, f"# {config_name}: every key, as this run resolved it.\n\n{to_toml(config)}")
        self._open(resume_step, cold_start_step)

    def rewind(self, resume_step: int | None, cold_start_step: int | None) -> None:
        """Supersede what this process wrote of later steps, as if another process resumed the run."""
        self.close()
        self._open(resume_step, cold_start_step)
        self._trackers.rewind()

    def _open(self, resume_step: int | None, cold_start_step: int | None) -> None:
        rl = -1 if resume_step is None else resume_step
        cold_start = -1 if resume_step is None else math.inf if cold_start_step is None else cold_start_step
        self._last: dict[str, float] = {"startup": rl, "cold_start": cold_start, "rl": rl, "fit": rl, "eval": rl}
        self._metrics = open_after(self.folder / METRICS, self._last, self._warn)
        self._rollouts = open_after(self.folder / ROLLOUTS, self._last, self._warn)
        self._evaluations = open_after(self.folder / EVALUATIONS, self._last, self._warn)
        self._answers = open_after(self.folder / ANSWERS, self._last, self._warn)
        self._curves: dict[str, Curves] = {}

    def startup(self, step: int, seconds: float, bad_rows: int = 0) -> None:
        """Log that this process was ready to continue after step `step`, `seconds` after it started."""
        self._line("startup", step, {"time/startup": seconds, **({"bad_rows": bad_rows} if bad_rows else {})})

    def cold_start(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a supervised step. The held-out score before the cold start is the "eval/score" of its step 0."""
        self._line("cold_start", step, metrics)
        self._plot("cold_start", step, {f"cold_start/{key}": value for key, value in metrics.items()})

    def fit(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step of an algorithm that learns from given data: examples, or pairs."""
        self._line("fit", step, metrics)
        self._plot("rl", step, metrics)

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]],
        groups: Sequence[Group],
    ) -> tuple[int, int]:
        """Log an RL step. Rollouts are written first: a step that has metrics has all its rollouts. Return the
        checksums of its lines in metrics.jsonl and rollouts.jsonl."""
        found = 0

        def lines() -> Iterator[bytes]:  # one at a time: a large step has 53 MB
            nonlocal found
            for each in rollout_lines(step, groups):
                line = encode(each)
                found = checksum([line], found)
                yield line

        self._rollouts.append(lines())
        line = self._line("rl", step, {**metrics, **histograms})
        self._plot("rl", step, metrics, histograms)
        if has_samples(step, self._config.metrics.sample_interval):
            self._show_samples(step, sample_rows(step, groups))
        return checksum([line]), found

    def to_disk(self) -> None:
        """Return when all lines are on disk, as a checkpoint that counts their steps needs it."""
        self._rollouts.to_disk()
        self._answers.to_disk()
        self._evaluations.to_disk()
        self._metrics.to_disk()

    def eval(self, step: int, scores: Mapping[str, float], seconds: float) -> None:
        """Log the scores of the policy that RL step `step` made; 0 is the policy with which RL began."""
        self._line("eval", step, {**scores, "time/eval": seconds})
        self._plot("rl", step, scores)

    def evaluations(self, step: int, found: Sequence[Evaluation], *, kind: Kind = "eval") -> None:
        """Log what evaluations after a step found, before the step's metrics."""
        sums = [dict[str, int]() for _ in found]

        def answers() -> Iterator[bytes]:
            for each, own in zip(found, sums, strict=True):
                line = encode({**head, **each.answers_line()})
                own["answers"] = checksum([line])
                yield line

        if found:
            head = {"kind": kind, "step": step, "time": time.time()}
            if any(answer.rollout is not None for each in found for answer in each.all):
                self._answers.append(answers())
            self._evaluations.append([encode({**head, **e.line, **own}) for e, own in zip(found, sums, strict=True)])

    def summary(self, summary: Mapping[str, Any], state: State = "finished") -> None:
        with must_write(self.folder / SUMMARY):
            write_whole(self.folder / SUMMARY, json.dumps(strict(summary), indent=2) + "\n")
        self._trackers.finish(state, summary)

    def event(self, event: Event, text: str) -> None:
        """Send an event to the trackers."""
        self._trackers.event(event, text)

    @property
    def hints(self) -> list[str]:
        """Where to look at the curves."""
        curves = [f"{command_of('view')} {shlex.quote(str(self.folder))}"]
        curves += [f"tensorboard --logdir {shlex.quote(str(self._tb))}"] if self._tb else []
        return [*curves, *self._trackers.hints]

    def close(self) -> None:
        for curves in self._curves.values():
            with suppress(OSError):
                curves.close()
        for part in (self._metrics, self._rollouts, self._evaluations, self._answers):
            part.close()

    def _line(self, kind: Kind, step: int, metrics: Mapping[str, Any]) -> bytes:
        line = encode({"kind": kind, "step": step, "time": time.time(), **metrics})
        self._metrics.append([line])
        return line

    def _plot(
        self,
        kind: Literal["cold_start", "rl"],
        step: int,
        scalars: Mapping[str, float],
        histograms: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Send points to the trackers, and write them to tb/ (RL) or tb/cold_start. Each kind counts its own steps, so
        a restart purges each alone."""
        scalars = {**overview(scalars), **scalars}
        self._trackers.log(kind, step, scalars, histograms or {})
        if self._tb is None:
            return
        with self._ends_curves(step):
            if kind not in self._curves:
                last = self._last[kind]
                first = step if math.isinf(last) else int(last) + 1
                self._curves[kind] = Curves(self._tb if kind == "rl" else self._tb / kind, first)
                self._curves[kind].text("config", first, indented(to_toml(self._config)))
            self._curves[kind].write(step, scalars, histograms or {})

    def _show_samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        self._trackers.samples(step, rows)
        if self._tb is not None:
            samples = (dict(zip(COLUMNS, row, strict=True)) for row in rows)
            texts = ("\n".join(f"{name}: {value}" for name, value in sample.items()) for sample in samples)
            with self._ends_curves(step):
                self._curves["rl"].text("samples", step, "\n\n---\n\n".join(map(indented, texts)))

    @contextmanager
    def _ends_curves(self, step: int) -> Iterator[None]:
        """Curves that cannot be written end, and the run continues: metrics.jsonl has their points."""
        try:
            yield
        except OSError as error:
            self._warn(f"{self._tb} cannot be written: {error.strerror or error}; the curves end at step {step}")
            self._tb = None


def indented(text: str) -> str:
    """Return a text as Markdown that shows it as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


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
                **({"images": names_of(group.prompt.images)} if group.prompt.images else {}),
                "text": rollout.text,
                "finish": rollout.finish,
                "reward": rollout.reward,
                "penalty": rollout.penalty,
                "advantage": rollout.advantage,
                "tokens": joined([branch.tokens for branch in rollout.branches]),
                "mask": joined([branch.mask for branch in rollout.branches]),
                "logprobs": np.array(
                    joined([branch.logprobs for branch in rollout.branches]), np.float32
                ),  # as sampled: half the digits of Python's floats
                "versions": rollout.versions,
                **logged_extras(rollout),
                **({} if rollout.plain else turn_fields(rollout)),
                **verdict_fields(rollout),
            }


def verdict_fields(rollout: Rollout) -> dict[str, Any]:
    """Return the fields that a line has if its judge returned more than a number."""
    found: dict[str, Any] = {"rewards": {**rollout.rewards, **rollout.parts}} if rollout.parts else {}
    return found | ({"error": rollout.unrewarded} if rollout.unrewarded else {})


def joined(parts: Sequence[list[Any]]) -> list[Any]:
    return parts[0] if len(parts) == 1 else [item for part in parts for item in part]


def turn_fields(rollout: Rollout) -> dict[str, Any]:
    """Return the fields that only a rollout of several turns has. Its tokens are one branch after the other, and in
    each branch one turn after the other: `read` tokens, then `sampled` ones."""
    return {
        "status": rollout.status,
        "attempts": rollout.attempts,
        "turns": [
            {
                "turn": turn.index,
                "branch": number,
                "read": len(turn.context),
                "sampled": len(turn.completion.tokens),
                "finish": turn.completion.finish,
                "reward": turn.reward,
                **({"seat": turn.seat} if turn.seat else {}),
                **({"images": names_of(turn.images)} if turn.images else {}),
            }
            for number, branch in enumerate(rollout.branches)
            for turn in branch.turns
        ],
        "rewards": dict(rollout.rewards),
        "metrics": dict(rollout.metrics),
        "messages": list(rollout.messages),
        "error": rollout.error,
        **({"seats": dict(rollout.seats), "trained": dict(rollout.trained)} if rollout.seats else {}),
        **({"opponents": dict(rollout.opponents)} if rollout.opponents else {}),
    }


def checksum(lines: Iterable[bytes], found: int = 0) -> int:
    """Return the CRC-32 of `lines` with their line ends, after lines whose CRC-32 is `found`."""
    for line in lines:
        found = zlib.crc32(b"\n", zlib.crc32(line, found))
    return found


def open_after(path: Path, last: Mapping[str, float], warn: Callable[[str], None] = lambda message: None) -> LineFile:
    """Open `path` for appending, and keep each kind's lines up to its `last` step; lines of an unknown kind count
    as steps of RL.

    Lines are in the order in which they were written: from the first later one on, or a torn one, all of them move to
    `*.superseded.jsonl`. Damaged lines move there too.
    """

    def sound(line: bytes) -> bool:
        return HEAD.match(line) is not None and line.endswith(b"}\n") and JOINED not in line and b"\0" not in line

    def stays(line: bytes) -> bool:
        head = HEAD.match(line)
        return head is not None and int(head[2]) <= last.get(head[1].decode(), last["rl"])

    return LineFile(path, sound=sound, stays=stays, warn=warn)
