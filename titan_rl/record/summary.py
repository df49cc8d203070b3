"""summary.json: a whole run in one object, computed from its metrics.jsonl."""

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import numpy as np

from titan_rl.config.sections import Config
from titan_rl.record.lines import is_count, is_number, whole_lines
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.record.provenance import git_commit, machine, versions
from titan_rl.record.run_log import Kind
from titan_rl.record.run_names import METRICS


def summarize(folder: Path, config_name: str, config: Config) -> dict[str, Any]:
    """Summarize the run so far, over all its processes.

    An evaluation at step 0 is of the policy with which RL began, after the cold start.
    """
    lines = list(known_lines(folder / METRICS))
    rl = [line for line in lines if line["kind"] == "rl"]
    trained = [line for line in lines if line["kind"] in ("rl", "fit")]
    wall, seconds = times(lines)
    tokens, gap_mean, gap_max, effective = (
        np.array([line.get(key) for line in rl], dtype=float)  # null stands for NaN, and becomes NaN again
        for key in ("tokens/trained", "logprob_gap/mean", "logprob_gap/max", "off_policy/ess")
    )
    agreement = [line["routing/agreement"] for line in rl if is_number(line.get("routing/agreement"))]
    return {
        "config_name": config_name,
        "seed": config.debug.seed,
        "steps": trained[-1]["step"] if trained else 0,
        **summary_scores(lines),
        "bad_rows": next((line.get("bad_rows", 0) for line in reversed(lines) if line["kind"] == "startup"), 0),
        "wall_seconds": wall,
        "seconds": seconds,
        "logprob_gap": {
            "mean": float(gap_mean @ tokens / max(1, tokens.sum())) if rl else None,
            "max": float(gap_max.max()) if rl else None,
        },
        "effective_samples": float(effective @ tokens / max(1, tokens.sum())) if rl else None,
        "routing_agreement": sum(agreement) / len(agreement) if agreement else None,
        "versions": versions(),
        "git_commit": git_commit(),
        "machine": machine(),
    }


def summary_scores(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the scores of a summary from the lines of metrics.jsonl: before the cold start, before RL, at the end."""
    scored = [line for line in lines if EVAL_SCORE in line]
    cold_start = [line[EVAL_SCORE] for line in scored if line["kind"] == "cold_start"]
    evals = [line[EVAL_SCORE] for line in scored if line["kind"] != "cold_start"]
    initial = [line[EVAL_SCORE] for line in scored if line["kind"] == "eval" and line["step"] == 0]
    return {
        "cold_start_eval": cold_start[0] if cold_start else None,
        "initial_eval": initial[-1] if initial else None,
        "final_eval": evals[-1] if evals else None,
    }


def known_lines(path: Path, last: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl, or its `last` ones, without damaged lines and lines of an unknown kind."""
    for line in whole_lines(path) if last is None else deque(whole_lines(path), last):
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict) and found.get("kind") in get_args(Kind) and _has_numbers(found):
                yield found


def _has_numbers(line: Mapping[str, Any]) -> bool:
    """Return True if the values of a line that are summed are numbers; null stands for NaN."""
    others = (line.get(key) for key in line if key.startswith(("time/", "logprob_gap/", "tokens/")))
    return is_count(line.get("step")) and is_number(line.get("time")) and all(v is None or is_number(v) for v in others)


def elapsed(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield each line with the wall seconds that led to it.

    A process lasts from "time/startup" seconds before its startup line to its last line. Time between two processes is
    not counted, nor is a clock that was set back.
    """
    before = lines[0]["time"] if lines else 0.0
    for line in lines:
        if line["kind"] == "startup":
            before = line["time"] - (line.get("time/startup") or 0.0)
        yield line, max(0.0, line["time"] - before)
        before = line["time"]


def times(lines: Sequence[Mapping[str, Any]]) -> tuple[float, dict[str, float]]:
    """Return the wall seconds of all processes, this one until now, and how they were spent.

    Time whose work a crash undid is not counted. A cold start line took the time since the line before it. "other" is
    the rest, such as the end.
    """
    split = dict.fromkeys(
        ("startup", "cold_start", "generate", "judge", "train", "sync", "wait", "eval", "save", "pause"), 0.0
    )
    wall = 0.0
    for line, seconds in elapsed(lines):
        if line["kind"] == "cold_start":
            split["cold_start"] += seconds
        else:
            for part in split:
                split[part] += line.get(f"time/{part}") or 0.0
        wall += seconds
    now = time.time()
    wall += max(0.0, now - (lines[-1]["time"] if lines else now))
    return wall, split | {"other": max(0.0, wall - sum(split.values()))}
