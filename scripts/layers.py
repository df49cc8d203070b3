#!/usr/bin/env python3
"""Check that imports only go down: each room imports rooms of lower floors, and no modules import each other in a ring.

    .venv/bin/python scripts/layers.py            # prints every import that breaks the plan; exit 1 if there is one
    .venv/bin/python scripts/layers.py --rooms    # prints the arrows between rooms

The floors are in pyproject.toml, [tool.titan_rl] floors, top first. Rooms of one floor do not import each other.
Imports inside functions and under TYPE_CHECKING count too. import-linter would not do: it ignores packages without
__init__.py, and the root's folders must not have one.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parents[1]


def modules() -> dict[str, Path]:
    """Return the path of every module by dotted name. titan_rl/actors etc. are links to the root's folders."""
    found = {}
    for folder in ("titan_rl", "actors", "meshes", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(part for part in ("titan_rl", *parts[folder == "titan_rl" :]) if part != "__init__")
            found[name] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Yield the modules of titan_rl that a file imports, with line numbers."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name in known and name != "titan_rl")


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def main() -> int:
    floors = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["titan_rl"]["floors"]
    floor = {name: len(floors) - level for level, names in enumerate(floors) for name in names}
    known, problems = modules(), []
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in sorted(known.items()):
        if module != "titan_rl" and room(module) not in floor:
            problems.append(f"{path.relative_to(ROOT)}: room {room(module)!r} has no floor in pyproject.toml")
            continue
        for name, line in imports(path, known):
            graph[module].add(name)
            here, there = room(module), room(name)
            if here != there and floor[here] <= floor.get(there, 0):
                problems.append(
                    f"{path.relative_to(ROOT)}:{line}: {here} imports {there} ({name}), which is not below it"
                )
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        problems.append("modules import each other: " + " -> ".join(error.args[1]))
    if "--rooms" in sys.argv:
        arrows = {(room(a), room(b)) for a, names in graph.items() for b in names if room(a) != room(b)}
        for name in floor:
            print(f"{floor[name]} {name:<12} -> {', '.join(sorted(b for a, b in arrows if a == name))}")
    print("\n".join(problems) or f"layers: {len(known)} modules, imports only go down")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
