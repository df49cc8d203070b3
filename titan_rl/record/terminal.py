"""What a run prints: its plan, its start-up, one line per step, its end.

A terminal shows running work (start-up phases, a progress bar) in one status line that is redrawn in place. Everywhere
else, and with TERM=dumb or CI set, plain lines say the same. Errors go to stderr, everything else to stdout.
"""

import asyncio
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.record.plan_view import RunPlan, labelled, plan_view
from titan_rl.wire.counted import counted

PLAIN_WIDTH = 120
HEADER_EVERY = 20  # steps
REFRESH = 0.1  # seconds between two drawings of the status line
REMIND = 30.0  # seconds between two plain lines that name the running work
ERASE_BELOW = "\x1b[J"
DOWN, UP = "\n\n", "\x1b[2A\r"  # one empty line and one more: a warning of two lines, the usual kind, fits
STEP_WIDTH = 100
FEW_SIGNAL, MANY_CUT = (
    0.05,
    0.3,
)  # shares of groups with signal and of answers cut off, as tools/diagnosis has them
GAP_MEAN, GAP_MULT = 1e-2, 1.05  # above these, trainer and generator disagree more than rounding explains

DEPTH: ContextVar[int] = ContextVar("depth", default=0)  # nested phases of each asyncio task


@dataclass(slots=True)
class Activity:
    """Running work: a phase, or progress if it has a total."""

    name: str
    total: int = 0
    done: int = 0
    before: int = 0  # done by an earlier process, so it took no time of this one
    note: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def so_far(self) -> str:
        return f"  {self.done}/{self.total}  {self.note}".rstrip() if self.total else ""

    def __str__(self) -> str:
        seconds = self.seconds
        text = f"{self.name}{self.so_far}  {duration(seconds)}"
        if self.before < self.done < self.total:
            text += f", {duration(seconds * (self.total - self.done) / (self.done - self.before))} left"
        return text


class Progress:
    """Advances a bar, or prints a line at every tenth where no status line is shown."""

    def __init__(self, terminal: "Terminal", activity: Activity) -> None:
        self._terminal = terminal
        self._activity = activity

    def advance(self, n: int = 1, note: str = "") -> None:
        activity = self._activity
        tenth = 10 * activity.done // activity.total
        activity.done += n
        activity.note = note or activity.note
        if 10 * activity.done // activity.total > tenth and activity.done < activity.total:
            self._terminal.plain(f"  … {clock()}  {activity}")


