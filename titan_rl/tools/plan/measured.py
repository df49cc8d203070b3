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

from titan_rl.batch.experience import minibatches
from titan_rl.batch.packing import fitted
from titan_rl.config.auto import BLOCK_TOKENS, on_device, resolved
from titan_rl.config.sections import Config
from titan_rl.preflight.memory import on_cpu
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.lines import whole_lines
from titan_rl.record.run_names import TIMELINE
from titan_rl.tools.inspect.recorded_run import NoRun, RecordedRun
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.tools.inspect.samples import RunSample
from titan_rl.tools.plan.rates import NOTHING, EngineRates, Rates, Spread, SyncRates, TrainerRates, Work, threads_of
from titan_rl.train.learner import Packer
from titan_rl.wire import types as wire
from titan_rl.wire.cores import host_memory, usable_cores

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


def rates_of(folder: Path, cores: float = 0.0) -> tuple[Config, Rates, Work]:
    """Return the config of a run, the rates that its parts had, and the tokens of its rollouts. Raise NoRun without
    enough steps. `cores`: how many times the work of one busy core all of them do; 0: they do not slow each other."""
    cores = cores or float(usable_cores())
    lines, config = steps_of(folder), config_of(folder)
    cpu = "memory/max_reserved_gib" not in lines[-1]
    samples = RunFiles(folder).samples()
    by_step = [samples.of_step(int(line["step"])) for line in lines]
    found = [sample for step in by_step for sample in step]
    if not any(sample.sampled for sample in found):
        raise NoRun(f"found no rollouts of its steps in {folder}")
    work = work_of(found)
    began = min(line["time"] - line["time/step"] for line in lines)
    spans = [span for span in spans_of(folder) if span.begin >= began]
    packer = Packer.of(config, resolved_of(config, cpu), 0)
    places = sum(places_of(step, config, packer) for step in by_step if step)
    of_replica, of_rank = (min(cores, number) * float(cpu) for number in threads_of(config))
    engines = of_replica * config.generator.replicas * config.generator.tensor_parallel_degree
    trainers = of_rank * config.parallelism.world_size
    overlap = fmean(line["overlap"] for line in lines)

    def slow(alone: float) -> float:
        """Return how many times as long a side takes that alone keeps these cores busy."""
        return (1 - overlap) * max(1.0, alone / cores) + overlap * max(1.0, (engines + trainers) / cores)

    def mean(key: str) -> float:
        return fmean(line.get(key, 0.0) for line in lines)

    trainer = trainer_rates(spans, places, len(lines), slow(trainers), of_rank)
    block = BLOCK_TOKENS["cpu" if cpu else "cuda"]
    return (
        config,
        Rates(
            engine_rates(spans, slow(engines), of_replica, trainer.score_s, block),
            trainer,
            SyncRates(mean("sync/publish_seconds"), mean("sync/read_seconds"), mean("sync/pause_seconds")),
            judge=spread([span.seconds for span in spans if span.name == "judge"]),
            environment=spread([*between_turns(spans)]),
            step_s=median(line["time/wait"] for line in lines),
            cores=cores if cpu else math.inf,
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
    config, why = RunFiles(folder).config_or_why()
    if config is None:
        raise NoRun(f"found no config that can be read in {folder}: {why}")
    lines = RecordedRun.read(folder).steps
    return on_device(config, "cuda" if "memory/max_reserved_gib" in lines[-1] else "cpu")


def engine_rates(spans: list[Stretched], slow: float, cores: float, forward_s: float, block: int) -> EngineRates:
    """Fit seconds = step_s x steps + sequence_s x tokens + prefill_s x read tokens to the engines' spans. A few read
    tokens say nothing of their seconds: with fewer than sampled ones each takes a trainer's forward pass of a place."""
    own = [span for span in spans if span.name == "sampling" and span.args.get("steps")]
    counts = np.array([[span.args.get(key, 0) for key in COUNTS] for span in own], float).reshape(-1, len(COUNTS))
    seconds = np.array([span.seconds for span in own]) / slow
    _, tokens, read = counts.T
    if read.sum() < tokens.sum():
        step, token, prefill = *_positive(counts[:, :2], seconds - read * forward_s), forward_s
    else:
        step, token, prefill = _positive(counts, seconds)
    return EngineRates(step_s=step, sequence_s=token, prefill_s=prefill, block=block, cores=cores)


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


def places_of(samples: list[RunSample], config: Config, packer: Packer) -> float:
    """Return the places of a step, padding included, that a rank would compute if answers shared only their prompt: a
    simulated rank computes these, because simulated answers have no text."""
    t, dp = config.training, config.parallelism.dp
    trained = list[wire.Sample]()
    for k, sample in enumerate(samples):
        prompt, size = _prompt(sample), min(len(sample.tokens), t.seq_len + 1)
        tokens = np.where(np.arange(size) < prompt, sample.prompt_id, -1 - k)
        trained.append(wire.Sample(tokens, sample.mask[:size], prompt=prompt, sequence=k))
    parts = minibatches(trained, config.algorithm, config.rollout.group_size)
    fits = (fitted(part, dp, t.seq_len, packer.rows, share=packer.share)[0] for part in parts)
    return sum(fit.places for fit in fits) / dp


def resolved_of(config: Config, cpu: bool) -> Config:
    """Return the config as the ranks of this machine, or of one with GPUs, work with it."""
    return on_cpu(config, shape_of(config.model), host_memory()) if cpu else resolved(config, "cuda")


def work_of(samples: list[RunSample]) -> Work:
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
    for line in whole_lines(folder / TIMELINE):
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


def _prompt(sample: RunSample) -> int:
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
