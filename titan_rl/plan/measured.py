"""Takes the rates of a run's parts from its folder: metrics.jsonl, timeline.json and rollouts.jsonl."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median, pstdev

import numpy as np

from titan_rl.config.auto import on_device, threads
from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError, load_of_run
from titan_rl.plan.rates import NOTHING, EngineRates, Rates, Spread, SyncRates, TrainerRates, Work
from titan_rl.record.lines import whole_lines
from titan_rl.record.recorded_run import NoRun, RecordedRun
from titan_rl.record.samples import Sample, Samples
from titan_rl.wire.cores import usable_cores

COUNTS = ("steps", "tokens", "read")
"""Args of an engine's spans."""
SKIPPED = 2  # first steps, which start and compile


@dataclass(frozen=True, slots=True)
class Stretched:
    """A span of timeline.json."""

    rank: str
    name: str
    begin: float  # seconds since 1970
    seconds: float
    args: Mapping[str, float]
    id: int | None = None  # the prompt's or the rollout's


def rates_of(folder: Path) -> tuple[Config, Rates, Work]:
    """Return the config of a run, the rates that its parts had, and the tokens of its rollouts. Raise NoRun without
    enough steps."""
    lines, config = steps_of(folder), config_of(folder)
    samples, shared = Samples(folder), fmean(line.get("tokens/shared", 0.0) for line in lines)
    steps = {int(line["step"]) for line in lines}
    found = [sample for step in sorted(steps) for sample in samples.of_step(step)]
    if not any(sample.sampled for sample in found):
        raise NoRun(f"found no rollouts of its steps in {folder}")
    work = work_of(found)
    began = min(line["time"] - line["time/step"] for line in lines)
    spans = [span for span in spans_of(folder) if span.begin >= began]
    places = (1 - shared) * sum(len(s.tokens) - 1 for s in found) / config.parallelism.dp
    on_cpu = "memory/max_reserved_gib" not in lines[-1]
    cores = usable_cores()
    busy = [threads(config, kind, "cpu", cores) * float(on_cpu) for kind in ("generator", "model")]
    asked = busy[0] * config.generator.replicas * config.generator.tensor_parallel_degree
    asked += busy[1] * config.parallelism.world_size
    contended = 1 + fmean(line["overlap"] for line in lines) * (max(1.0, asked / cores) - 1) * on_cpu

    def mean(key: str) -> float:
        return fmean(line.get(key, 0.0) for line in lines)

    return (
        config,
        Rates(
            engine_rates(spans, contended, busy[0]),
            trainer_rates(spans, places, len(lines), contended, busy[1]),
            SyncRates(mean("sync/publish_seconds"), mean("sync/read_seconds"), mean("sync/pause_seconds")),
            judge=spread([span.seconds for span in spans if span.name == "judge"]),
            environment=spread([*between_turns(spans)]),
            step_s=median(line["time/wait"] for line in lines),
            cores=float(cores) if on_cpu else math.inf,
        ),
        work,
    )


def steps_of(folder: Path) -> list[Mapping[str, float]]:
    """Return the lines of the run's RL steps, without the first."""
    lines = [line for line in RecordedRun.read(folder).steps if line["kind"] == "rl"][SKIPPED:]
    if not lines:
        raise NoRun(f"found fewer than {SKIPPED + 1} RL steps in {folder}")
    return lines


def config_of(folder: Path) -> Config:
    """Return the run's config, on its device."""
    try:
        config = load_of_run(folder)
    except (ConfigError, OSError) as error:
        raise NoRun(f"found no config that can be read in {folder}: {error}") from error
    lines = RecordedRun.read(folder).steps
    return on_device(config, "cuda" if "memory/max_reserved_gib" in lines[-1] else "cpu")