class Terminal:
    """Prints to the console. Every method may be called from any task and any thread.

    The status line is drawn *below* the cursor, which stays at the start of an empty line. Text that other processes
    write to the same terminal (actors inherit it) goes to that empty line, and the next drawing erases the old status
    line, which is still below. rich's own Live draws at the cursor, where every such write would break it. Only more
    than two short lines within REFRESH seconds can reach the status line, and then leave one remnant of it.
    """

    prefix = ""  # begins its lines, see PolicyTerminal

    def __init__(self, console: Console | None = None, errors: Console | None = None) -> None:
        self._console = console or open_console(sys.stdout)
        self._errors = errors or open_console(sys.stderr)
        self._live = self._console.is_interactive
        self._lock = threading.RLock()
        self._activities: list[Activity] = []
        self._idle = threading.Event()
        self._spinner = Spinner("dots")
        self._steps = 0
        self._step_times: deque[tuple[int, float]] = deque(maxlen=HEADER_EVERY)  # steps and when they were reported
        self._reported: set[str] = set()

    @property
    def width(self) -> int:
        return self._console.width

    def of(self, policy: str) -> "Terminal":
        """Return a terminal of one of several policies, whose name is before its lines."""
        return PolicyTerminal(self, policy)

    def plan(self, plan: RunPlan) -> None:
        self._print(plan_view(plan))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a part of the start-up while the body runs. Phases can nest, and run concurrently in several tasks."""
        with self._under_way(Activity(self.prefix + name)):
            yield

    @contextmanager
    def progress(self, name: str, total: int, done: int = 0) -> Iterator[Progress]:
        """Show progress while the body runs. An earlier process already did `done` of `total`."""
        activity = Activity(self.prefix + name, total, done, before=done)
        with self._under_way(activity):
            yield Progress(self, activity)

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Print one line of the columns that fit."""
        now = time.monotonic()
        self._step_times.append((step, now))
        (first, began), made = self._step_times[0], len(self._step_times) > 1
        each = (now - began) / max(1, step - first) if made else metrics["time/step"]
        width, prefix = self._console.width - len(self.prefix), Text(self.prefix)
        cells = fitting(step_cells(step, total, metrics, left=each * (total - step)), width)
        lines = [Text.assemble(prefix, *((f"{cell.text:>{cell.width}}", cell.style) for cell in cells))]
        if self._steps % HEADER_EVERY == 0:
            self.plain(f"  … {clock()}  {self.prefix}step {step} of {total}")
            heads = "".join(f"{cell.head:>{cell.width}}" for cell in cells)
            lines.insert(0, Text(f"{'':<{len(self.prefix)}}{heads}", "dim"))
        self._steps += 1
        self._print(*lines, no_wrap=True, overflow="crop")

    def eval(self, label: str, score: float, n: int) -> None:
        self._print(
            Text.assemble(
                f"  {self.prefix}{label}  ", (f"{score:.3f}", "bold green"), f"  over {counted(n, 'problem')}"
            )
        )

    def note(self, text: str) -> None:
        self._print(*self._indented(Text(self.prefix + text)), soft_wrap=True)

    def warn(self, text: str) -> None:
        self._print(*self._indented(Text.assemble(("warning  ", "yellow"), self.prefix, text)), soft_wrap=True)

    def _indented(self, text: Text) -> list[Text]:
        """Return the lines of a text. A terminal would wrap inside words; a log keeps whole lines, for grep."""
        lines = text.wrap(self._console, self._console.width - 2) if self._live else [text]
        return [Text.assemble("  ", line) for line in lines]

    def error(self, title: str, details: str) -> None:
        """Print a crash once: the actor and rank in the title, the remote traceback in the details."""
        crash = details or title
        if crash in self._reported:
            return
        self._reported.add(crash)
        remote = Text.from_ansi(details.rstrip())  # keeps an actor's colours, removes its cursor movements
        if self._errors.is_terminal:
            body = Text(title, "bold red").append("\n\n" if remote else "")
            panel = Panel(Text.assemble(body, remote), title="error", title_align="left", border_style="red")
            self._print(panel, console=self._errors)
        else:
            self._print(Text(f"error: {title}"), *([remote] if remote else []), console=self._errors, soft_wrap=True)

    def summary(
        self,
        summary: Mapping[str, Any],
        samples: Sequence[Text],
        folder: Path,
        hints: Sequence[str],
    ) -> None:
        """Print the end of a run. `samples` are lines; none: no step ran."""
        title = f"{self.prefix}finished: {summary['steps']} steps in {duration(summary['wall_seconds'])}"
        rows: list[tuple[str, RenderableType]] = [
            ("held-out", scores(summary)),
            ("time", time_split(summary["seconds"])),
            ("log-prob gap", log_prob_gap(summary)),
            *([("samples", Group(*samples))] if samples else []),
            ("folder", Text.assemble((str(folder), "bold"), "\n", ("  ".join(contents(folder)), "dim"))),
            ("next", Text("\n".join(hints))),
        ]
        self._print("", Rule(Text(title, "bold"), align="left", style="dim"), labelled(rows))

    def plain(self, text: str) -> None:
        """Print `text`, but only if there is no status line to show it."""
        if not self._live:
            self._print(Text(text), soft_wrap=True)

    @contextmanager
    def _under_way(self, activity: Activity) -> Iterator[None]:
        """Show `activity` while the body runs, then print one line with its seconds."""
        indent = "  " * DEPTH.get()
        DEPTH.set(DEPTH.get() + 1)
        with self._lock:
            self._activities.append(activity)
            if len(self._activities) == 1:
                self._idle = threading.Event()
                threading.Thread(target=self._tick, args=(self._idle,), name="terminal", daemon=True).start()
        mark, ended = ("✓", "green"), ""
        try:
            yield
        except (asyncio.CancelledError, KeyboardInterrupt):  # a signal, or another phase has failed
            mark, ended = ("-", "yellow"), "  stopped"
            raise
        except BaseException:
            mark, ended = ("✗", "red"), "  failed"
            raise
        finally:
            DEPTH.set(DEPTH.get() - 1)
            with self._lock:
                self._activities.remove(activity)
                if not self._activities:
                    self._idle.set()
            name = f" {activity.name:<{40 - len(indent)}}{duration(activity.seconds):>12}"
            self._print(Text.assemble(f"  {indent}", mark, name, activity.so_far, ended), soft_wrap=True)

    def _tick(self, idle: threading.Event) -> None:
        while not idle.wait(REFRESH if self._live else REMIND):
            with self._lock:
                self._draw()
                for activity in self._activities:
                    self.plain(f"  … {clock()}  {activity}")

    def _print(self, *parts: RenderableType, console: Console | None = None, **layout: Any) -> None:
        with self._lock:
            if self._live:
                self._write(ERASE_BELOW)
            for part in parts:
                (console or self._console).print(part, **layout)
            self._draw()

    def _draw(self) -> None:
        if not self._live or not self._activities:
            return
        line = Table.grid(padding=(0, 2, 0, 0))
        cells: list[RenderableType] = [self._spinner]
        for activity in self._activities:
            if activity.total:
                cells.append(ProgressBar(activity.total, activity.done, width=24))
            cells.append(Text(str(activity)))
        for _ in cells:
            line.add_column(no_wrap=True)
        line.add_row(*cells)
        with self._console.capture() as captured:
            self._console.print(line, width=self._console.width - 1)
        self._write(f"{ERASE_BELOW}{DOWN}{captured.get().rstrip()}{UP}")

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


