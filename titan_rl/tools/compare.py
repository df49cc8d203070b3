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
from titan_rl.record.scores import ScoreEstimate
from titan_rl.record.terminal import brief, duration, open_console, visible
from titan_rl.tools.inspect import comparison, variants
from titan_rl.tools.inspect.comparison import BEST, LETTERS, SamePrompt, SetScores
from titan_rl.tools.inspect.plots import STYLES, Curve, Range, number, plot, sparkline
from titan_rl.tools.inspect.recorded_run import NoRun, RecordedRun, StepScore
from titan_rl.tools.inspect.samples import RunSample
from titan_rl.tools.inspect.score_differences import FEWEST_CHANGED, Difference
from titan_rl.tools.inspect.variants import Variant, VariantScores
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
        check_key(runs, options.by)
    except NoRun as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return USAGE
    if options.json:
        data = comparison.as_data(runs, score=options.score, samples=options.samples)
        print(json.dumps(strict(data | {"over_seeds": variants.as_data(runs, options.by)})))
        return DONE
    console = open_console(sys.stdout)
    for part in view(runs, console, by=options.by, score=options.score, samples=options.samples):
        print_trimmed(console, part)
    return DONE


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("compare"),
        description="Compare runs: the keys that differ, scores and whether they differ by more than noise, curves, "
        "the seconds to a score, and samples of the same prompts. Nothing is changed, and runs may be active.",
        epilog="A difference is from the first run. It is beyond noise if its 95% interval over problems excludes 0; "
        "another seed can still give another result. Runs that differ in their seed only are one variant: means and "
        "differences are then of variants, over seeds. docs/operations.md explains each part.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=f"dump folders of 2 to {len(LETTERS)} runs")
    parser.add_argument("--by", metavar="KEY", default="", help="runs with the same value of KEY are one variant")
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


def check_key(runs: Sequence[RecordedRun], by: str) -> None:
    """Refuse a key that all runs agree in, or that none has."""
    differing = comparison.settings(runs)
    if by and by not in differing:
        raise NoRun(f"--by: expected a key that differs between the runs ({', '.join(differing)}), found {by}")


def view(
    runs: Sequence[RecordedRun], console: Console, *, by: str, score: float | None, samples: int
) -> Iterator[RenderableType]:
    yield Group(*(Text(f"warning  {text}", "yellow") for text in comparison.warnings(runs)))
    yield run_table(runs)
    yield from section("keys that differ", settings_view(runs))
    facts = comparison.provenance(runs)
    if facts:
        yield from section("versions and machines that differ", by_run(facts, runs, unknown="unknown"))
    groups = variants.variants(runs, by)
    seeds = variants.have_seeds(groups)
    for each in comparison.scores(runs):
        if seeds:
            found = variants.over_seeds(each, groups)
            yield from section(f"score of {title(each.name)}, over seeds", variant_view(found, each, runs))
        else:
            yield from section(f"score of {title(each.name)}", score_view(each, runs))
    heading = f"curves by step, means of {' '.join(each.name for each in groups)}" if seeds else "curves by step"
    yield from section(heading, curves_view(runs, groups, console))
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
    return Text(LETTERS[at], f"bold {colour(at)}")


def colour(at: int) -> str:
    return STYLES[at % len(STYLES)]


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
    table = score_table(each)
    first = LETTERS[each.runs[0]]
    for at, moments in each.differences.items():
        cells = (difference_cell(moments[moment]) for moment in each.moments)
        table.add_row(Text(f"{LETTERS[at]} - {first}", "bold"), *cells)
    return Group(table, *without_score(each, runs), Text(score_note(each), "dim"))


def score_table(each: SetScores) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for moment in each.moments:
        table.add_column(moment)
    for at, moments in each.scores.items():
        table.add_row(letter(at), *(score_cell(moments[moment]) for moment in each.moments))
    return table


def without_score(each: SetScores, runs: Sequence[RecordedRun]) -> list[Text]:
    without = [LETTERS[at] for at in range(len(runs)) if at not in each.scores]
    return [Text(f"without a score: {', '.join(without)}")] if without else []


def variant_view(found: VariantScores, each: SetScores, runs: Sequence[RecordedRun]) -> RenderableType:
    table = score_table(each)
    for name, means in found.means.items():
        if len(name) > 1:
            table.add_row(Text(f"mean of {name}", "bold"), *(mean_cell(means[moment]) for moment in each.moments))
    for name, moments in found.differences.items():
        cells = (difference_cell(moments[moment]) for moment in each.moments)
        table.add_row(Text(f"{name} - {found.first}", "bold"), *cells)
    notes = ["95% intervals: of a run over problems, of a mean and a difference over seeds (Student's t)."]
    for name, pairs in found.pairs.items():
        notes.append(f"{name} - {found.first}: {f'paired, {pairs} pairs of runs' if pairs else 'unpaired'}.")
    if BEST in each.moments:
        notes.append("The best is chosen afterwards, so it is too high.")
    return Group(table, *without_score(each, runs), *(Text(note, "dim") for note in notes))


def mean_cell(mean: ScoreEstimate) -> Text:
    interval = "" if math.isnan(mean.low) else f"\n{mean.low:.3f} to {mean.high:.3f}"
    return Text.assemble((f"{mean.value:.3f}", "bold"), (interval, "dim"))


def score_cell(score: StepScore) -> Text:
    e = score.estimate
    interval = "" if math.isnan(e.low) else f"\n{e.low:.3f} to {e.high:.3f}"
    return Text.assemble((f"{e.value:.3f}", "bold"), f" step {score.step}", (interval, "dim"))


def difference_cell(difference: Difference | None) -> Text:
    if difference is None:
        return Text("interval unknown")
    if difference.changed == 0:
        return Text("the same")
    if math.isnan(difference.low):
        return Text.assemble((f"{difference.value:+.3f}", "bold"), "\ninterval unknown")
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


def curves_view(runs: Sequence[RecordedRun], groups: Sequence[Variant], console: Console) -> RenderableType:
    """Return a plot of each main curve, and a line for each variant of the other ones. A variant has its first run's
    letter."""
    width, unicode = min(console.width, 120) - 1, console.encoding.lower().startswith("utf")
    parts: list[RenderableType] = []
    lines = Table.grid(padding=(0, 2, 0, 0))
    for name, points in comparison.curves(runs).items():
        firsts = [(variant, next(iter(variant.runs.values()))) for variant in groups]
        drawn = [Curve(LETTERS[at], colour(at), variants.mean_curve(variant, points)) for variant, at in firsts]
        finite = [point for curve in drawn for point in curve.finite]
        if name in PLOTTED:
            heading = Text(name, "bold")
            parts += [heading, *plot(drawn, width=width, height=PLOT_HEIGHT, braille=unicode), Text()]
            continue
        xs, ys = Range.of([x for x, _ in finite]), Range.of([y for _, y in finite])
        shown = 0
        for (_, at), curve in zip(firsts, drawn, strict=True):
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
