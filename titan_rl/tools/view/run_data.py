"""Collects what the page shows of one run, as JSON values.

    metrics.jsonl ──> curves, time      evaluations.jsonl ──> rewards per problem     config.toml ──> keys
    rollouts.jsonl ──> groups           ledger.jsonl ──> lives of prompts             faults.jsonl ──> events
    evaluation_answers.jsonl ──> groups of the same problems                          tools/diagnosis ──> findings

A page has a few megabytes however long the run was: steps, groups and prompts are sampled evenly, and `left_out` names
the part that the page has.
"""

import json
import math
import re
import zlib
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tomli

from titan_rl.config.sections import Config
from titan_rl.config.toml import to_toml
from titan_rl.tools.diagnosis.diagnosed_run import DiagnosedRun
from titan_rl.tools.diagnosis.findings import RunFinding
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.tools.inspect.run_history import LedgerHistory, PromptHistory
from titan_rl.tools.inspect.sample_view import part_text
from titan_rl.tools.inspect.samples import RunSample, in_groups
from titan_rl.tools.inspect.token_view import tokenizer_of
from titan_rl.tools.view.token_pieces import Pieces
from titan_rl.wire.counted import counted
from titan_rl.wire.program import command_of
from titan_rl.wire.types import IMAGES

MOST_STEPS = 2000  # points of a curve
MOST_PROMPTS = 2000  # lives
MOST_EVALUATIONS = 60  # columns of the table of problems
MOST_PROBLEMS = 200  # rows of it
FEWEST_STEPS = 8  # with samples, if a budget allows only parts of steps
MOST_CHARACTERS = 20_000  # in one text or message

HASH = re.compile("[0-9a-f]{64}")
Json = dict[str, Any]
NO_GAPS: Mapping[tuple[int, ...], Sequence[float]] = {}


