"""`python -m titan_rl compare A B ...`: compare runs by their folders.

Exit codes: 0 compared, 2 bad usage, 130 stopped.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from titan_rl.config.eval_sets import HELD_OUT
from titan_rl.record.lines import strict
from titan_rl.record.plan_view import labelled, print_trimmed
from titan_rl.record.terminal import brief, duration, open_console, visible
from titan_rl.tools.inspect import comparison
from titan_rl.tools.inspect.comparison import BEST, LETTERS, SamePrompt, SetScores
from titan_rl.tools.inspect.plots import STYLES, Curve, Range, number, plot, sparkline
from titan_rl.tools.inspect.recorded_run import NoRun, RecordedRun, StepScore
from titan_rl.tools.inspect.samples import RunSample
from titan_rl.tools.inspect.score_differences import FEWEST_CHANGED, Difference
from titan_rl.wire.program import DONE, USAGE, command_of, enter

PROG = "titan_rl compare"
MOST_COLUMNS = 3  # runs with a column each in a table of settings
PLOTTED = ("held-out", "reward", "loss")
PLOT_HEIGHT = 8
SAMPLES_SHOWN = 4  # per prompt and run
VALUE_WIDTH = 200  # characters of a setting


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    try:
        runs = read(options.runs)
    except NoRun as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return USAGE
    if options.json:
        print(json.dumps(strict(comparison.as_data(runs, score=options.score, samples=options.samples))))
        return DONE
    console = open_console(sys.stdout)
    for part in view(runs, console, score=options.score, samples=options.samples):
        print_trimmed(console, part)
    return DONE


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("compare"),
        description="Compare runs: the keys that differ, scores and whether they differ by more than noise, curves, "
        "the seconds to a score, and samples of the same prompts. Nothing is changed, and runs may be active.",
        epilog="A difference is from the first run. It is beyond noise if its 95% interval over problems excludes 0; "
        "another seed can still give another result. docs/operations.md explains each part.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=f"dump folders of 2 to {len(LETTERS)} runs")
    parser.add_argument(
        "--score", metavar="X", type=float, help="score to reach; default: the best one that all reached"
    )
    parser.add_argument(
        "--samples", metavar="N", type=int, default=0, help="show samples of N prompts of the last common step"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return parser


def read(folders: Sequence[Path]) -> list[RecordedRun]:
    """Read the runs, or raise NoRun with the argument that is wrong."""
    if not 2 <= len(folders) <= len(LETTERS):
        raise NoRun(f"RUN: expected 2 to {len(LETTERS)} folders of runs, found {len(folders)}")
    runs: list[RecordedRun] = []
    for folder in folders:
        same = [run.folder for run in runs if os.path.realpath(run.folder) == os.path.realpath(folder)]
        if same:
            raise NoRun(f"RUN: expected different folders, found {same[0]} and {folder}, which are the same one")
        try:
            runs.append(RecordedRun.read(folder))
        except NoRun as error:
            raise NoRun(f"RUN: expected the dump folder of a run, with its metrics.jsonl, {error}") from None
        except OSError as error:
            raise NoRun(f"RUN: expected the dump folder of a run, found {error}") from None
    return runs


def view(
    runs: Sequence[RecordedRun], console: Console, *, score: float | None, samples: int
) -> Iterator[RenderableType]:
    yield Group(*(Text(f"warning  {text}", "yellow") for text in comparison.warnings(runs)))
    yield run_table(runs)
    yield from section("keys that differ", settings_view(runs))
    facts = comparison.provenance(runs)
    if facts:
        yield from section("versions and machines that differ", by_run(facts, runs, unknown="unknown"))
    for each in comparison.scores(runs):
        yield from section(f"score of {title(each.name)}", score_view(each, runs))
    yield from section("curves by step", curves_view(runs, console))
    yield from section("time", time_view(runs, score))
    if samples:
        prompts = comparison.same_prompts(runs, samples)
        if isinstance(prompts, str):
            yield from section("samples", Text(prompts))
        else:
            yield from section(f"samples of the same prompts at step {prompts[0].step}", samples_view(prompts))


def section(name: str, *parts: RenderableType) -> Iterator[RenderableType]:
    yield Group(Text(), Rule(Text(name, "bold"), align="left", style="dim"), *parts)


def title(name: str) -> str:
    return "the held-out problems" if name == HELD_OUT else f"the set {visible(name, 80)}"


def letter(at: int) -> Text:
    return Text(LETTERS[at], f"bold {STYLES[at]}")


def run_table(runs: Sequence[RecordedRun]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for at, run in enumerate(runs):
        table.add_row(letter(at), Text(str(run.folder)), Text(run.state), Text(duration(run.seconds_in_total)))
    table.columns[1].overflow = "fold"
    return table


def settings_view(runs: Sequence[RecordedRun]) -> RenderableType:
    found = comparison.settings(runs)
    if not found:
        return Text("none" if not any(run.unreadable for run in runs) else "unknown")
    return by_run(found, runs, unknown="no such key")


def by_run(found: Mapping[str, Sequence[str | None]], runs: Sequence[RecordedRun], *, unknown: str) -> Table:
    """Return a table with a column for each run; of many runs, with the runs that share each value."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=len(runs) <= MOST_COLUMNS)
    table.add_column("", overflow="fold")
    for at in range(len(runs) if len(runs) <= MOST_COLUMNS else 1):
        table.add_column(letter(at), overflow="fold")
    for name, values in found.items():
        shown = [unknown if value is None else visible(value, VALUE_WIDTH) for value in values]
        if len(runs) <= MOST_COLUMNS:
            table.add_row(Text(visible(name, 80)), *map(Text, shown))
        else:
            shared = {v: " ".join(LETTERS[at] for at, w in enumerate(shown) if w == v) for v in dict.fromkeys(shown)}
            table.add_row(
                Text(visible(name, 80)), Text("\n".join(f"{letters}: {value}" for value, letters in shared.items()))
            )
    return table