def engine_rates(spans: list[Stretched], slow: float, cores: float) -> EngineRates:
    """Fit seconds = step_s x steps + sequence_s x tokens + prefill_s x read tokens to the engines' spans. Earlier runs
    did not count read tokens: the sampled ones then take their seconds too."""
    own = [span for span in spans if span.name == "sampling" and span.args.get("steps")]
    counts = np.array([[span.args.get(key, 0) for key in COUNTS] for span in own], float).reshape(-1, len(COUNTS))
    step, token, read = _positive(counts, np.array([span.seconds for span in own]) / slow)
    return EngineRates(step_s=step, sequence_s=token, prefill_s=read, cores=cores)


def trainer_rates(spans: list[Stretched], places: float, steps: int, slow: float, cores: float) -> TrainerRates:
    """`places`: computed by a rank in these steps."""
    by_name = defaultdict[str, float](float)
    own = [span for span in spans if span.rank.startswith("trainer")]
    for span in own:
        by_name[span.name] += span.seconds / slow / len({each.rank for each in own})
    computed = by_name["forward"] + by_name["backward"]
    return TrainerRates(
        update_s=max(0.0, by_name["step"] - computed) / steps,
        place_s=computed / places,
        score_s=by_name["forward"] / places,
        cores=cores,
    )


def work_of(samples: list[Sample]) -> Work:
    turns = [max(1, len(sample.turns)) for sample in samples]
    read = [
        (len(sample.tokens) - _prompt(sample) - sample.sampled) / (n - 1)
        for sample, n in zip(samples, turns, strict=True)
        if n > 1
    ]
    return Work(
        spread([_prompt(sample) for sample in samples]),
        spread([sample.sampled / n for sample, n in zip(samples, turns, strict=True)]),
        spread(turns),
        spread(read),
    )


def spread(values: list[float] | list[int]) -> Spread:
    """Return the mean, deviation and largest of some values."""
    return Spread(fmean(values), pstdev(values), max(values)) if values else NOTHING


def between_turns(spans: list[Stretched]) -> Iterator[float]:
    """Yield the seconds between a turn of a rollout and its next one, which are its environment's."""
    turns = sorted((span for span in spans if span.name == "turn"), key=lambda span: (span.id or 0, span.begin))
    for turn, following in pairwise(turns):
        if turn.id == following.id:
            yield following.begin - turn.begin - turn.seconds


def spans_of(folder: Path) -> Iterator[Stretched]:
    """Yield the spans in the run's newest timeline."""
    ranks, open_spans = dict[int, str](), dict[tuple[str, int], float]()
    for line in whole_lines(folder / "timeline.json"):
        with suppress(ValueError):  # the brackets, and a line that a kill cut off
            event = json.loads(line.rstrip(b",\n"))
            if not isinstance(event, dict):
                continue
            if event["name"] == "process_name":
                ranks[event["pid"]] = event["args"]["name"]
            elif event["ph"] == "X":
                args = {key: value for key, value in event.get("args", {}).items() if isinstance(value, int | float)}
                yield Stretched(ranks[event["pid"]], event["name"], event["ts"] / 1e6, event["dur"] / 1e6, args)
            elif event["ph"] == "b":
                open_spans[event["name"], event["id"]] = event["ts"]
            elif event["ph"] == "e" and (begin := open_spans.pop((event["name"], event["id"]), None)) is not None:
                seconds = (event["ts"] - begin) / 1e6
                yield Stretched("controller", event["name"], begin / 1e6, seconds, {}, int(event["id"]))


def _prompt(sample: Sample) -> int:
    """Return the tokens of a rollout's prompt."""
    mask = np.asarray(sample.mask)
    return int(mask.argmax()) if mask.any() else len(mask)


def _positive(counts: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return the factors of the columns, none of them negative, that fit best."""
    best, least = np.zeros(counts.shape[1]), float((seconds**2).sum())
    for chosen in product((False, True), repeat=counts.shape[1]):
        fit, used = np.zeros(counts.shape[1]), np.array(chosen)
        fit[used] = np.linalg.lstsq(counts[:, used], seconds, rcond=None)[0]
        missed = float(((counts @ fit - seconds) ** 2).sum())
        if (fit >= 0).all() and missed < least:
            best, least = fit, missed
    return best.tolist()