class PolicyTerminal(Terminal):
    """The terminal as one of several policies prints to it."""

    __slots__ = ("_step_times", "_steps", "prefix")

    def __init__(self, terminal: Terminal, policy: str) -> None:
        self.__dict__ = terminal.__dict__  # all other state is shared
        self.prefix, self._steps, self._step_times = f"{policy}: ", 0, deque(maxlen=HEADER_EVERY)


class Cell(NamedTuple):
    """One column of the step line."""

    head: str
    width: int
    text: str
    style: str = ""


LEAST_FIRST = ("train", "gen", "age", "length", "gap", "grad", "left", "entropy", "signal", "cut")
"""Columns that a narrow terminal leaves out, in this order. metrics.jsonl has all of them."""


def step_cells(step: int, total: int, metrics: Mapping[str, float], left: float) -> list[Cell]:
    """Return the columns of a step: 100 characters for up to 999 steps. `left`: seconds to the last step."""
    narrow = metrics["logprob_gap/mean"] <= GAP_MEAN and metrics["logprob_gap/mult"] <= GAP_MULT  # NaN is not
    score = metrics.get(EVAL_SCORE)
    signal, cut = 1 - metrics["frac_reward_zero_std"], metrics["completions/clipped_ratio"]
    return [
        Cell("step", max(8, 2 * len(str(total)) + 2), f"{step}/{total}"),
        Cell("seconds", 8, brief(metrics["time/step"])),
        Cell("gen", 6, brief(metrics["time/generate"]), "dim"),
        Cell("train", 6, brief(metrics["time/train"]), "dim"),
        Cell("reward", 8, f"{metrics['reward/mean']:z.3f}", "bold"),
        Cell("held-out", 9, "" if score is None else f"{score:.3f}", "bold green"),
        Cell("signal", 7, f"{signal:.0%}", "yellow" if signal < FEW_SIGNAL else ""),
        Cell("length", 7, f"{metrics['completions/mean_length']:.0f}"),
        Cell("cut", 5, f"{cut:.0%}", "yellow" if cut >= MANY_CUT else ""),
        Cell("entropy", 8, f"{metrics['entropy']:.3f}"),
        Cell("grad", 8, f"{metrics['grad_norm']:.2g}"),
        Cell("gap", 8, f"{metrics['logprob_gap/mean']:.1e}", "" if narrow else "yellow"),
        Cell("age", 5, f"{metrics['policy_age/max']:.0f}"),
        Cell("left", 7, rough(left)),
    ]


