#!/usr/bin/env python3
"""Measure what self-play learns in games whose best play is known. Appends a row per run.

    .venv/bin/python scripts/bench_self_play.py                # Kuhn poker and tic-tac-toe, 3 seeds each
    .venv/bin/python scripts/bench_self_play.py --games kuhn --seeds 1
    .venv/bin/python scripts/bench_self_play.py --plot         # only plot the CSV

Kuhn poker: exploitability of the hands that were played in a window of steps, 0 at an equilibrium. Tic-tac-toe: shares
of held-out games that were won, drawn and lost against a perfect player and one that moves at random. Runs that have a
row are not repeated.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import kuhn_value
from bench.axes import COLORS, Axes, legend, look_of, svg
from bench.rows import BENCHMARKS, append_rows, csv_rows, ran_on, run_to_end
from titan_rl.ext.agents import kuhn
from titan_rl.ext.agents.tic_tac_toe import AGAINST, OPPONENTS

CONFIGS = {"kuhn": "kuhn_llama", "tic_tac_toe": "tic_tac_toe_llama"}
WINDOW = 20  # steps


def exploitability(folder: Path) -> dict[str, dict[int, float]]:
    """Return the exploitability of each window's hands, by its last step."""
    hands = defaultdict[int, list[tuple[str, str]]](list)
    with (folder / "rollouts.jsonl").open() as lines:
        for line in map(json.loads, lines):
            said = [message["content"] for message in line["messages"] if message["role"] == "assistant"]
            window = -(-line["step"] // WINDOW) * WINDOW
            hands[window].append((line["answer"], "".join(map(kuhn.move_of, said))))
    return {
        "exploitability": {step: kuhn_value.exploitability(kuhn_value.played(played)) for step, played in hands.items()}
    }


def results(folder: Path) -> dict[str, dict[int, float]]:
    """Return the shares of won, drawn and lost held-out games against each opponent, by step."""
    found = defaultdict[str, dict[int, float]](dict)
    with (folder / "evaluations.jsonl").open() as lines:
        for line in map(json.loads, lines):
            rewards = [(int(problem), reward) for problem, (reward,) in line["rewards"].items()]
            for opponent in OPPONENTS:
                own = [reward for n, reward in rewards if AGAINST[n % len(AGAINST)][0] == opponent]
                for result, name in ((1, "won"), (0, "drawn"), (-1, "lost")):
                    found[f"{opponent}: {name}"][line["step"]] = own.count(result) / len(own)
    return found


MEASURES = {"kuhn": exploitability, "tic_tac_toe": results}


def measured(game: str, seed: int) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        run_to_end({"debug.seed": seed, "job.dump_folder": folder}, config=CONFIGS[game])
        seconds = time.monotonic() - began
        curves = MEASURES[game](Path(folder))
    return [
        {
            "game": game,
            "seed": str(seed),
            "measure": measure,
            "start": f"{curve[min(curve)]:.4f}",
            "final": f"{curve[max(curve)]:.4f}",
            "curve": " ".join(f"{step}:{value:.4f}" for step, value in sorted(curve.items())),
            "wall_s": f"{seconds:.0f}",
        }
        for measure, curve in curves.items()
    ]


PLOTS = {
    "kuhn": ("self_play", "Kuhn poker: exploitability", {"exploitability": False}),
    "tic_tac_toe": (
        "self_play_tic_tac_toe",
        "Tic-tac-toe: shares of held-out games",
        {"perfect: drawn": False, "random: won": True},
    ),
}
"""The file of each game, its title, and its measures; True: dashed."""


def plot(title: str, measures: Mapping[str, bool], rows: Sequence[Mapping[str, str]]) -> str:
    """Draw measures of every run of a game."""
    own = [row for row in rows if row["measure"] in measures]
    curves = [{int(s): float(v) for s, v in (p.split(":") for p in row["curve"].split())} for row in own]
    axes = Axes(most=max(map(max, curves)), floor=0.0)
    drawn = axes.grid(f"{title} by step", "step")
    for place, (row, curve) in enumerate(zip(own, curves, strict=True)):
        look = look_of(COLORS[(int(row["seed"]) - 1) % len(COLORS)], dashed=measures[row["measure"]])
        words = f"seed {row['seed']}" + (f", {row['measure']}" if len(measures) > 1 else "")
        drawn += [axes.line(curve, look), *legend(place, words, look)]
    return svg(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to SEEDS (default: 3)")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "self_play.csv")
    parser.add_argument("--plot", action="store_true", help="only plot the CSV")
    a = parser.parse_args()
    there = {(row["game"], row["seed"]) for row in csv_rows(a.csv)}
    for game in a.games if not a.plot else ():
        for seed in range(1, a.seeds + 1):
            if (game, str(seed)) not in there:
                rows = measured(game, seed)
                append_rows(a.csv, [row | ran_on() for row in rows])
                for row in rows:
                    print(f"{game}, seed {seed}: {row['measure']} {row['start']} -> {row['final']}", flush=True)
    for game, (file, title, measures) in PLOTS.items():
        if rows := [row for row in csv_rows(a.csv) if row["game"] == game]:
            a.csv.with_name(f"{file}.svg").write_text(plot(title, measures, rows))


if __name__ == "__main__":
    main()
