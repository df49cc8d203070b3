"""`python -m titan_rl.ctl RUN COMMAND`: ask a run under way how it is, or steer it. RUN is its dump folder.

Exit codes: 0 done, 1 the run refused or did not answer in time, 2 bad usage, or no such run is under way here.
"""

import argparse
import json
import math
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from titan_rl.control import ANNOUNCEMENT, reachable
from titan_rl.plan_view import labelled
from titan_rl.terminal import duration, open_console, visible

COMMANDS = {
    "status": "where the run is, who is up, who waits on whom",
    "checkpoint": "save the step in hand, and say so when it is on disk",
    "pause": "save the step in hand and train nothing after it, until `resume` or `stop`",
    "resume": "go on training, or take back a pause that is yet to come",
    "stop": "save the step in hand, however long it takes, and end; the same command line goes on from there",
    "scale": "bring a role to so many replicas: generators=3",
}
AT_ONCE = ("status", "resume", "stop")
ANSWER_SECONDS, WORK_SECONDS = 10.0, 600.0  # for an answer at once; for one after a step, a save, a start or an end
POLL_SECONDS = 0.1
WIDTH = 200  # of a cell
DONE, REFUSED, NOT_RUNNING = 0, 1, 2


class Failed(Exception):
    """Nothing came of it; str() says why."""

    def __init__(self, why: str, code: int = REFUSED) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a run is steered.

    >>> Endpoint(Path("outputs/grpo_llama"), 4711, Path("/tmp/titan_rl-4711/control"))
    """

    folder: Path
    pid: int
    path: Path

    @classmethod
    def find(cls, folder: Path) -> Self:
        try:
            found = json.loads((folder / ANNOUNCEMENT).read_text())
            endpoint, host = cls(folder, int(found["pid"]), Path(found["socket"])), found["host"]
        except (OSError, ValueError, KeyError, TypeError):
            hint = "" if folder.is_dir() else ": there is no such folder"
            raise Failed(f"no run is under way in {folder}{hint}", NOT_RUNNING) from None
        if host != socket.gethostname():
            raise Failed(f"the run in {folder} is on {host}, process {endpoint.pid}: ask there", NOT_RUNNING)
        if not endpoint.runs():
            raise endpoint.gone()
        return endpoint

    def runs(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rsplit(")", 1)[1].split()[0] not in "ZX"  # ended, though its parent has yet to hear of it

    def gone(self) -> Failed:
        return Failed(f"the run in {self.folder} is not running: its process {self.pid} has ended", NOT_RUNNING)

    def ask(self, command: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        request = json.dumps({"command": command, "arguments": arguments}) + "\n"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            try:
                with reachable(self.path) as name:
                    connection.connect(name)
                connection.sendall(request.encode())
                line = connection.makefile("rb").readline()
            except TimeoutError:
                raise Failed(
                    f"the run (process {self.pid}) did not answer {command} within {seconds:g} s; "
                    "what was asked still stands. --timeout waits longer"
                ) from None
            except (FileNotFoundError, ConnectionError):  # another process's pid by now, or the run is just over
                raise self.gone() from None
        if not line:
            raise Failed(f"the run (process {self.pid}) ended before it answered {command}")
        reply = json.loads(line)
        if "error" in reply:
            raise Failed(reply["error"])
        return reply["answer"]

    def wait(self, seconds: float) -> None:
        """For the end of the run."""
        deadline = time.monotonic() + seconds
        while self.runs():
            if time.monotonic() > deadline:
                raise Failed(f"the run (process {self.pid}) has not ended within {seconds:g} s; it is still asked to")
            time.sleep(POLL_SECONDS)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    seconds = options.timeout or (ANSWER_SECONDS if options.command in AT_ONCE else WORK_SECONDS)
    try:
        endpoint = Endpoint.find(options.run)
        answer = endpoint.ask(options.command, dict(options.arguments), seconds)
        if options.wait:
            endpoint.wait(options.timeout or WORK_SECONDS)
    except Failed as error:
        print(f"titan_rl.ctl: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print(f"titan_rl.ctl: no longer waiting for {options.command}; what was asked still stands", file=sys.stderr)
        return REFUSED
    if options.json:
        print(json.dumps(answer))
    else:
        open_console(sys.stdout).print(view(answer))
    return DONE


def parse(argv: Sequence[str]) -> argparse.Namespace:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="python -m titan_rl.ctl",
        description="Ask a run under way how it is, or steer it.",
        epilog="\n".join(["commands:", *(f"  {name:<{width}}  {doc}" for name, doc in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="its dump folder")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of those below")
    parser.add_argument(
        "arguments", metavar="NAME=VALUE", nargs="*", default=[], type=argument, help="of scale: generators=3"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as it came")
    parser.add_argument("--wait", action="store_true", help="stop: until the run has ended")
    waits = f"how long to wait; {ANSWER_SECONDS:g} for {', '.join(AT_ONCE)}, else {WORK_SECONDS:g}"
    parser.add_argument("--timeout", metavar="SECONDS", type=positive, help=waits)
    options = parser.parse_intermixed_args(argv)
    if options.wait and options.command != "stop":
        parser.error("--wait belongs to stop")
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


# -- what a person sees ----------------------------------------------------------------------------------------


def view(answer: Any) -> RenderableType:
    """Facts beside their names, one part below the other; a list of things is a table with a line each."""
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
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    columns = list(dict.fromkeys(name for row in value for name in row))
    for name in columns:
        numbers = all(isinstance(row.get(name), int | float | None) for row in value)
        table.add_column(label(name), justify="right" if numbers else "left", overflow="fold")
    for row in value:
        table.add_row(*(Text(cell(name, row.get(name))) for name in columns))
    return table


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
        case float():
            return f"{value:.4g}"
        case str() | int():
            return visible(str(value), WIDTH)
    return visible(json.dumps(value), WIDTH)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
