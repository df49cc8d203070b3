"""What lies between the floor and a step: ratios, and a waterfall plot of each shape."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from bench.axes import BOTTOM, COLORS, HEIGHT, LEFT, TOP, WIDTH, look_of, svg, text
from bench.step_ways import LAG, OURS, PARTS, PEAK, TORCH, TRL, VLLM

Steps = Mapping[str, Mapping[str, float]]
"""Seconds of a step and of its parts, and GiB of memory, by way."""
NEEDED = {TORCH, VLLM, OURS}  # for a waterfall
GAP, LABELS = 64, 34
FLOOR, ADDED, SAVED, WHOLE = COLORS[0], COLORS[2], COLORS[4], COLORS[1]


class Layer(NamedTuple):
    name: str
    start: float
    end: float
    color: str


def of_one_commit(rows: Sequence[Mapping[str, str]], shape: str, commit: str = "") -> list[Mapping[str, str]]:
    """Return the rows of a shape that one commit has measured: the last one, or the one that begins with `commit`."""
    own = [row for row in rows if row["shape"] == shape and row["commit"].startswith(commit)]
    return [row for row in own if row["commit"] == own[-1]["commit"]]


def steps_of(rows: Sequence[Mapping[str, str]], shape: str) -> dict[str, dict[str, float]]:
    """Return the medians over a shape's rounds. The parts of a way add up to its step."""
    found: dict[str, dict[str, float]] = {}
    for way in dict.fromkeys(row["way"] for row in rows if row["shape"] == shape):
        own = [row for row in rows if row["shape"] == shape and row["way"] == way]
        step = {part: statistics.median(float(row[part]) for row in own) for part in (*PARTS[:3], "step", "cpu")}
        found[way] = step | {"rest": step["step"] - sum(step[part] for part in PARTS[:3])}
        if peaks := [float(row[PEAK]) for row in own if row.get(PEAK)]:
            found[way][PEAK] = statistics.median(peaks)
    return found


def floor(steps: Steps, part: str = "step") -> float:
    return steps[TORCH][part] + steps[VLLM][part]


def ratios(steps: Steps) -> dict[str, float]:
    """Return how a step and its parts compare with TRL and with the floor, as far as they were measured."""
    found: dict[str, float] = {}
    for way in (OURS, LAG):
        if way in steps:
            step = steps[way]
            if TRL in steps:
                found[f"{way}: step / TRL"] = step["step"] / steps[TRL]["step"]
                found[f"{way}: CPU / TRL"] = step["cpu"] / steps[TRL]["cpu"]
                if PEAK in step and PEAK in steps[TRL]:
                    found[f"{way}: memory / TRL"] = step[PEAK] / steps[TRL][PEAK]
            if TORCH in steps and VLLM in steps:
                found[f"{way}: step / floor"] = step["step"] / floor(steps)
                found[f"{way}: CPU / floor"] = step["cpu"] / floor(steps, "cpu")
                found[f"{way}: training / torch"] = step["training"] / steps[TORCH]["step"]
                found[f"{way}: generation / vLLM"] = step["generation"] / steps[VLLM]["step"]
    return found


def layers(steps: Steps) -> list[Layer]:
    """Return the bars from the floor to our synchronous step. Each begins where the one before it ends."""
    ours, torch, vllm = steps[OURS], steps[TORCH]["step"], steps[VLLM]["step"]
    parts = {
        "torch": torch,
        "vLLM": vllm,
        "training": ours["training"] - torch,
        "generation": ours["generation"] - vllm,
        "sync": ours["sync"],
        "rest": ours["rest"],
    }
    found, at = list[Layer](), 0.0
    for name, seconds in parts.items():
        color = FLOOR if name in ("torch", "vLLM") else ADDED if seconds >= 0 else SAVED
        found.append(Layer(name, at, at + seconds, color))
        at += seconds
    return found


def plot(steps: Mapping[str, Steps]) -> str:
    """Draw the shapes side by side."""
    width = (WIDTH - LEFT - GAP * (len(steps) - 1)) / len(steps) - 8
    lefts = [LEFT + i * (width + GAP) for i in range(len(steps))]
    panels = [panel(name, own, left, width) for left, (name, own) in zip(lefts, steps.items(), strict=True)]
    words = "grey: floor, orange: added, green: saved, blue: whole step, dashed: TRL"
    return svg([*chain.from_iterable(panels), text(LEFT, HEIGHT - 8, words, "")])


def panel(name: str, steps: Steps, left: float, width: float) -> list[str]:
    bars = layers(steps)
    bars.append(Layer("step", 0, steps[OURS]["step"], WHOLE))
    if LAG in steps:
        bars.append(Layer("lag 1", 0, steps[LAG]["step"], WHOLE))
    pitch = width / len(bars)
    top = max([*(bar.end for bar in bars), *(bar.start for bar in bars), steps.get(TRL, {}).get("step", 0.0)])

    def y_of(seconds: float) -> float:
        return HEIGHT - BOTTOM - LABELS - (HEIGHT - BOTTOM - LABELS - TOP) * seconds / top

    drawn = [text(left, TOP - 16, f"{name}: seconds per step", "title")]
    for quarter in range(5):
        y = y_of(top * quarter / 4)
        drawn.append(f'<path class="grid" d="M{left:.1f} {y:.1f}h{width:.1f}"/>')
        drawn.append(text(left - 6, y + 4, f"{top * quarter / 4:.2f}", "end"))
    for i, bar in enumerate(bars):
        x, y = left + pitch * i, y_of(max(bar.start, bar.end))
        height = abs(y_of(bar.start) - y_of(bar.end))
        drawn.append(
            f'<rect x="{x + 2:.1f}" y="{y:.1f}" width="{pitch - 4:.1f}" height="{height:.1f}" fill="{bar.color}"/>'
        )
        drawn.append(text(x + pitch / 2, HEIGHT - BOTTOM - LABELS + 18 + 16 * (i % 2), bar.name, "middle"))
    if TRL in steps:
        y = y_of(steps[TRL]["step"])
        drawn.append(f'<path d="M{left:.1f} {y:.1f}h{width:.1f}" {look_of(COLORS[3], dashed=True)}/>')
        drawn.append(text(left + width, y - 5, "TRL", "end"))
    return drawn
