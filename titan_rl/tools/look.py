"""`python -m titan_rl look RUN`: read a run's samples. Nothing is changed, and the run may be active.

Exit codes: 0 samples were shown, 1 there are none to show, 2 bad usage, 130 stopped.
"""

import argparse
import heapq
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import StringIO
from itertools import chain, groupby, islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from titan_rl.config.toml import CONFIG
from titan_rl.record.lines import encode
from titan_rl.record.run_names import ANSWERS, METRICS, ROLLOUTS
from titan_rl.record.terminal import open_console
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.tools.inspect.sample_view import (
    as_data,
    good_and_bad,
    group_lines,
    number,
    sample_lines,
    searched,
    spread,
    token_lines,
    with_opening,
    wrapped,
)
from titan_rl.tools.inspect.samples import RunSample
from titan_rl.tools.inspect.token_view import tokenizer_of
from titan_rl.tools.refused_input import UsageError
from titan_rl.wire.program import DONE, FAILED, command_of, enter

PROG = "titan_rl look"
LIMIT = 3
SORTS: dict[str, Callable[[RunSample], float]] = {
    "best": lambda sample: -float("inf") if sample.reward is None else sample.reward,
    "worst": lambda sample: -float("inf") if sample.reward is None else -sample.reward,
    "longest": lambda sample: sample.sampled,
    "shortest": lambda sample: -sample.sampled,
    "off-policy": lambda sample: sample.age,
}
SHOWN_METRICS = {
    "reward/mean": "reward",
    "completions/mean_length": "mean length",
    "completions/clipped_ratio": "cut off",
    "frac_reward_zero_std": "groups of equal rewards",
    "entropy": "entropy",
    "eval/score": "held-out",
}


class Picture(NamedTuple):
    """What was selected: samples or groups, and lines about them."""

    notes: Sequence[str]
    groups: Sequence[Sequence[RunSample]]  # to compare
    samples: Sequence[RunSample]
    hint: str = ""


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    if options.run is None and options.evaluation:  # --evaluation RUN
        options.run, options.evaluation = Path(options.evaluation), ""
    if options.run is None:
        parser().error("the following arguments are required: RUN")
    try:
        files = RunFiles(options.run)
        refuse_folder(files)
        picture = (trained if options.evaluation is None else evaluated)(options, files)
        tokenizer = tokenizer_of(files)
        if options.tokens and not options.json:
            if options.evaluation is not None:
                raise UsageError("--tokens: expected training samples; evaluations store texts without their tokens")
            if tokenizer is None:
                raise UsageError(f"--tokens: expected the tokenizer of the run's model, found none for {options.run}")
    except UsageError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"{PROG}: {error.filename or options.run}: {error.strerror or error}", file=sys.stderr)
        return FAILED
    if tokenizer is not None:
        groups = [[with_opening(sample, tokenizer) for sample in group] for group in picture.groups]
        samples = [with_opening(sample, tokenizer) for sample in picture.samples]
        picture = picture._replace(groups=groups, samples=samples)
    if options.json:
        print(*picture.notes, sep="\n", end="\n" if picture.notes else "", file=sys.stderr)
        for sample in picture.samples:
            print(encode(as_data(sample, tokens=options.tokens)).decode())
    else:
        show(picture, options, tokenizer)
    return DONE if picture.samples else FAILED


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("look"),
        usage="%(prog)s RUN [flags]",
        description="Read a run's samples: the prompts, the policy's answers turn by turn, and how they were judged. "
        "Without flags: one good and one bad sample of the last step. Nothing is changed, and the run may be active.",
        epilog="--prompt, --search, --failed and --cut-off look through all steps, the newest first, unless --step "
        "names some. A terminal shows them with $PAGER; NO_COLOR is respected. Exit codes: 0 shown, 1 there "
        "is nothing, 2 bad usage. docs/operations.md has examples and the keys of --json.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, nargs="?", help="dump folder of the run")
    choose = parser.add_argument_group("which samples")
    choose.add_argument("--step", metavar="N|first|last|A-B", help="step, or steps; default: the last")
    choose.add_argument("--prompt", metavar="ID", type=int, help="one prompt's samples")
    choose.add_argument("--search", metavar="TEXT", help="text in the prompt or in an answer; /TEXT/ is a regex")
    choose.add_argument("--cut-off", action="store_true", help="only samples that a limit on tokens ended")
    choose.add_argument("--failed", action="store_true", help="only samples without a reward")
    choose.add_argument("--sort", choices=list(SORTS), help="order by reward, length, or age of the policy")
    choose.add_argument(
        "--limit", metavar="N", type=positive, help=f"most to show; default: {LIMIT} samples, or 1 group"
    )
    choose.add_argument("--evaluation", metavar="SET", nargs="?", const="", help="answers of evaluations instead")
    how = parser.add_argument_group("how")
    how.add_argument("--group", action="store_true", help="all samples of a prompt: as a table, then each whole")
    how.add_argument("--tokens", action="store_true", help="token by token, with unlikely tokens marked")
    how.add_argument("--full", action="store_true", help="system prompts whole")
    how.add_argument("--json", action="store_true", help="one JSON object per sample; with --tokens, its tokens too")
    how.add_argument("--no-pager", action="store_true", help="print to the terminal at once")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, found {text}")
    return int(text)


