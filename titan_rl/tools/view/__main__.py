"""`python -m titan_rl view RUN [RUN ...]`: write runs as one HTML file, or serve active runs.

Exit codes: 0 written, 1 the page cannot be written, 2 bad usage, 130 stopped.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from titan_rl.record.lines import Unwritable, must_write, write_whole
from titan_rl.record.run_names import FAULTS, METRICS
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.tools.view.live import LiveServer
from titan_rl.tools.view.page import page, page_data
from titan_rl.wire.program import DONE, FAILED, USAGE, command_of, enter

MOST_RUNS = 6  # which colours tell apart
LIVE_SECONDS = 5.0


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    problem = problem_of(options)
    if problem:
        print(f"titan_rl view: {problem}", file=sys.stderr)
        return USAGE
    sample_bytes = round(options.sample_mb * 1e6)
    if options.watch:
        return serve(options.run, options.port, sample_bytes)
    out = options.out or (options.run[0] / "view.html" if len(options.run) == 1 else Path("view.html"))
    data = page_data(options.run, sample_bytes=sample_bytes)
    text = page(data)
    try:
        with must_write(out):
            write_whole(out, text)
    except Unwritable as error:
        print(f"titan_rl view: {error}", file=sys.stderr)
        return FAILED
    print(f"{out}: {len(text.encode()) / 1e6:.1f} MB; open it in a browser")
    for run in data["runs"]:
        for left in run["left_out"]:
            print(f"  {run['name']}: {left}")
    return DONE


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("view"),
        description="Write runs as one HTML file that loads nothing from a network: curves, time, samples token by "
        "token, the lives of prompts, evaluations, config and events. Several runs are overlaid.",
        epilog="Exit codes: 0 written; 1 the page cannot be written; 2 bad usage. Nothing in the run is changed, and "
        "it may be active.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, nargs="+", help="dump folders")
    where = "the page; default RUN/view.html, or ./view.html of several runs"
    parser.add_argument("--out", metavar="FILE", type=Path, help=where)
    size = "bound on the size of all samples in the page; default 3"
    parser.add_argument("--sample-mb", metavar="MB", type=float, default=3.0, help=size)
    parser.add_argument("--watch", action="store_true", help="serve the page on loopback, up to date, until Ctrl-C")
    parser.add_argument("--port", type=int, default=0, help="of --watch; default: a free one")
    return parser


def problem_of(options: argparse.Namespace) -> str:
    """Return the problem of the command line, or ""."""
    for run in options.run:
        if not (run / METRICS).exists():
            return f"RUN: expected the dump folder of a run, with its {METRICS}, {RunFiles(run).absence}"
    if len({run.resolve() for run in options.run}) < len(options.run):
        return "RUN: expected different runs, found one twice"
    if len(options.run) > MOST_RUNS:
        return f"RUN: expected at most {MOST_RUNS} runs, found {len(options.run)}"
    if not 0 < options.sample_mb <= 1000:
        return f"--sample-mb: expected a number above 0 and up to 1000, found {options.sample_mb:g}"
    if not 0 <= options.port < 1 << 16:
        return f"--port: expected 0 to 65535, found {options.port}"
    if options.watch and options.out:
        return "--out: expected no file with --watch, which writes none"
    return ""


def serve(runs: Sequence[Path], port: int, sample_bytes: int) -> int:
    """Serve the page until the program is stopped."""
    try:
        read = partial(page_data, runs, sample_bytes=sample_bytes, live_seconds=LIVE_SECONDS)
        server = LiveServer(port, read, partial(state_of, runs))
    except OSError as error:
        print(f"titan_rl view: --port: expected a free port, found {port}: {error.strerror}", file=sys.stderr)
        return USAGE
    with server:
        print(f"{server.address}\nThe token is part of the address. Ctrl-C ends the server.", flush=True)
        server.serve_forever()
    return DONE


def state_of(runs: Sequence[Path]) -> list[int]:
    """Return the sizes of the files that grow with each step and each fault."""
    files = [run / name for run in runs for name in (METRICS, FAULTS)]
    return [file.stat().st_size if file.exists() else 0 for file in files]


if __name__ == "__main__":
    enter(lambda: main(sys.argv[1:]))
