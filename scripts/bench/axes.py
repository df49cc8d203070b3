"""Axes of a plot as SVG: held-out score upwards, steps or samples to the right, a legend at the right side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 780, 420, 60, 40, 190, 50
COLORS = ("#7f7f7f", "#2f7ed8", "#d9822b", "#c23b80", "#2e9e6b", "#8a63d2")  # readable on white and on black
STYLE = (
    "text{font:13px sans-serif;fill:#333}.title{font-weight:bold}.end{text-anchor:end}"
    ".middle{text-anchor:middle}.grid{stroke:#8886}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)


@dataclass(frozen=True, slots=True)
class Axes:
    most: float  # right end; the left end is 0
    floor: float  # lowest score shown; the highest is 1

    def x_of(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.most

    def y_of(self, score: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (score - self.floor) / (1 - self.floor)

    def grid(self, title: str, unit: str) -> list[str]:
        drawn = [text(LEFT, TOP - 16, title, "title")]
        for tenth in range(round(self.floor * 10), 11):
            y = self.y_of(tenth / 10)
            drawn.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            drawn.append(text(LEFT - 8, y + 4, f"{tenth / 10:.1f}", "end"))
        for quarter in range(5):
            value = self.most * quarter / 4
            drawn.append(text(self.x_of(value), HEIGHT - BOTTOM + 18, f"{value:,.0f}", "middle"))
        drawn.append(text(self.x_of(self.most / 2), HEIGHT - 10, unit, "middle"))
        return drawn

    def line(self, points: Mapping[int, float], look: str) -> str:
        dots = " ".join(f"{self.x_of(x):.1f},{self.y_of(y):.1f}" for x, y in sorted(points.items()))
        return f'<polyline points="{dots}" {look}/>'


def look_of(color: str, *, width: float = 2, dashed: bool = False) -> str:
    return f'fill="none" stroke="{color}" stroke-width="{width}"' + (' stroke-dasharray="5 4"' if dashed else "")


def legend(place: int, words: str, look: str) -> list[str]:
    x, y = WIDTH - RIGHT + 16, TOP + 20 * place
    return [f'<path d="M{x} {y}h24" {look}/>', text(x + 32, y + 4, words, "")]


def svg(drawn: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *drawn, "</svg>\n"])


def text(x: float, y: float, words: str, look: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{look}">{words}</text>'