# -- select ------------------------------------------------------------------------------------------------------------


def trained(options: argparse.Namespace, files: RunFiles) -> Picture:
    """Select samples of the steps."""
    samples = files.samples() if (files / ROLLOUTS).exists() else None
    if samples is None or not samples.steps:
        raise UsageError(f"{files.folder}: {without_rollouts(files)}", FAILED)
    steps, chosen = samples.steps, chosen_steps(options, samples.steps)
    plain = not (selects(options) or options.sort or options.group or options.limit)
    if plain and len(chosen) == 1:
        shown, groups, cut = good_and_bad(samples.of_step(chosen[0])), [], False
    else:
        needle = b"" if options.group else needle_of(options.search)
        groups, cut = selected(options, chosen, lambda step: samples.of_step(step, options.prompt, needle))
        shown = list(chain.from_iterable(groups))
    notes = [f"the run is active: its newest step is {steps[-1]}"] if files.active else []
    notes += [f"other settings {change}" for change in files.cuts() if steps[-1] > change.step]
    if samples.damaged:
        notes.append(f"{ROLLOUTS}: {samples.damaged} damaged lines are left out")
    seen = sorted({sample.step for sample in shown})
    if len(seen) <= 2:
        notes += filter(None, (step_line(files, step, steps[-1]) for step in seen))
    if not shown:
        several = f"the {len(chosen)} steps from {min(chosen)} to {max(chosen)}"
        notes.append(f"no sample matches in {several if len(chosen) > 1 else f'step {chosen[0]}'}")
    elif plain and len(shown) == 1:
        notes.append("all rewards of this step are equal" if shown[0].reward is not None else "no sample has a reward")
    return Picture(notes, groups if options.group else (), shown, more(cut, options))


def evaluated(options: argparse.Namespace, files: RunFiles) -> Picture:
    """Select stored answers of evaluations."""
    if not (files / ANSWERS).exists() or not (answers := files.answers()).steps:
        why = "an earlier version made the run, or it has evaluated nothing yet"
        raise UsageError(f"{files.folder}: expected answers of evaluations in {ANSWERS}, found none: {why}", FAILED)
    name: str = options.evaluation
    if name and name not in answers.sets:
        raise UsageError(f"--evaluation: expected one of {', '.join(answers.sets)}, found {name}")
    chosen = chosen_steps(options, answers.steps)
    groups, cut = selected(options, chosen, lambda step: answers.of_step(step, name))
    shown = list(chain.from_iterable(groups))
    notes = [f"the run is active: its newest evaluation is of step {answers.steps[-1]}"] if files.active else []
    left_out = answers.left_out
    if left_out:
        notes.append(f"{left_out} answers of these evaluations are not stored: {ANSWERS} has the first problems' only")
    notes += [] if shown else ["no stored answer matches"]
    return Picture(notes, groups if options.group else (), shown, more(cut, options))