def run_data(folder: Path, *, sample_bytes: int) -> Json:
    """Return a run as the page reads it. `sample_bytes` bounds the size of its samples approximately."""
    files, left_out, config, history = RunFiles(folder), list[str](), dict[str, Any](), None
    lines = list(files.metrics())
    trained = [line for line in lines if line["kind"] in ("rl", "fit", "eval")]
    with suppress(OSError):
        history = LedgerHistory.of(folder)
    with suppress(OSError, ValueError, RecursionError):  # also keys of other versions
        config = flat(files.tables())
    data: Json = {
        "name": folder.resolve().name,
        "folder": str(folder),
        "config": config,
        "defaults": flat(tomli.loads(to_toml(Config()))),
        "summary": files.summary(),
        "curves": curves(trained, left_out),
        "cold_start": curves([line for line in lines if line["kind"] == "cold_start"], []),
        "events": [*_starts(lines), *_cuts(files), *_faults(files, lines), *_saves(history)],
        "evaluations": _evaluations(files, left_out),
        "groups": [*_groups(files, sample_bytes, left_out), *_answers(files, sample_bytes // 3, left_out)],
        "findings": _findings(folder),
        "prompts": _prompts(history, left_out),
        "left_out": left_out,
    }
    data["images"] = _images(folder, data["groups"], sample_bytes, left_out)
    data["events"].sort(key=lambda event: (event["step"], event.get("time") or 0.0))
    data["state"] = _state(data, config, files, lines)
    return data


def curves(lines: Sequence[Mapping[str, Any]], left_out: list[str]) -> Json:
    """Return the numbers of all steps as one list per metric, with null where a step lacks it."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        by_step.setdefault(line["step"], {}).update(line)
    steps = sorted(by_step)
    if len(steps) > MOST_STEPS:
        chosen = set(evenly(steps, MOST_STEPS))
        chosen.update(step for step in steps if any(key.startswith("eval/") for key in by_step[step]))
        left_out.append(f"curves have {len(chosen)} of {len(steps)} steps")
        steps = sorted(chosen)
    tags = {key for step in steps for key, value in by_step[step].items() if _is_number(value)}
    values = dict[str, list[float | None]]()
    for tag in sorted(tags - {"step", "time"}):
        values[tag] = [_short(by_step[step].get(tag)) for step in steps]
    return {"steps": steps, "times": [round(by_step[step]["time"], 1) for step in steps], "values": values}


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return `count` of the items, the first and the last among them, or all if there are fewer."""
    if len(items) <= count:
        return list(items)
    places = {round(i) for i in np.linspace(0, len(items) - 1, max(1, count))}
    return [items[i] for i in sorted(places)]


def flat(table: Mapping[str, Any], head: str = "") -> Json:
    """Return a TOML table as one level of dotted keys."""
    found: Json = {}
    for key, value in table.items():
        found |= flat(value, f"{head}{key}.") if isinstance(value, dict) else {head + key: value}
    return found


def clipped(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}… ({len(text):,} characters)"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> float | int | None:
    """Return a number with five significant digits."""
    if not _is_number(value) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")


def _state(data: Json, config: Json, files: RunFiles, lines: Sequence[Mapping[str, Any]]) -> Json:
    steps, total = data["curves"]["steps"], config.get("training.steps")
    done = steps[-1] if steps else 0
    finished = isinstance(total, int) and done >= total
    name = "finished" if finished else "running" if files.active else "ended early"
    return {"name": name, "done": done, "total": total, "last": lines[-1]["time"] if lines else None}


# -- events ------------------------------------------------------------------------------------------------------------


def _starts(lines: Sequence[Mapping[str, Any]]) -> Iterator[Json]:
    for number, line in enumerate(line for line in lines if line["kind"] == "startup"):
        what = "start" if number == 0 else "resumed"
        seconds = line.get("time/startup", 0.0)
        yield {"kind": what, "step": line["step"], "time": line["time"], "text": f"{what} after step {line['step']}",
               "seconds": _short(seconds)}  # fmt: skip


def _cuts(files: RunFiles) -> Iterator[Json]:
    """Yield each change of the run's settings."""
    for cut in files.cuts():
        yield {"kind": "changed", "step": cut.step, "text": clipped(str(cut)), "seconds": None}


def _faults(files: RunFiles, lines: Sequence[Mapping[str, Any]]) -> Iterator[Json]:
    """Yield each closed incident with the step in which it was noticed."""
    stepped = [line for line in lines if line["kind"] in ("rl", "fit")]
    times = [line["time"] for line in stepped]
    for fault in files.faults():
        if fault.open:
            continue
        before = bisect_right(times, fault.time)
        yield {
            "kind": "fault",
            "step": stepped[before - 1]["step"] if before else 0,
            "time": fault.time,
            "text": f"{fault.reason}; {fault.outcome}",
            "seconds": _short(fault.seconds),
            "redone": fault.redone,
            "anew": fault.resampled,
        }


def _saves(history: LedgerHistory | None) -> Iterator[Json]:
    if history is not None:
        for step, trained in history.steps.items():
            if trained.saved:
                yield {"kind": "checkpoint", "step": step, "text": f"checkpoint of step {step}"}


# -- evaluations and prompts -------------------------------------------------------------------------------------------


def _evaluations(files: RunFiles, left_out: list[str]) -> list[Json]:
    """Return each set's mean reward per problem, at each step that evaluated it."""
    sets: dict[str, dict[int, Json]] = {}
    for line in files.evaluations():
        if line["kind"] == "eval":
            sets.setdefault(line["set"], {})[line["step"]] = line["rewards"]
    found = []
    for name, by_step in sets.items():
        steps = evenly(sorted(by_step), MOST_EVALUATIONS)
        problems = list(by_step[steps[-1]])
        shown = evenly(problems, MOST_PROBLEMS)
        if len(steps) < len(by_step) or len(shown) < len(problems):
            left_out.append(
                f"the table of {name} has {len(steps)} of {len(by_step)} evaluations and {len(shown)} of "
                f"{len(problems)} problems"
            )
        means = list[list[float | None]]()
        for problem in shown:
            means.append([_mean(by_step[step].get(problem)) for step in steps])
        found.append({"set": name, "steps": steps, "problems": shown, "rewards": means})
    return found


def _mean(rewards: Sequence[float | None] | None) -> float | None:
    if not rewards:
        return None
    return round(sum(reward or 0.0 for reward in rewards) / len(rewards), 3)


def _prompts(history: LedgerHistory | None, left_out: list[str]) -> list[Json]:
    """Return the lives of prompts: dropped ones and repeated ones first, the rest evenly."""
    if history is None:
        return []
    prompts = {id: prompt for id, prompt in history.prompts.items() if not prompt.undone}
    special = [id for id, prompt in prompts.items() if prompt.dropped or prompt.admissions > 1]
    chosen = evenly(special, MOST_PROMPTS // 2)
    chosen += evenly(sorted(prompts.keys() - set(special)), MOST_PROMPTS - len(chosen))
    if len(chosen) < len(prompts):
        left_out.append(f"lives of {len(chosen)} of {len(prompts)} prompts")
    return [_prompt(id, prompts[id]) for id in sorted(chosen)]


def _prompt(id: int, prompt: PromptHistory) -> Json:
    return {
        "id": id,
        "turn": prompt.turn,
        "admitted": prompt.admitted,
        "admissions": prompt.admissions,
        "versions": list(prompt.versions),
        "tokens": list(prompt.tokens or ()),
        "rewards": list(map(_short, prompt.rewards or ())),
        "trained": prompt.trained,
        "dropped": prompt.dropped,
    }


# -- samples -----------------------------------------------------------------------------------------------------------


def _groups(files: RunFiles, sample_bytes: int, left_out: list[str]) -> list[Json]:
    """Return whole groups of steps that are spread over the run, within `sample_bytes`.

    The order of prompts is the same at every step, so that a prompt that returns in a later epoch is shown again.
    """
    try:
        samples = files.samples()
    except OSError:
        return []
    if not samples.steps:
        return []
    tokenizer = tokenizer_of(files)
    pieces = None if tokenizer is None else Pieces(tokenizer)  # without one, samples are shown as texts
    per_step = max(1, len(json.dumps([_group(group, pieces) for group in samples.groups(samples.steps[-1])])))
    steps = evenly(samples.steps, max(FEWEST_STEPS, sample_bytes // per_step))
    share, found, total = sample_bytes // len(steps), list[Json](), 0
    for step in steps:
        groups, gaps = samples.groups(step), files.gaps(step)
        total += len(groups)
        size = 0
        for group in sorted(groups, key=lambda group: zlib.crc32(group[0].prompt.encode("utf-8", "replace"))):
            shown = _group(group, pieces, gaps)
            size += len(json.dumps(shown))
            if size > share and found and found[-1]["step"] == step:
                break
            found.append(shown)
    if len(steps) < len(samples.steps) or len(found) < total:
        left_out.append(
            f"samples of {len(steps)} of {len(samples.steps)} steps, {len(found)} of their {total} groups; "
            f"`{command_of('look')}` shows all, --sample-mb raises the bound"
        )
    found.sort(key=lambda group: (group["step"], group["index"]))
    return found


def _answers(files: RunFiles, sample_bytes: int, left_out: list[str]) -> list[Json]:
    """Return the stored answers to the same problems at evaluations that are spread over the run."""
    try:
        stored = files.answers()
    except OSError:
        return []
    found: list[Json] = []
    for name in stored.sets:
        share, problems, size = sample_bytes // len(stored.sets), set[int](), 0
        groups = [in_groups(stored.of_step(step, name)) for step in evenly(stored.steps, FEWEST_STEPS)]
        groups = list(filter(None, groups))
        for at in range(max(map(len, groups), default=0)):
            shown = [_group(each[at], None) for each in groups if at < len(each)]
            size += len(json.dumps(shown))
            if size > share and problems:
                break
            problems |= {group["id"] for group in shown}
            found += shown
        if len(groups) < len(stored.steps) or len(problems) < max(map(len, groups), default=0):
            left_out.append(f"answers of {name}: {counted(len(problems), 'problem')} at {len(groups)} evaluations")
    found.sort(key=lambda group: (group["set"], group["step"], group["index"]))
    return found


def _images(folder: Path, groups: Sequence[Json], most_bytes: int, left_out: list[str]) -> Json:
    """Return the images of these groups as data URLs, by name, within a number of bytes."""
    names, found, size = set[str](), dict[str, str](), 0
    for group in groups:
        names.update(group["images"])
        for sample in group["samples"]:
            names.update(name for message in sample.get("messages", ()) for name in message.get("images", ()))
    for name in sorted(names):
        path = folder / IMAGES / name
        if not HASH.fullmatch(name):  # no other file of the run
            continue
        if not path.is_file():
            continue
        size += path.stat().st_size
        if size > most_bytes:
            break
        data = b64encode(path.read_bytes()).decode()
        found[name] = f"data:image/png;base64,{data}"  # browsers look at the bytes
    if len(found) < len(names):
        left_out.append(f"{len(found)} of {len(names)} images")
    return found


def _findings(folder: Path) -> list[Json]:
    """Return what titan_rl why names, the first suspect first."""
    found = DiagnosedRun.of(folder).diagnosis.findings
    return list(map(_finding, found))


def _finding(found: RunFinding) -> Json:
    return {
        "rule": found.rule,
        "severity": "problem" if found.problem else "notice",
        "text": found.text,
        "changes": list(map(str, found.changes)),
        "advice": found.advice,
        "effects": [effect.text for effect in found.effects],
        "samples": [[example.step, example.prompt_id] for example in found.examples],
    }


def _group(
    group: Sequence[RunSample], pieces: Pieces | None, gaps: Mapping[tuple[int, ...], Sequence[float]] = NO_GAPS
) -> Json:
    first = group[0]
    return {
        "step": first.step,
        "id": first.prompt_id,
        "index": first.group,
        "set": first.set,
        "prompt": clipped(first.prompt),
        "answer": clipped(str(first.answer)),
        "images": [str(name) for name in first.images],
        "samples": [_sample(sample, pieces, gaps.get(tuple(sample.tokens), ())) for sample in group],
    }


def _sample(sample: RunSample, pieces: Pieces | None, gaps: Sequence[float]) -> Json:
    shown: Json = {
        "index": sample.sample,
        "reward": _short(sample.reward),
        "penalty": _short(sample.penalty),
        "advantage": _short(sample.advantage),
        "rewards": {name: _short(value) for name, value in {**sample.rewards, **sample.players}.items()},
        "finish": sample.finish,
        "status": sample.status,
        "cut_off": sample.truncated,
        "age": sample.age,
        "tokens": sample.sampled,
        "turns": len(sample.turns),
        "error": clipped(sample.error),
        "text": clipped(sample.text),
    }
    if sample.messages:
        shown["messages"] = [_message(message) for message in sample.messages]
    if pieces is not None and sample.tokens:
        shown["segments"] = pieces.segments(sample, gaps)
    return shown


def _message(message: Mapping[str, Any]) -> Json:
    content = message.get("content")
    shown: Json = {"role": str(message.get("role", ""))}
    if isinstance(content, list) and (images := _names(content)):
        shown["images"] = images
        content = "".join(part_text(part) for part in content if not _names([part]))
    shown["content"] = content if content is None else _text(content)
    if message.get("name"):
        shown["name"] = str(message["name"])
    calls = message.get("tool_calls")
    if calls:
        shown["calls"] = [_text(call.get("function", call) if isinstance(call, dict) else call) for call in calls]
    return shown


def _names(content: Sequence[Any]) -> list[str]:
    """Return the names of the images among a message's parts."""
    parts = [part for part in content if isinstance(part, dict) and part.get("type") == "image"]
    return [str(part["image"]) for part in parts if part.get("image")]


def _text(content: Any) -> str:
    return clipped(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))