def score_view(each: SetScores, runs: Sequence[RecordedRun]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for moment in each.moments:
        table.add_column(moment)
    for at, moments in each.scores.items():
        table.add_row(letter(at), *(score_cell(moments[moment]) for moment in each.moments))
    first = LETTERS[each.runs[0]]
    for at, moments in each.differences.items():
        cells = (difference_cell(moments[moment]) for moment in each.moments)
        table.add_row(Text(f"{LETTERS[at]} - {first}", "bold"), *cells)
    without = [LETTERS[at] for at in range(len(runs)) if at not in each.scores]
    missing = [Text(f"without a score: {', '.join(without)}")] if without else []
    return Group(table, *missing, Text(score_note(each), "dim"))


def score_cell(score: StepScore) -> Text:
    e = score.estimate
    interval = "" if math.isnan(e.low) else f"\n{e.low:.3f} to {e.high:.3f}"
    return Text.assemble((f"{e.value:.3f}", "bold"), f" step {score.step}", (interval, "dim"))


def difference_cell(difference: Difference | None) -> Text:
    if difference is None:
        return Text("interval unknown")
    if difference.changed == 0:
        return Text("the same")
    beyond = difference.beyond_noise
    style = "" if not beyond else "green" if difference.value > 0 else "red"
    interval = f"{difference.low:+.3f} to {difference.high:+.3f}"
    verdict = "beyond noise" if beyond else "within noise"
    return Text.assemble((f"{difference.value:+.3f}", f"bold {style}"), (f"\n{interval}", "dim"), f"\n{verdict}")


def score_note(each: SetScores) -> str:
    problems = {len(score.problems) for moments in each.scores.values() for score in moments.values()} - {0}
    over = f"over {'/'.join(map(str, sorted(problems)))} problems" if problems else "as logged"
    found = [d for moments in each.differences.values() for d in moments.values() if d is not None]
    notes = [f"95% intervals {over}, not over seeds"]
    if found:
        notes.append(
            "differences are paired by problem"
            if all(d.paired for d in found)
            else "differences are unpaired: the problems are not known to be the same"
        )
    if any(d.changed is not None and 0 < d.changed < FEWEST_CHANGED for d in found):
        notes.append(f"fewer than {FEWEST_CHANGED} problems that change are within noise")
    if BEST in each.moments:
        notes.append("the best is chosen afterwards, so it is too high")
    return "; ".join(notes) + "."


def curves_view(runs: Sequence[RecordedRun], console: Console) -> RenderableType:
    """Return a plot of each main curve, and a line for each run of the other ones."""
    width, unicode = min(console.width, 120) - 1, console.encoding.lower().startswith("utf")
    parts: list[RenderableType] = []
    lines = Table.grid(padding=(0, 2, 0, 0))
    for name, points in comparison.curves(runs).items():
        drawn = [Curve(LETTERS[at], STYLES[at], each) for at, each in enumerate(points)]
        finite = [point for curve in drawn for point in curve.finite]
        if name in PLOTTED:
            heading = Text(name, "bold")
            parts += [heading, *plot(drawn, width=width, height=PLOT_HEIGHT, braille=unicode), Text()]
            continue
        xs, ys = Range.of([x for x, _ in finite]), Range.of([y for _, y in finite])
        shown = 0
        for at, curve in enumerate(drawn):
            values = [y for _, y in curve.finite]
            if values:
                arrow = "→" if unicode else "->"
                ends = f"{number(values[0])} {arrow} {number(values[-1])}"
                bars = sparkline(curve, xs, ys, width=width - 38, blocks=unicode)
                lines.add_row(Text("" if shown else name, "bold"), letter(at), bars, Text(ends))
                shown += 1
    return Group(*parts, lines) if parts or lines.row_count else Text("none")


def time_view(runs: Sequence[RecordedRun], score: float | None) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for at in range(len(runs)):
        table.add_column(letter(at), justify="right")
    reach, notes = comparison.reached(runs, score), []
    if reach is not None:
        name = "held-out" if reach.name == HELD_OUT else reach.name
        at_step = [str(at.step) if at else "never" for at in reach.at]
        table.add_row(Text(f"step with {name} {reach.score:.3f}"), *map(Text, at_step))
        table.add_row(Text("seconds to it"), *(Text(brief(at.seconds) if at else "-") for at in reach.at))
        notes.append("Seconds to a score count start-up and a cold start, but no time between two processes.")
    elif score is not None:
        notes.append("--score: no evaluation set is in all runs.")
    for part, means in comparison.seconds(runs).items():
        label = "seconds a step" if part == "step" else f"  {part}"
        table.add_row(Text(label), *(Text("-" if mean is None else brief(mean)) for mean in means))
    return Group(table, *(Text(note, "dim") for note in notes))


def samples_view(prompts: Sequence[SamePrompt]) -> RenderableType:
    parts: list[RenderableType] = []
    for each in prompts:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
        for at in range(len(each.samples)):
            table.add_column(letter(at), overflow="fold", ratio=1)
        columns = [[sample_text(sample) for sample in group[:SAMPLES_SHOWN]] for group in each.samples]
        for row in zip_longest(*columns, fillvalue=""):
            table.add_row(*row)
        heading = [("prompt", Text(visible(each.prompt, 300))), ("answer", Text(visible(each.answer, 100)))]
        parts += [labelled(heading), table, Text()]
    return Group(*parts[:-1])


def sample_text(sample: RunSample) -> Text:
    reward = "no reward" if sample.reward is None else f"{sample.reward:z.2f}"
    cut = ", cut off" if sample.truncated else ""
    turns = f", {len(sample.turns)} turns" if len(sample.turns) > 1 else ""
    return Text.assemble((f"{reward}{turns}{cut} ", "dim"), visible(sample.text, 300))


if __name__ == "__main__":
    enter(lambda: main(sys.argv[1:]))