def selects(options: argparse.Namespace) -> bool:
    """Return True if samples are looked for, in all steps."""
    return options.prompt is not None or any((options.search, options.failed, options.cut_off))


def chosen_steps(options: argparse.Namespace, steps: Sequence[int]) -> Sequence[int]:
    return steps_of(options.step, steps, default=steps[::-1] if selects(options) else steps[-1:])


def selected(
    options: argparse.Namespace, steps: Sequence[int], read: Callable[[int], Sequence[RunSample]]
) -> tuple[list[list[RunSample]], bool]:
    """Return the first samples or groups that match, and whether there are more."""
    matches = matching(options)
    return limited((unit for step in steps for unit in units_of(read(step), matches, options.group)), options)


def matching(options: argparse.Namespace) -> Callable[[RunSample], bool]:
    """Return the test of a sample that may be shown."""
    text = pattern_of(options.search)

    def matches(sample: RunSample) -> bool:
        return (
            options.prompt in (None, sample.prompt_id)
            and (not options.failed or sample.reward is None)
            and (not options.cut_off or sample.truncated)
            and (text is None or searched(sample, text))
        )

    return matches


def pattern_of(text: str | None) -> re.Pattern[str] | None:
    if not text:
        return None
    if len(text) < 3 or not (text.startswith("/") and text.endswith("/")):
        return re.compile(re.escape(text))
    try:
        return re.compile(text[1:-1])
    except re.error as error:
        raise UsageError(f"--search: expected a regular expression between slashes, found {text}: {error}") from None


def needle_of(text: str | None) -> bytes:
    """Return bytes that the line of every sample with this text has: JSON may write other characters otherwise."""
    return text.encode() if text and re.fullmatch(r"[A-Za-z0-9 ._*+=?!-]+", text) else b""


def units_of(
    samples: Sequence[RunSample], matches: Callable[[RunSample], bool], grouped: bool
) -> Iterator[list[RunSample]]:
    """Yield the units to count and sort: single samples that match, or whole groups with one that matches."""
    if not grouped:
        yield from ([sample] for sample in samples if matches(sample))
        return
    for _, group in groupby(samples, key=lambda sample: (sample.set, sample.group)):
        if any(map(matches, found := list(group))):
            yield found


def limited(units: Iterator[list[RunSample]], options: argparse.Namespace) -> tuple[list[list[RunSample]], bool]:
    """Return the first units in the chosen order, and whether there are more."""
    limit = options.limit or (1 if options.group else LIMIT)
    if options.sort or (options.group and options.prompt is None):
        key = SORTS[options.sort] if options.sort else None
        found = heapq.nlargest(limit + 1, units, key=lambda unit: fmean(map(key, unit)) if key else spread(unit))
    else:
        found = list(islice(units, limit + 1))
    return found[:limit], len(found) > limit


def more(cut: bool, options: argparse.Namespace) -> str:
    what = "groups" if options.group else "samples"
    return f"there are more {what}: --limit N" if cut else ""


def steps_of(wish: str | None, steps: Sequence[int], default: Sequence[int]) -> Sequence[int]:
    """Return the steps of --step that a run has."""
    if wish is None:
        return default
    if wish in ("first", "last"):
        return [steps[0 if wish == "first" else -1]]
    bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", wish)
    if bounds is None:
        raise UsageError(f"--step: expected N, first, last or A-B, found {wish}")
    low, high = int(bounds[1]), int(bounds[2] or bounds[1])
    chosen = [step for step in steps if low <= step <= high]
    if chosen:
        return chosen
    raise UsageError(f"--step: expected a step from {steps[0]} to {steps[-1]} with samples, found {wish}")


def refuse_folder(files: RunFiles) -> None:
    run = files.folder
    recorded = any((files / name).exists() for name in (CONFIG, ROLLOUTS, ANSWERS))
    if not run.is_dir() or not (files.active or recorded):
        raise UsageError(f"RUN: expected the dump folder of a run, with its {CONFIG}, {files.absence}")


