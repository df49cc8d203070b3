#!/usr/bin/env python3
"""Hold the planner to account: predict runs from the rates of other runs, make them, and compare. Writes a CSV.

    .venv/bin/python scripts/bench_plan.py              # 4 runs that are fitted, 9 predicted ones, twice: 45 minutes
    .venv/bin/python scripts/bench_plan.py --compare    # only predict, and compare with the runs that are there

A prediction simulates the run's config with the rates and the lengths of answers of another run of its round: none of
its figures comes from the run that is predicted. How much busy processes slow each other is taken from "toy" and "toy,
lag 1", for all of them. Compared are means over the rounds, and in each over all steps but the first and the last few.
A prediction is within the limit if its seconds of a step are within 15%, the seconds of each part of the step differ by
at most 15% of the step, the idle shares by at most 0.15, and the age of the policy by at most 15% or 0.15 steps. The
column `again` is the largest of the rounds over the smallest: what the same run measures twice. The runs stay in
outputs/bench_plan: after Ctrl-C the same command makes the missing ones.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.async_overlap import LONG_TAILED, WORKLOAD
from bench.rows import BENCHMARKS, RUN, append_rows, metric_lines, ran_on, run_to_end
from titan_rl.tools.plan.advice import simulated
from titan_rl.tools.plan.measured import config_of, rates_of

SCRIPTS = Path(__file__).resolve().parent
LIMIT = 0.15
FIRST, LAST = 8, 6  # steps left out: a run's initial backlog, and its end, when nothing is left to generate
COMMON = {
    **{"eval.size": 0, "checkpoint.enable": "false", "metrics.trackers": "[]", "algorithm.max_dead_steps": 0},
    "hosts.threads": 1,  # processes with other numbers of threads have other rates
}
SMOLLM2 = {"rollout.groups_per_step": 4}
CALC = {"cold_start.steps": 100, "cold_start.stop_at": 0, "environment.lockstep": "false"}
TURN_SECONDS = 0.5
SLOW = {"environment.name": "bench.slow_calc:SlowCalc", "environment.args": f"{{ seconds = {TURN_SECONDS} }}"}
LAG_1 = {"rollout.max_staleness_steps": 1}
BESIDE = ("toy", "toy, lag 1")  # the second one tells how much a trainer and an engine slow each other
MEASURES = (
    *("time/step", "time/generate", "time/judge", "time/train", "time/sync", "time/wait"),
    *("bubble/trainer", "bubble/generator", "policy_age/mean", "policy_age/max"),
)
WIDTHS = (26, 16, 9, 9, 5, 6, 5)


@dataclass(frozen=True, slots=True)
class Case:
    """A run of a config with some keys. Its rates are taken, or the rates of the case `by` predict it."""

    config: str
    keys: Mapping[str, Any]
    by: str = ""
    steps: int = 30  # that are compared
    turn_seconds: float = 0.0  # seconds that its tools add to a turn of the case `by`

    @property
    def overrides(self) -> dict[str, Any]:
        return {**COMMON, **self.keys, "training.steps": FIRST + self.steps + LAST}

    def but(self, by: str, keys: Mapping[str, Any], turn_seconds: float = 0.0) -> "Case":
        return replace(self, keys={**self.keys, **keys}, by=by, turn_seconds=turn_seconds)


TOY, SMALL, TURNS = Case("grpo_llama", WORKLOAD), Case("grpo_smollm2", SMOLLM2, steps=8), Case("calc_llama", CALC)
CASES = {
    "toy": TOY,
    "toy, lag 1": replace(TOY, keys={**WORKLOAD, **LAG_1}),
    "toy, lag 4": TOY.but("toy", {"rollout.max_staleness_steps": 4}),
    "toy, lag 2, window 2": TOY.but("toy", {"rollout.max_staleness_steps": 4, "rollout.overtake_steps": 2}),
    "toy, streamed": TOY.but("toy", {"training.stream_groups": 4}),
    "toy, 2 replicas": TOY.but("toy", {"generator.replicas": 2}),
    "SmolLM2": SMALL,
    "SmolLM2, lag 1": SMALL.but("SmolLM2", LAG_1),
    "SmolLM2, lag 4": SMALL.but("SmolLM2", {"rollout.max_staleness_steps": 4}),
    "SmolLM2, twice the groups": SMALL.but("SmolLM2", {"rollout.groups_per_step": 8}),
    "turns": TURNS,
    "turns, slow tools": TURNS.but("turns", SLOW, TURN_SECONDS),
    "turns, slow tools, lag 1": TURNS.but("turns", {**SLOW, **LAG_1}, TURN_SECONDS),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=SCRIPTS.parent / "outputs" / "bench_plan", help="of the runs")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "plan.csv")
    parser.add_argument("--compare", action="store_true", help="only predict, and compare with the runs that are there")
    a = parser.parse_args()
    rounds = [a.folder / str(k + 1) for k in range(a.rounds)]
    names = dict.fromkeys([*BESIDE, *(by for name in a.cases if (by := CASES[name].by)), *a.cases])
    missing = [(folder, name) for folder, name in product(rounds, names) if not folder_of(name, folder).is_dir()]
    if a.compare and missing:
        parser.error(f"--compare: expected all runs in {a.folder}, found none of {'; '.join(n for _, n in missing)}")
    for folder, name in missing:
        print(f"{folder.name}: {name}...", flush=True)
        make(CASES[name], folder_of(name, folder))
    predicted = [name for name in a.cases if CASES[name].by]
    cores = cores_of(rounds)
    rows = [row for name in predicted for row in compared(name, rounds, cores)]
    for row in [dict.fromkeys(rows[0], ""), *rows] if rows else []:
        cells = zip(row, row.values(), WIDTHS, strict=True)
        print("  ".join(f"{value or name:>{width}}" for name, value, width in cells))
    within = set(predicted) - {row["case"] for row in rows if row["within"] == "no"}
    print(f"two busy cores do the work of {cores:.2f}; {len(within)} of {len(predicted)} runs are within {LIMIT:.0%}")
    append_rows(a.csv, [row | ran_on() for row in rows])
    return 0


def folder_of(name: str, folder: Path) -> Path:
    return folder / name.replace(",", "").replace(" ", "_")


def make(case: Case, folder: Path) -> None:
    """Make a run, whose folder is there only once it has finished."""
    begun = folder.with_name(f"{folder.name}.begun")
    shutil.rmtree(begun, ignore_errors=True)
    os.environ["PYTHONPATH"] = str(SCRIPTS)  # the environment processes import bench.slow_calc
    program = (str(LONG_TAILED),) if case.config == TOY.config else RUN
    run_to_end({**case.overrides, "job.dump_folder": begun}, program, case.config)
    begun.rename(folder)


def compared(name: str, rounds: Sequence[Path], cores: float) -> Iterator[dict[str, str]]:
    """Predict a case in each round, and yield a row per measure."""
    case = CASES[name]
    runs = [metric_lines(folder_of(name, folder), "rl") for folder in rounds]
    simulations = [prediction(name, folder, cores) for folder in rounds]
    step = fmean(mean(run, "time/step", case) for run in runs)
    for key in MEASURES:
        each = [mean(run, key, case) for run in runs]
        measured, predicted = fmean(each), fmean(mean(run, key, case) for run in simulations)
        whole = {"time": step, "bubble": 1.0}.get(key.partition("/")[0], max(1.0, measured))
        yield {
            "case": name,
            "measure": key,
            "predicted": f"{predicted:.3f}",
            "measured": f"{measured:.3f}",
            "ratio": f"{predicted / measured:.2f}" if measured > whole / 100 else "-",
            "within": "yes" if abs(predicted - measured) <= LIMIT * whole else "no",
            "again": f"{max(each) / min(each):.2f}" if min(each) > whole / 100 else "-",
        }


def prediction(name: str, folder: Path, cores: float) -> Sequence[Mapping[str, Any]]:
    """Return the simulated steps of a case by the rates that its round measured."""
    case = CASES[name]
    _, rates, work = rates_of(folder_of(case.by, folder), cores)
    tools, more = rates.environment, case.turn_seconds
    rates = replace(rates, environment=replace(tools, mean=tools.mean + more, most=tools.most + more))
    config = config_of(folder_of(name, folder))
    return simulated(config, rates, work, config.training.steps).steps


def cores_of(rounds: Sequence[Path]) -> float:
    """Return how many times the work of one busy core two of them do, by the seconds of trainers without and with a
    busy engine beside them."""
    alone, beside = (
        [line for folder in rounds for line in metric_lines(folder_of(name, folder), "rl")[FIRST:-LAST]]
        for name in BESIDE
    )
    without, with_engine = (fmean(line["engine/training_seconds"] for line in lines) for lines in (alone, beside))
    return 2 / max(1.0, 1 + (with_engine / without - 1) / fmean(line["overlap"] for line in beside))


def mean(lines: Sequence[Mapping[str, Any]], key: str, case: Case) -> float:
    return fmean(line[key] for line in lines[FIRST : FIRST + case.steps])


if __name__ == "__main__":
    sys.exit(main())
