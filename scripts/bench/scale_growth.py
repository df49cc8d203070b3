"""How a cost grows with the number of generators: exponents, and a plot of them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.axes import BOTTOM, COLORS, HEIGHT, LEFT, TOP, WIDTH, look_of, svg, text

Rows = Sequence[Mapping[str, str]]
Points = Mapping[int, float]  # by generators


class Way(NamedTuple):
    lag: int
    trainers: int  # ranks; 0: as many as generators


WAYS = {"lag 0": Way(0, 8), "lag 1": Way(1, 8), "lag 0, N ranks": Way(0, 0)}
MARGIN = 260  # at the right, for the legend
SHOWN = {"a step: CPU s": False, "a step: wall s": True}  # measure: dashed


def rows_of(variant: str, way: str, replicas: int, found: Mapping[str, Sequence[float]]) -> list[dict[str, str]]:
    """Return the lines of the CSV for one run."""
    return [
        {"variant": variant, "way": way, "generators": str(replicas), "measure": measure}
        | {name: f"{of(values):.4g}" for name, of in (("median", statistics.median), ("min", min), ("max", max))}
        | {"steps": str(len(values))}
        for measure, values in found.items()
    ]


def points_of(rows: Rows, variant: str, way: str, measure: str) -> dict[int, float]:
    """Return the medians over the runs of a variant."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if (row["variant"], row["way"], row["measure"]) == (variant, way, measure):
            found.setdefault(int(row["generators"]), []).append(float(row["median"]))
    return {replicas: statistics.median(values) for replicas, values in sorted(found.items())}


def exponent(points: Points) -> float:
    """Return the slope of the line through the points' logarithms: 1 if the cost grows in proportion, 2 if it is one of
    every pair."""
    xs, ys = [math.log(n) for n in points], [math.log(max(value, 1e-9)) for value in points.values()]
    return statistics.linear_regression(xs, ys).slope


def plot(rows: Rows, variant: str) -> str:
    """Draw seconds per step over generators, both logarithmic, with the exponent of each line in the legend; nothing
    if only one number of generators was measured."""
    lines = {
        (way, measure): points
        for way in WAYS
        for measure in SHOWN
        if len(points := points_of(rows, variant, way, measure)) > 1
    }
    if not lines:
        return ""
    every = [value for points in lines.values() for value in points.values()]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))
    counts = sorted({n for points in lines.values() for n in points})

    def x_of(n: int) -> float:
        return LEFT + (WIDTH - LEFT - MARGIN) * math.log(n / counts[0]) / math.log(counts[-1] / counts[0])

    def y_of(seconds: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(seconds) - low) / (high - low)

    drawn = [text(LEFT, TOP - 16, "seconds of a step, by simulated generators", "title")]
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - MARGIN}"/>')
        drawn.append(text(LEFT - 8, y + 4, f"{10.0**power:g}", "end"))
    drawn += [text(x_of(n), HEIGHT - BOTTOM + 18, f"{n}", "middle") for n in counts]
    drawn.append(text((LEFT + WIDTH - MARGIN) / 2, HEIGHT - 10, "generators", "middle"))
    colors = dict(zip(WAYS, COLORS[1:], strict=False))
    for place, ((way, measure), points) in enumerate(lines.items()):
        look = look_of(colors[way], dashed=SHOWN[measure])
        dots = " ".join(f"{x_of(n):.1f},{y_of(value):.1f}" for n, value in points.items())
        drawn.append(f'<polyline points="{dots}" {look}/>')
        words = f"{way}: {'wall' if SHOWN[measure] else 'CPU'}, N^{exponent(points):.2f}"
        x, y = WIDTH - MARGIN + 16, TOP + 20 * place
        drawn += [f'<path d="M{x} {y}h24" {look}/>', text(x + 32, y + 4, words, "")]
    return svg(drawn)