def without_rollouts(files: RunFiles) -> str:
    """Return why a run has no samples, and which files help instead."""
    config, _ = files.config_or_why()
    if config is not None and config.algorithm.kind != "rl":
        has = [f"the algorithm {config.algorithm.name} samples no rollouts"]
        steps = steps_logged(files)
        if steps:
            has.append(f"{METRICS} has its {steps} steps")
        if (files / ANSWERS).exists() and files.answers().steps:
            has.append("--evaluation shows the answers of its evaluations")
        return "; ".join(has)
    return "it is active and has no step yet" if files.active else "it has no step with rollouts"


def steps_logged(files: RunFiles) -> int:
    with suppress(OSError):
        return sum(line["kind"] == "fit" for line in files.metrics())
    return 0


def step_line(files: RunFiles, step: int, last: int) -> str:
    """Return a line with a step's most telling numbers; "" if metrics.jsonl has none."""
    with suppress(OSError, TypeError):
        for line in files.metrics():
            if line["kind"] == "rl" and line["step"] == step:
                parts = [f"{name} {number(line[key])}" for key, name in SHOWN_METRICS.items() if key in line]
                name = f"step {step}, the last" + (f" is {last}" if step < last else "")
                return f"{name}: {', '.join(parts)}" if parts else ""
    return ""


# -- show --------------------------------------------------------------------------------------------------------------


def show(picture: Picture, options: argparse.Namespace, tokenizer: TextTokenizer | None) -> None:
    console = open_console(sys.stdout)
    columns = os.environ.get("COLUMNS", "")
    width = console.width if console.is_terminal else int(columns) if columns.isdecimal() else 0
    lines = lines_of(picture, options, tokenizer, width)
    if console.is_terminal and not options.no_pager and (pager := pager_command()):
        paged(lines, pager, console)
        return
    for line in lines:
        console.print(line, soft_wrap=True)


def lines_of(
    picture: Picture, options: argparse.Namespace, tokenizer: TextTokenizer | None, width: int
) -> Iterator[Text]:
    def one(sample: RunSample) -> Iterator[Text]:
        if options.tokens and tokenizer is not None:
            return token_lines(sample, tokenizer, width)
        return sample_lines(sample, width=width, full=options.full, found=pattern_of(options.search))

    for note in picture.notes:
        yield from wrapped(Text(note, "dim"), width)
    for group in picture.groups:
        yield Text()
        yield from group_lines(group, width)
    for sample in picture.samples:
        yield Text()
        yield from one(sample)
    if picture.hint:
        yield Text()
        yield Text(picture.hint, "dim")


def pager_command() -> list[str]:
    """Return $PAGER, or less, as a command; none if it is empty, cat, or not installed."""
    with suppress(ValueError):  # an open quote
        command = shlex.split(os.environ.get("PAGER", "less"))
        return command if command and command != ["cat"] and shutil.which(command[0]) else []
    return []


def paged(lines: Iterator[Text], command: Sequence[str], console: Console) -> None:
    """Print through a pager. Of the default options of less, -F ends it at once if all fits on the screen."""
    buffer = StringIO()  # rich ends the process where it writes to a pager that has ended
    system: Any = console.color_system
    through = Console(
        file=buffer,
        width=console.width,
        force_terminal=True,
        color_system=system,
        no_color=console.no_color,
        markup=False,
        emoji=False,
        highlight=False,
    )
    environ: dict[str, str] = {"LESS": "FRX", **os.environ}
    pager = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
    assert pager.stdin is not None
    with suppress(BrokenPipeError, KeyboardInterrupt):
        for line in lines:
            through.print(line, soft_wrap=True)
            pager.stdin.write(buffer.getvalue().encode(errors="backslashreplace"))
            buffer.seek(0)
            buffer.truncate()
    with suppress(BrokenPipeError):
        pager.stdin.close()
    while pager.poll() is None:
        with suppress(KeyboardInterrupt):  # the pager gets it too, and decides
            pager.wait()


if __name__ == "__main__":
    enter(lambda: main(sys.argv[1:]))
