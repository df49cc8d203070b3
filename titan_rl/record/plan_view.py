"""The plan that a run shows before it starts anything."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class MeshRow:
    name: str
    procs: int
    layout: str  # "FSDP2 2 x TP 1"
    device: str
    dtype: str
    holds: str  # "0.83M parameters, AdamW"


@dataclass(frozen=True, slots=True)
class PartTable:
    """What something takes, part by part."""

    title: str
    rows: list[tuple[str, str, str]]  # part, size, formula
    total: str


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run will do. A fact is a label and its value: model, task, weights, dump folder, resume."""

    title: str
    description: str
    meshes: Sequence[MeshRow]
    facts: Sequence[tuple[str, str]]
    warnings: Sequence[str] = ()
    hosts: Sequence[tuple[str, str, str]] = ()  # name, ranks, taken slots; empty: one host
    tables: Sequence[PartTable] = ()


def plan_view(plan: RunPlan) -> RenderableType:
    parts: list[RenderableType] = [Rule(Text(plan.title, "bold"), align="left", style="dim")]
    if plan.description:
        parts += [Text(plan.description, "italic")]
    holds = "\n".join(f"{row.name}: {row.holds}" for row in plan.meshes)
    parts += ["", mesh_table(plan.meshes)]
    if plan.hosts:
        parts += ["", host_table(plan.hosts)]
    parts += ["", labelled([("holds", holds), *plan.facts])]
    for table in plan.tables:
        parts += ["", part_table(table)]
    if plan.warnings:
        parts += ["", labelled([("warning", text) for text in plan.warnings], style="yellow")]
    return Group(*parts, "")


def labelled(rows: Sequence[tuple[str, RenderableType]], style: str = "dim") -> Table:
    """Return a table of two columns: labels, and values that wrap within their column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=style, no_wrap=True, min_width=10)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, value)
    return table


def part_table(parts: PartTable) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(parts.title, style="dim", no_wrap=True, min_width=10)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column(parts.total, overflow="fold")
    for row in parts.rows:
        table.add_row(*row)
    return table


def mesh_table(rows: Sequence[MeshRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("mesh", style="bold", no_wrap=True, min_width=10)
    table.add_column("procs", justify="right", no_wrap=True)
    for name in ("layout", "device", "dtype"):
        table.add_column(name)
    for row in rows:
        table.add_row(row.name, str(row.procs), row.layout, row.device, row.dtype)
    return table


def host_table(rows: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("host", style="bold", no_wrap=True, min_width=10)
    table.add_column("ranks")
    table.add_column("slots", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_trimmed(console: Console, *parts: RenderableType) -> None:
    """Print without the spaces with which rich fills each line: a pager would wrap them."""
    with console.capture() as captured:
        console.print(*parts, soft_wrap=False)
    for line in captured.get().splitlines():
        console.file.write(f"{line.rstrip()}\n")