def fitting(cells: Sequence[Cell], width: int) -> list[Cell]:
    """Return the columns that fit into `width` and into 100 characters, without the least important ones."""
    shown = list(cells)
    for name in LEAST_FIRST:
        if sum(cell.width for cell in shown) > min(width, STEP_WIDTH):
            shown = [cell for cell in shown if cell.head != name]
    return shown


def scores(summary: Mapping[str, Any]) -> Text:
    """Return the held-out scores of the run's three milestones, as far as they were evaluated."""
    text = Text()
    for key, when in (
        ("cold_start_eval", "before the cold start"),
        ("initial_eval", "before RL"),
        ("final_eval", "at the end"),
    ):
        score = summary[key]
        if score is not None:
            style = "bold green" if key == "final_eval" else "bold"
            text.append("  →  " if text else "", "dim").append(f"{score:.3f}", style).append(f" {when}", "dim")
    return text or Text("not evaluated", "dim")


def time_split(seconds: Mapping[str, float]) -> RenderableType:
    """Return a bar for each part of the run that took time."""
    total = sum(seconds.values())
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for part, spent in seconds.items():
        if spent > total / 200:
            bar = Text("━" * max(1, round(40 * spent / total)), "cyan")
            table.add_row(part.replace("_", " "), duration(spent), f"{spent / total:.0%}", bar)
    return table


def log_prob_gap(summary: Mapping[str, Any]) -> Text:
    """Describe the gap, and what bounds it: the share of the samples that the correction's weights leave, 1 without a
    correction, and the share of the replayed experts that the trainers would have chosen."""
    gap, effective, agreement = (summary[key] for key in ("logprob_gap", "effective_samples", "routing_agreement"))
    if gap["mean"] is None or gap["max"] is None:
        return Text("no step, no gap", "dim")
    left = f"; corrected, effective samples {effective:.1%}" if effective is not None and effective < 1 else ""
    routes = f"; routes replayed, {agreement:.1%} agree" if agreement is not None else ""
    text = f"{gap['mean']:.1e} mean, {gap['max']:.1e} max{left}{routes}"
    return Text(text, "" if gap["mean"] <= GAP_MEAN else "yellow")


def visible(text: str, width: int) -> str:
    """Return the start of a text as one line. Characters that could move the cursor or change a colour are escaped."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: width + 1])
    return line if len(line) <= width else line[: width - 1] + "…"


def contents(folder: Path) -> list[str]:
    """Return what a run leaves in its folder. control.json is there only until the run has ended."""
    left = (path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and path.name != "control.json")
    return [path.name + "/" * path.is_dir() for path in left]


def brief(seconds: float) -> str:
    """Format seconds with about three significant digits."""
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}" if seconds < 1000 else f"{seconds:.0f}"


def duration(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def rough(seconds: float) -> str:
    """Format the time left in at most six characters."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h" if minutes < 6000 else f"{minutes // 1440} d"


def clock() -> str:
    """Return the time of day, for logs."""
    return time.strftime("%H:%M:%S")


def open_console(file: TextIO) -> Console:
    """Open a console; colours and a status line are only for a terminal that can show them."""
    if isinstance(file, TextIOWrapper):
        file.reconfigure(errors="replace")  # a locale without these characters must not fail the run
    quiet = {"file": file, "markup": False, "emoji": False, "highlight": False}
    if not file.isatty() or os.environ.get("TERM") in ("dumb", "unknown") or os.environ.get("CI"):
        return Console(**quiet, force_terminal=False, color_system=None, width=PLAIN_WIDTH)
    console = Console(**quiet)
    if console.width < 1:  # COLUMNS=0
        console.width = shutil.get_terminal_size().columns
    return console
