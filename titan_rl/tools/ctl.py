"""`python -m titan_rl ctl RUN COMMAND`: show the state of a run, or control it. RUN is its dump folder.

Exit codes: 0 done, 1 the run refused or did not answer in time, 2 bad usage, or no run is active there on this host.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from titan_rl.ext.control.client import DONE, REFUSED, Endpoint, RequestFailed
from titan_rl.record.plan_view import labelled
from titan_rl.record.terminal import duration, open_console, visible
from titan_rl.wire.program import command_of, path_argument

COMMANDS = {
    "status": "show the step, the ranks and their states, and the calls that are being waited for",
    "checkpoint": "save the current step; answers once it is on disk",
    "pause": "save the current step, then wait for `resume` or `stop`",
    "resume": "continue training, or cancel a pause that has not started",
    "stop": "save the current step, however long that takes, and end; the same command line resumes the run",
    "scale": "set the number of replicas of a role: generators=3",
}
AT_ONCE = ("status", "resume", "stop")
ANSWER_SECONDS, WORK_SECONDS = 10.0, 600.0  # for an immediate answer; for one after a step, a save, a start or the end
WIDTH = 200  # characters of a table cell
MAX_ROWS = 32  # shown of a table


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    seconds = options.timeout or (ANSWER_SECONDS if options.command in AT_ONCE else WORK_SECONDS)
    try:
        endpoint = Endpoint.find(options.run)
        answer = endpoint.ask(options.command, dict(options.arguments), seconds)
        if options.wait:
            endpoint.wait(options.timeout or WORK_SECONDS)
    except RequestFailed as error:
        print(f"titan_rl ctl: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(
            f"titan_rl ctl: no longer waiting for {options.command}; the request remains in effect",
            file=sys.stderr,
        )
        return REFUSED
    if options.json:
        print(json.dumps(answer))
    else:
        open_console(sys.stdout).print(view(answer))
    return DONE


def parse(argv: Sequence[str]) -> argparse.Namespace:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog=command_of("ctl"),
        description="Show the state of a run, or control it, while it runs.",
        epilog="\n".join(["commands:", *(f"  {name:<{width}}  {doc}" for name, doc in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=path_argument, help="dump folder of the run")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of the commands below")
    parser.add_argument(
        "arguments", metavar="NAME=VALUE", nargs="*", default=[], type=argument, help="argument of scale: generators=3"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument("--wait", action="store_true", help="with stop: wait until the run has ended")
    waits = f"how long to wait; default {ANSWER_SECONDS:g} for {', '.join(AT_ONCE)}, {WORK_SECONDS:g} for the others"
    parser.add_argument("--timeout", metavar="SECONDS", type=positive, help=waits)
    options = parser.parse_intermixed_args(argv)
    if options.wait and options.command != "stop":
        parser.error("--wait is only for the command stop")
    return options


def argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def positive(text: str) -> float:
    if not 0 < (seconds := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, found {text}")
    return seconds


def view(answer: Any) -> RenderableType:
    """Return names and values, one part below the other. A list of objects is a table with one row each."""
    if not isinstance(answer, dict):
        return Text(cell("", answer))
    facts = {name: value for name, value in answer.items() if not isinstance(value, dict | list)}
    parts: list[RenderableType] = [labelled([(label(n), Text(cell(n, v))) for n, v in facts.items()])] if facts else []
    for name, value in answer.items():
        if name not in facts:
            parts += [*([""] if parts else []), Text(label(name), "bold"), part(value)]
    return Group(*parts)


def part(value: dict[str, Any] | list[Any]) -> RenderableType:
    if not value:
        return Text("none", "dim")
    if isinstance(value, dict):
        return view(value)
    if not all(isinstance(row, dict) for row in value):
        return Text(", ".join(cell("", item) for item in value))
    value, more = shortened(value)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", caption=more or None, caption_justify="left")
    columns = list(dict.fromkeys(name for row in value for name in row))
    for name in columns:
        numbers = all(isinstance(row.get(name), int | float | None) for row in value)
        table.add_column(label(name), justify="right" if numbers else "left", overflow="fold")
    for row in value:
        table.add_row(*(Text(cell(name, row.get(name))) for name in columns))
    return table


def shortened(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the first rows of a long table, and a line about the others. Rows in rare states come first, then rows
    with the most seconds."""
    if len(rows) <= MAX_ROWS:
        return rows, ""
    states = Counter(str(row.get("state")) for row in rows)
    ordered = sorted(rows, key=lambda row: (states[str(row.get("state"))], -row.get("seconds", 0)))
    hidden = Counter(str(row["state"]) for row in ordered[MAX_ROWS:] if "state" in row)
    counts = ", ".join(f"{count} {state}" for state, count in hidden.most_common())
    return ordered[:MAX_ROWS], f"and {len(rows) - MAX_ROWS} more{f': {counts}' if counts else ''}; --json shows all"


def label(name: str) -> str:
    return name.removesuffix("_seconds").replace("_", " ")


def cell(name: str, value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int() | float() if name.endswith("seconds"):
            return duration(value)
        case int() | float() if name == "time":
            return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
        case float():
            return f"{value:.4g}"
        case str() | int():
            return visible(str(value), WIDTH)
    return visible(json.dumps(value), WIDTH)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
