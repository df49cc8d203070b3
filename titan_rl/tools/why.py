"""`python -m titan_rl why RUN`: why does it not learn?

Prints the causes that the run's metrics, config and samples show, the first suspect first, each with numbers, samples
to read and the key to change. The run may be active, finished or crashed.

Exit codes: 0 a report, also if it names problems, 2 bad usage, 130 stopped.
"""

import argparse
import json
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import get_terminal_size

from titan_rl.record.run_names import METRICS
from titan_rl.record.terminal import visible
from titan_rl.tools.diagnosis.diagnosed_run import DiagnosedRun
from titan_rl.tools.diagnosis.findings import RunFinding
from titan_rl.tools.diagnosis.history import MetricsHistory
from titan_rl.tools.diagnosis.ranking import Diagnosis, measured, progress
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.wire.program import DONE, USAGE, WHY_PAGE, command_of, enter

SHOWN = 5  # causes
MOST_CHARACTERS = 2000  # in one entry


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    run, files = options.run, RunFiles(options.run)
    if not (files / METRICS).is_file():
        expected = f"expected the dump folder of a run, with its {METRICS}"
        print(f"titan_rl why: RUN: {expected}, {files.absence}", file=sys.stderr)
        return USAGE
    found = DiagnosedRun.of(run)
    if options.json:
        print(json.dumps(as_json(run, found.history, found.diagnosis, found.notes), indent=2))
    else:
        print("\n".join(report(run, found.history, found.diagnosis, found.notes)))
    return DONE


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("why"),
        description="Say why a run does not learn: causes in the order of suspicion, with the numbers that show them, "
        "samples to read and the key to change. Nothing is changed, and the run may be active.",
        epilog=f"{WHY_PAGE} explains every symptom. Exit codes: 0 a report, 2 bad usage.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="dump folder of the run")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def report(run: Path, history: MetricsHistory, diagnosis: Diagnosis, notes: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the report."""
    width = min(100, get_terminal_size().columns)
    steps = f"steps {history.lines[0]['step']} to {history.last}" if history.lines else "no step"
    yield f"{run}: {steps}. {progress(history)}"
    for number, finding in enumerate(diagnosis.problems[:SHOWN], 1):
        yield ""
        yield from _entry(run, number, finding, width)
    hidden = diagnosis.problems[SHOWN:]
    if hidden:
        yield f"\n{len(hidden)} more: {', '.join(each.rule for each in hidden)} (--json has them)"
    suspicions = history.answers.suspicions if history.answers else ()
    if not diagnosis.problems:
        yield ""
        yield "no cause found, and rewards that look exploited:" if suspicions else "no problem found"
        for suspicion in suspicions:
            yield from _wrap("   suspect ", suspicion.text, width)
        yield from _wrap("   checked  ", ", ".join(diagnosis.checked) or "nothing", width)
        yield from _wrap("   now      ", measured(history) or "no numbers", width)
    yield ""
    minor = [finding.warning for finding in diagnosis.findings if not finding.problem]
    for line in (*notes, *minor, *diagnosis.limits):
        yield from _wrap("note: ", line, width)
    yield f"{WHY_PAGE} explains symptoms, causes and keys"
    if suspicions:
        count = f"{len(suspicions)} suspicion{'s' * (len(suspicions) != 1)}"
        yield f"audit --rewards has {count}:"
        yield f"  {command_of('audit')} --rewards {shlex.quote(str(run))}"


def _entry(run: Path, number: int, finding: RunFinding, width: int) -> Iterator[str]:
    yield from _wrap(f"{number}. ", finding.text, width)
    for place, change in enumerate(finding.changes):
        yield from _wrap("   change  " if not place else "   or      ", str(change), width)
    if finding.advice:
        yield from _wrap("   why     ", finding.advice.replace("RUN", shlex.quote(str(run))), width)
    if finding.examples:
        yield f"   read    {'; '.join(finding.samples)}"
        yield f"           {command_of('look')} {shlex.quote(str(run))} --prompt {finding.examples[0].prompt_id}"
    for effect in finding.effects:
        yield from _wrap("   effect  ", effect.text, width)


def _wrap(head: str, text: str, width: int) -> list[str]:
    """Wrap a text behind `head`. It may hold errors of the user's code, which must not reach the terminal raw."""
    indent = " " * min(len(head), 11)
    return textwrap.wrap(
        visible(text, MOST_CHARACTERS),
        width,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(run: Path, history: MetricsHistory, diagnosis: Diagnosis, notes: Sequence[str]) -> dict[str, object]:
    values = {"run": str(run), "steps": history.last, "progress": progress(history)}
    with suppress(IndexError):
        values["cause"] = diagnosis.findings[0].rule
    return values | {
        "findings": [finding.as_json for finding in diagnosis.findings],
        "suspicions": [each.text for each in history.answers.suspicions] if history.answers else [],
        "checked": list(diagnosis.checked),
        "limits": [*notes, *diagnosis.limits],
    }


if __name__ == "__main__":
    enter(lambda: main(sys.argv[1:]))
