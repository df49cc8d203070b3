#!/usr/bin/env python3
"""Check that imports only go down, and that the core stands alone.

    .venv/bin/python scripts/layers.py            # prints every import that breaks the plan; exit 1 if there is one
    .venv/bin/python scripts/layers.py --rooms    # prints the arrows between rooms
    .venv/bin/python scripts/layers.py --tiers    # prints the lines of each tier

The plan is in pyproject.toml, [tool.titan_rl]: `floors`, top first, and what an extension `needs`. A room imports rooms
of lower floors only, and no modules import each other in a ring. The core imports neither tools nor extensions, and an
extension (a folder of titan_rl/ext) no other one that it does not need. Imports inside functions and under
TYPE_CHECKING count too. import-linter would not do: it ignores packages without __init__.py, and the root's folders
must not have one.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parents[1]
CORE, TOOLS = "core", "tools"


def modules() -> dict[str, Path]:
    """Return the path of every module by dotted name. titan_rl/actors etc. are links to the root's folders."""
    found = {}
    for folder in ("titan_rl", "actors", "meshes", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(part for part in ("titan_rl", *parts[folder == "titan_rl" :]) if part != "__init__")
            found[name] = path
    return found


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
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


def room(module: str, known: Mapping[str, Path]) -> str:
    """Return the first name of a module in titan_rl, and in tools and ext the first two."""
    parts = module.split(".")
    if parts[1:2] in (["tools"], ["ext"]) and (len(parts) > 3 or known[module].name == "__init__.py"):
        return ".".join(parts[1:3])
    return parts[1] if len(parts) > 1 else module


def tier_of(module: str) -> str:
    """Return a module's tier: "core", "tools", or the name of its extension."""
    first, *others = module.removeprefix("titan_rl.").split(".")
    if first == "ext" and others:
        return others[0]
    return TOOLS if first in ("tools", "__main__") else CORE


def forbidden(here: str, there: str, needs: Mapping[str, list[str]]) -> bool:
    """Return True if a module of one tier may not import one of the other."""
    if here in (there, TOOLS) or there == CORE:
        return False
    return here == CORE or there not in needs.get(here, ())


def main() -> int:
    plan = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["titan_rl"]
    floor = {name: len(plan["floors"]) - level for level, names in enumerate(plan["floors"]) for name in names}
    known, problems = modules(), []
    tier = {module: tier_of(module) for module in known}
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in sorted(known.items()):
        here = room(module, known)
        if module != "titan_rl" and here not in floor and not here.startswith("ext"):
            problems.append(f"{path.relative_to(ROOT)}: room {here!r} has no floor in pyproject.toml")
            continue
        for name, line in imports(path, known):
            graph[module].add(name)
            there, where = room(name, known), f"{path.relative_to(ROOT)}:{line}"
            if forbidden(tier[module], tier[name], plan["needs"]):
                problems.append(
                    f"{where}: {tier[module]} imports {tier[name]} ({name}); titan_rl/wire/parts.py finds it"
                )
            elif here in floor and there in floor and here != there and floor[here] <= floor[there]:
                problems.append(f"{where}: {here} imports {there} ({name}), which is not below it")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        problems.append("modules import each other: " + " -> ".join(error.args[1]))
    if "--rooms" in sys.argv:
        arrows = {(room(a, known), room(b, known)) for a, names in graph.items() for b in names}
        for name in floor:
            print(f"{floor[name]} {name:<12} -> {', '.join(sorted(b for a, b in arrows if a == name != b))}")
    if "--tiers" in sys.argv:
        show_tiers(tier, known)
    print("\n".join(problems) or f"layers: {len(known)} modules, imports only go down, and none crosses tiers")
    return 1 if problems else 0


def show_tiers(tier: Mapping[str, str], known: Mapping[str, Path]) -> None:
    lines = Counter[str]()
    for module, path in known.items():
        lines[tier[module]] += len(path.read_text(encoding="utf-8").splitlines())
    extensions = sum(count for name, count in lines.items() if name not in (CORE, TOOLS))
    print(f"core {lines[CORE]:,} lines, extensions {extensions:,}, tools {lines[TOOLS]:,}")
    for name, count in sorted(lines.items(), key=lambda each: -each[1]):
        if name != CORE:
            print(f"  {name:<18} {count:>6,} lines")


if __name__ == "__main__":
    sys.exit(main())
