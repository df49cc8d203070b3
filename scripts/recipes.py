#!/usr/bin/env python3
"""Write docs/recipes.md: every shipped config, and its scores before and after in kept runs.

    .venv/bin/python scripts/recipes.py                                            # from docs/benchmarks/*.csv
    .venv/bin/python scripts/recipes.py --run grpo_smollm2_mixed --seeds 0 1 2     # run a config first

--run appends a row per run to recipes.csv: its held-out scores and the seconds since the command, the verdict of
`titan_rl audit`, the causes that `titan_rl why` names, the commit and the machine. The run stays in its folder, below
--folder. A config and a seed that have a row are not run again: after Ctrl-C the same command continues.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from bench.rows import BENCHMARKS, append_rows, csv_rows, curve_columns, metric_lines, points_of, ran_on, run_to_end
from titan_rl.config.policies import POLICIES
from titan_rl.config.toml import ConfigError, find, load, planned, variants
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.tools.inspect.variants import mean_of
from titan_rl.wire.program import DONE, USAGE

ROWS, PAGE = BENCHMARKS / "recipes.csv", BENCHMARKS.parent / "recipes.md"
STORIES = {
    "Start": ("grpo_llama",),
    "A real model": ("grpo_smollm2", "grpo_smollm2_mixed"),
    "Your own rows, and code that is run": ("code_smollm2",),
    "Tools, environments, agents": ("calc_llama", "hunt_llama", "calc_agent_llama"),
    "Self-play": ("kuhn_llama", "tic_tac_toe_llama"),
    "Adapters": ("grpo_smollm2_lora", "policies_smollm2", "tinker_smollm2"),
    "Given answers and preferences": ("sft_llama", "dpo_llama", "reward_model_llama"),
    "Distillation": ("sdpo_smollm2",),
    "Asynchrony": ("grpo_llama_async",),
    "Images": ("count_squares",),
    "Other algorithms": ("rloo_llama",),
}
"""The configs that are files, each in one story."""
SCORE = "held-out score"
WAYS = {
    "smollm2.csv": ("titan_rl", "grpo_smollm2"),
    "smollm2_lora.csv": ("titan_rl, LoRA", "grpo_smollm2_lora"),
}
"""CSVs of other benchmarks, and the way in them that runs a config as it is shipped."""
GAMES = {
    "exploitability": "exploitability, 0 at an equilibrium",
    "perfect: drawn": "games drawn with a perfect player",
    "random: won": "games won against a random player",
}
"""Measures of self_play.csv, as the page names them."""
SHOWN = 5  # points of a curve
HEAD = """\
# Which configs are shipped, and what do they learn?

`scripts/recipes.py` makes this page of the rows in [benchmarks](benchmarks.md)' CSVs. A row of a table is the mean of a
config's runs, a seed each; "±" is the 95% interval over seeds (Student's t), and the curve has five evaluations from
first to last. Seconds count from the command on the machine that is named, start-up and evaluations included, with the
load that it had: other programs slow a run down. The last two columns are the verdict of `titan_rl audit` and the
causes that `titan_rl why` names, empty where runs are older than this page. To repeat a proof:

```
.venv/bin/python scripts/recipes.py --run grpo_smollm2 --seeds 0 1 2
```

