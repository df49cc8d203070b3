"""Draws curves as text. Each curve has its letter on it, and a colour where there is one.

A cell of a plot has 2 x 4 braille dots. A terminal that cannot show them gets the letters alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

Point = tuple[float, float]
STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")
BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column and row of a cell
LETTER_EVERY = 12  # columns
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*%#"


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of one run, in the order of x. Points that are not finite are gaps."""

    letter: str
    style: str
    points: Sequence[Point]

    @property
    def finite(self) -> list[Point]:
        return [(x, y) for x, y in self.points if math.isfinite(y)]


@dataclass(frozen=True, slots=True)
class Range:
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Range":
        return cls(min(values), max(values))

    def place(self, value: float, places: int) -> int:
        """Return which of `places` equal parts holds a value."""
        if self.high <= self.low:
            return places // 2
        share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)  # halves: a difference may overflow
        return min(places - 1, max(0, int(share * places)))


def plot(curves: Sequence[Curve], *, width: int, height: int, braille: bool = True) -> list[Text]:
    """Return the lines of a plot, with the ends of both axes; none if no curve has a point."""
    points = [point for curve in curves for point in curve.finite]
    if not points:
        return []
    xs, ys = Range.of([x for x, _ in points]), Range.of([y for _, y in points])
    labels = number(ys.high), number(ys.low)
    margin = max(map(len, labels))
    cells = _cells(curves, xs, ys, width=width - margin - 2, height=height, braille=braille)
    vertical, corner, across = "│└─" if braille else "|+-"
    lines = []
    for row, line in enumerate(cells):
        label = labels[0] if row == 0 else labels[1] if row == height - 1 and ys.high > ys.low else ""
        lines.append(Text.assemble((f"{label:>{margin}} {vertical}", "dim"), line))
    first, last = number(xs.low), number(xs.high)
    lines.append(Text(f"{'':>{margin}} {corner}{across * (width - margin - 2)}", "dim"))
    if xs.high > xs.low:
        first = f"{first}{last:>{width - margin - 2 - len(first)}}"
    return [*lines, Text(f"{'':>{margin + 2}}{first}", "dim")]


def _cells(curves: Sequence[Curve], xs: Range, ys: Range, *, width: int, height: int, braille: bool) -> list[Text]:
    """Return the rows of a plot without its axes."""
    dots = [[0] * width for _ in range(height)]
    styles: list[list[str | None]] = [[None] * width for _ in range(height)]
    letters: dict[tuple[int, int], tuple[str, str]] = {}
    for at, curve in enumerate(curves):
        trace = _trace(curve.finite, xs, ys, 2 * width, 4 * height)
        for x, y in trace:
            column, row = x // 2, height - 1 - y // 4
            dots[row][column] |= DOTS[x % 2][3 - y % 4]
            styles[row][column] = curve.style if styles[row][column] in (None, curve.style) else ""
        own = {x // 2: height - 1 - y // 4 for x, y in trace}
        start = at * LETTER_EVERY // len(curves)
        for column, row in own.items():
            marked = not braille or column == max(own) or column % LETTER_EVERY == start
            if marked:
                taken = (row, column) in letters
                letters[row, column] = ("*", "") if taken and not braille else (curve.letter, f"bold {curve.style}")
    rows = []
    for row in range(height):
        line = Text()
        for column in range(width):
            if (row, column) in letters:
                line.append(*letters[row, column])
            elif braille and dots[row][column]:
                line.append(chr(BRAILLE + dots[row][column]), styles[row][column] or "")
            else:
                line.append(" ")
        rows.append(line)
    return rows


def _trace(points: Sequence[Point], xs: Range, ys: Range, width: int, height: int) -> list[tuple[int, int]]:
    """Return the dots of a curve: its points, and straight lines between them."""
    placed = [(xs.place(x, width), ys.place(y, height)) for x, y in points]
    trace = placed[:1]
    for (x0, y0), (x1, y1) in pairwise(placed):
        reach = max(abs(x1 - x0), abs(y1 - y0), 1)
        trace += [(x0 + round((x1 - x0) * k / reach), y0 + round((y1 - y0) * k / reach)) for k in range(1, reach + 1)]
    return trace


def sparkline(curve: Curve, xs: Range, ys: Range, *, width: int, blocks: bool = True) -> Text:
    """Return a curve as one line of bars: the mean of the points in each column, or the last column's. It ends where
    the curve does."""
    columns: list[list[float]] = [[] for _ in range(width)]
    for x, y in curve.finite:
        columns[xs.place(x, width)].append(y)
    bars = BARS if blocks else ASCII_BARS
    line, end = "", max((at for at, column in enumerate(columns) if column), default=-1)
    for column in columns[: end + 1]:
        line += bars[ys.place(sum(column) / len(column), len(bars))] if column else line[-1:] or " "
    return Text(line, curve.style)


def number(value: float) -> str:
    """Format a number with three significant digits at most, and no exponent where it is short without one."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.1e}"
