#!/usr/bin/env python3
"""Measure how dense the source is, and refuse to let it become denser.

    .venv/bin/python scripts/density.py            # exit 1 if a figure is above its limit in pyproject.toml
    .venv/bin/python scripts/density.py --show     # the densest files, and names that occur twice

Limits are in [tool.titan_rl.density], and only shrink: lower one when its figure falls. TorchTitan's RL loop has 5.5
syntax nodes per line of code and prime-rl 7.8, where this project began with 11.1.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator

import tomli
from layers import ROOT, modules

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def code_lines(text: str) -> int:
    """Return the number of lines with code: no blank lines, comments or docstrings."""
    tree, documented = ast.parse(text), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and at not in documented for at, line in lines)


def nested(tree: ast.AST) -> int:
    """Return the number of comprehensions inside another one."""
    inside = 0
    for outer in ast.walk(tree):
        if isinstance(outer, COMPREHENSIONS):
            inside += sum(isinstance(node, COMPREHENSIONS) for node in ast.walk(outer)) - 1
    return inside


def classes(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def repeated(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def main() -> int:
    limits = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["titan_rl"]["density"]
    nodes, code, walruses, inside = dict[str, int](), dict[str, int](), 0, 0
    by_class, by_file = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        nodes[module], code[module] = sum(1 for _ in ast.walk(tree)), code_lines(text)
        walruses += sum(isinstance(node, ast.NamedExpr) for node in ast.walk(tree))
        inside += nested(tree)
        for name in classes(tree):
            by_class[name].append(module)
        if not path.stem.startswith("__"):
            by_file[path.stem].append(module)
    thousands = sum(code.values()) / 1000
    figures = {
        "nodes_per_line": sum(nodes.values()) / sum(code.values()),
        "walruses_per_1000_lines": walruses / thousands,
        "nested_comprehensions_per_1000_lines": inside / thousands,
        "classes_named_twice": len(repeated(by_class)),
        "files_named_twice": len(repeated(by_file)),
    }
    if "--show" in sys.argv:
        densest = sorted((name for name in nodes if code[name] > 40), key=lambda name: -nodes[name] / code[name])
        for name in densest[:20]:
            print(f"{nodes[name] / code[name]:5.1f} nodes per line, {code[name]:4} lines: {name}")
        for name, places in [*repeated(by_class).items(), *repeated(by_file).items()]:
            print(f"{name}: {', '.join(place.removeprefix('titan_rl.') for place in places)}")
    problems = [
        f"{name}: expected at most {limits[name]}, found {value:.4g}"
        for name, value in figures.items()
        if value > limits[name]
    ]
    print("\n".join(problems) or "density: " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