`./scripts/run --config NAME` starts a config; `base = "NAME"` on the first line of a TOML starts from it.
"""

Runs = Sequence[Mapping[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", default=[], metavar="NAME", help="configs to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("outputs/recipes"), help="where the runs stay")
    parser.add_argument("--csv", type=Path, default=ROWS)
    a = parser.parse_args()
    try:
        configs = {find(given).stem: given for given in a.run}
        unscored = [name for name, given in configs.items() if not load(find(given)).eval.size]
    except ConfigError as error:
        parser.error(str(error))
    if unscored:
        parser.error(f"--run: expected configs whose eval.size is above 0, found {', '.join(unscored)}")
    there = {(row["config"], row["seed"]) for row in csv_rows(a.csv)}
    for seed in a.seeds:
        for name, config in configs.items():
            if (name, str(seed)) not in there:
                rows = list(proven(config, seed, a.folder / f"{name}_{seed}"))
                append_rows(a.csv, [{"config": name, "seed": seed, **row, **ran_on()} for row in rows])
                for row in rows:
                    print(f"{name}, seed {seed}: {row['curve']}; {row['audit']}; {row['why']}", flush=True)
    PAGE.write_text(page(), encoding="utf-8")


def proven(config: str, seed: int, folder: Path) -> Iterator[dict[str, str]]:
    """Run a config in a folder from its first step. Yield the scores of each policy, its audit and its diagnosis."""
    began = time.time()
    run_to_end({"debug.seed": seed, "job.dump_folder": folder, "job.fresh": "true"}, config=config)
    wall = time.time() - began
    for run in sorted((folder / POLICIES).glob("*")) or [folder]:
        lines = metric_lines(run, "eval", "rl", "fit")
        points = [(line["step"], line["time"] - began, line[EVAL_SCORE]) for line in lines if EVAL_SCORE in line]
        code, said = checked("audit", run)
        diagnosis = json.loads(checked("why", run, "--json")[1])
        causes = [finding["rule"] for finding in diagnosis["findings"] if finding["severity"] == "problem"]
        yield {
            "steps": str(max(line["step"] for line in lines)),
            **curve_columns(points),
            "wall_s": f"{wall:.0f}",
            "audit": {DONE: "clean", USAGE: "no ledger"}.get(code) or said.splitlines()[-1],
            "why": ", ".join(causes) or "no problem",
            "policy": run.name if run != folder else "",
        }


def checked(tool: str, folder: Path, *flags: str) -> tuple[int, str]:
    """Run a tool on a run's folder, and return its exit code and its output."""
    done = subprocess.run(
        [sys.executable, "-m", "titan_rl", tool, str(folder), *flags], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout or done.stderr


def kept() -> dict[str, dict[str, Runs]]:
    """Return the newest run of each seed, by config and measure. A row of recipes.csv replaces all of other CSVs."""
    found: defaultdict[str, dict[str, dict[str, Mapping[str, str]]]] = defaultdict(dict)
    for row in (*earlier(), *csv_rows(ROWS)):
        of_policy = f" of {policy}" if (policy := row.get("policy")) else ""
        measure = row.get("measure", SCORE) + of_policy
        runs = found[row["config"]].setdefault(measure, {})
        if "audit" in row and any("audit" not in run for run in runs.values()):
            runs.clear()
        runs[row["seed"]] = row
    return {config: {name: [*runs.values()] for name, runs in each.items()} for config, each in found.items()}


def earlier() -> Iterator[dict[str, str]]:
    """Yield the rows of other benchmarks that are runs of a config as it is shipped."""
    for file, (way, config) in WAYS.items():
        yield from (row | {"config": config} for row in csv_rows(BENCHMARKS / file) if row["way"] == way)
    yield from (row for row in csv_rows(BENCHMARKS / "learning.csv") if row["variant"] == "as it is")
    for row in csv_rows(BENCHMARKS / "self_play.csv"):
        if row["measure"] in GAMES:
            yield row | {"config": f"{row['game']}_llama", "measure": GAMES[row["measure"]]}


def without_runs(name: str, runs: Container[str]) -> str:
    if name in runs:
        return ""
    return " (no kept run)" if load(find(name)).eval.size else " ([by their scripts](tinker.md))"


def page() -> str:
    """Return docs/recipes.md."""
    runs, lines = kept(), [HEAD]
    for story, names in STORIES.items():
        lines += [f"## {story}", ""]
        lines += [f"- `{name}`: {described(name)}{without_runs(name, runs)}" for name in names]
        lines += [*table_of(names, runs), ""]
    lines += ["## Variants", "", "Tables of `train_configs/variants.toml`: a few keys over another config.", ""]
    lines += [table_line(["`--config`", "over", "shows"]), table_line(["---"] * 3)]
    lines += [table_line([f"`{name}`", f"`{table['base']}`", described(name)]) for name, table in variants().items()]
    lines += table_of([*variants()], runs)
    lines += ["", "## GPUs", "", "Planned, never run on the hardware that they are for. `--dry-run` and `--scale tiny`"]
    lines += ["check them anywhere, `titan_rl plan` sizes them.", ""]
    lines += [f"- `{name}`: {described(name)}" for name in planned()]
    return "\n".join(lines) + "\n"


def table_of(names: Sequence[str], runs: Mapping[str, Mapping[str, Runs]]) -> list[str]:
    """Return the lines of a table of these configs' runs; none without a run."""
    rows = [cells(name, measure, found) for name in names for measure, found in runs.get(name, {}).items()]
    columns = ("config", "measure", "before", "after", "curve", "seeds", "seconds (load)")
    columns += ("machine, commit", "audit", "causes")
    head = ["", table_line(columns), table_line(["---"] * len(columns))]
    return [*head, *map(table_line, rows)] if rows else []


def described(name: str) -> str:
    return load(find(name)).job.description


def cells(name: str, measure: str, runs: Runs) -> list[str]:
    """Return the cells of a config's runs."""
    curves = [points_of(run["curve"]) for run in runs]
    steps = sorted(set.intersection(*map(set, curves)))
    points = [steps[round(place * (len(steps) - 1) / (SHOWN - 1))] for place in range(SHOWN)]
    seconds = [float(run.get("wall_s") or max(points_of(run["seconds"]).values())) for run in runs]
    load_then = statistics.median(float(run["load"]) for run in runs)
    places = {f"{run['machine']}, {run['commit'][:8]}": 0 for run in runs}
    return [
        f"`{name}`",
        measure,
        f"{statistics.fmean(curve[steps[0]] for curve in curves):.3f}",
        interval([curve[steps[-1]] for curve in curves]),
        " ".join(f"{statistics.fmean(curve[step] for curve in curves):.2f}" for step in points),
        " ".join(sorted(run["seed"] for run in runs)),
        f"{statistics.median(seconds):.0f} ({load_then:.0f})",
        "; ".join(places).replace("(R)", "").replace(" Processor", ""),
        "; ".join(dict.fromkeys(run.get("audit", "") for run in runs)),
        "; ".join(dict.fromkeys(run.get("why", "") for run in runs)),
    ]


def interval(values: Sequence[float]) -> str:
    """Return the mean of one value per seed, and half of its 95% interval."""
    mean = mean_of(values)
    half = "" if math.isnan(mean.low) else f" ± {mean.high - mean.value:.3f}"
    return f"{mean.value:.3f}{half}"


def table_line(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


if __name__ == "__main__":
    main()
