#!/usr/bin/env python3
"""Measure TorchTitan's own RL loop next to titan_rl: same task, model shape and batch, on this CPU. Appends to a CSV.

    .venv/bin/python scripts/bench_peer.py --torchtitan PATH                     # everything: about 20 minutes
    .venv/bin/python scripts/bench_peer.py --torchtitan PATH --parts time --shapes toy --rounds 3
    .venv/bin/python scripts/bench_peer.py --table                               # only print the CSV

PATH is a checkout of TorchTitan with two contributions of docs/upstream applied: import-without-triton, and rl-on-cpu
in its form of the folder `earlier`. Their README files have the commit and the commands. TorchTitan needs torchstore,
renderers and their requirements besides, installed here or on PYTHONPATH.

time      a whole run per way and round, in turn: seconds of a step and of its parts, of the start, of all, and memory
lines     lines of code of the modules that a run of two steps executes
faults    kill -9 of the trainer, the generator and the controller: does the run finish, and with the same prompts?

A step lasts from the end of the one before it to its own end, as a median after warm-up. Memory is the peak of the
proportional set sizes of all processes of a run. Ratios are TorchTitan / titan_rl.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tomli
from rich.console import Console
from rich.table import Table

from bench.peer_faults import VICTIMS, survive
from bench.peer_lines import imported
from bench.peer_runs import OURS, PEER, SCRIPTS, WAYS, refusal, temporary, timed
from bench.peer_shapes import SHAPES
from bench.rows import BENCHMARKS, append_rows, csv_rows, in_turn, ran_on

CHOICES = ("time", "lines", "faults")
SMALL = "toy"  # shape for faults and lines
USAGE = 2
Rows = Sequence[Mapping[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchtitan", type=Path, metavar="PATH", help="a patched checkout")
    parser.add_argument("--parts", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "peer_torchtitan.csv")
    parser.add_argument("--table", action="store_true", help="only print the CSV")
    a = parser.parse_args()
    if not a.table:
        if reason := refusal(a.torchtitan):
            print(f"bench_peer.py: {reason}", file=sys.stderr)
            sys.exit(USAGE)
        measure(a.csv, a.torchtitan.resolve(), a.parts, a.shapes, a.rounds)
    for name, lines in tables(csv_rows(a.csv)).items():
        table = Table(title=name, title_justify="left")
        for column in ("", *WAYS, "ratio"):
            table.add_column(column, justify="left" if not column else "right")
        for line in lines:
            table.add_row(*line)
        Console(width=None if sys.stdout.isatty() else 200).print(table)


def measure(path: Path, checkout: Path, parts: Sequence[str], shapes: Sequence[str], rounds: int) -> None:
    """Append a row per figure as soon as it is measured."""
    if "lines" in parts:
        for way in WAYS:
            for part, (files, lines) in imported(way, SMALL, checkout).items():
                append(path, SMALL, way, {f"lines of code {part}": lines}, note=f"{files} files")
    if "time" in parts:
        for shape in shapes:
            for _, way in in_turn(WAYS, rounds):
                load = f"{os.getloadavg()[0]:.1f}"  # before the run adds its own
                with temporary() as folder:
                    append(path, shape, way, timed(way, shape, checkout, Path(folder)), load=load)
    if "faults" in parts:
        for victim in VICTIMS:
            for way in WAYS:
                outcome = survive(way, victim, SMALL, checkout)
                append(path, SMALL, way, {f"killed {victim} to next step, s": outcome.seconds}, note=outcome.text())


def append(path: Path, shape: str, way: str, figures: Mapping[str, float], note: str = "", load: str = "") -> None:
    host = ran_on() | ({"load": load} if load else {})
    if way == PEER:
        host["engines"] += f", TorchTitan's loop at {base()}"
    rows = [
        {"shape": shape, "way": way, "measure": measure, "value": f"{value:.6g}", "note": note, **host}
        for measure, value in figures.items()
    ]
    append_rows(path, rows)
    for row in rows:
        print(f"{shape}, {way}: {row['measure']} {row['value']} {note}", flush=True)


def base() -> str:
    """Return the commit that the applied contribution was made against."""
    contribution = SCRIPTS.parent / "docs/upstream/rl-on-cpu/contribution.toml"
    return tomli.loads(contribution.read_text())["base"] if contribution.exists() else "an unknown commit"


def tables(rows: Rows) -> dict[str, list[tuple[str, str, str, str]]]:
    """Return the lines of a table per shape: a measure, its values in both ways, and the ratio of their medians. A
    measure has, of each way, the rows of the commit that measured it last."""
    found = dict[str, list[tuple[str, str, str, str]]]()
    for shape in dict.fromkeys(row["shape"] for row in rows):
        own = [row for row in rows if row["shape"] == shape]
        found[shape] = list(table_lines(own))
    return found


def table_lines(rows: Rows) -> Iterator[tuple[str, str, str, str]]:
    for measure in dict.fromkeys(row["measure"] for row in rows):
        same = [row for row in rows if row["measure"] == measure]
        newest = {row["way"]: row["commit"] for row in same}
        same = [row for row in same if row["commit"] == newest[row["way"]]]
        values = {way: [float(row["value"]) for row in same if row["way"] == way] for way in WAYS}
        notes = {way: next((row["note"] for row in reversed(same) if row["way"] == way), "") for way in WAYS}
        ours, peers = (statistics.median(values[way]) if values[way] else 0.0 for way in (OURS, PEER))
        ratio = f"{peers / ours:.2f}" if ours and peers else ""
        yield measure, shown(values[OURS], notes[OURS]), shown(values[PEER], notes[PEER]), ratio


def shown(values: Sequence[float], note: str) -> str:
    if not values:
        return ""
    low, middle, high = (f"{figure:.4g}" for figure in (min(values), statistics.median(values), max(values)))
    return middle + f" ({low} to {high})" * (len(values) > 1) + f"; {note}" * bool(note)


if __name__ == "__main__":
    main()
