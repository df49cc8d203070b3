"""Counts the lines of code that the processes of a run import, project by project."""

import ast
import io
import os
import tokenize
from collections.abc import Iterable
from pathlib import Path
from sysconfig import get_path

from bench.peer_runs import LOOP_FILE, OURS, SCRIPTS, launch, temporary, with_env, write_assets

ROOT = SCRIPTS.parent
RECORDER = Path(__file__).with_name("record_imports")
OWN_FOLDERS = ("titan_rl", "actors", "meshes", "kernels")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
LOOP, MODELS, OTHERS = "of the RL loop", "of TorchTitan besides", "of torchstore and renderers"
OF_PACKAGE = {"torchtitan": MODELS, "torchstore": OTHERS, "renderers": OTHERS}


def imported(way: str, name: str, checkout: Path) -> dict[str, tuple[int, int]]:
    """Run two steps. Return the modules that any process executed, and their lines of code, by part."""
    with temporary() as folder:
        files, assets = Path(folder) / "files", Path(folder) / "assets"
        files.mkdir()
        write_assets(assets, name)
        start = launch(way, name, assets, Path(folder) / "run", checkout, steps=2)
        path = f"{RECORDER}:{start.env['PYTHONPATH']}"
        start = with_env(start, {"RECORD_IMPORTS": str(files), "PYTHONPATH": path})
        start.run(Path(folder) / "log")
        executed = {Path(line).resolve() for file in files.iterdir() for line in file.read_text().splitlines()}
    return {part: counted(own) for part, own in parts_of(way, executed, checkout).items()}


def parts_of(way: str, executed: Iterable[Path], checkout: Path) -> dict[str, list[Path]]:
    """Sort the files by part. Monarch, vLLM, torch and everything below them serve both loops: not counted."""
    found: dict[str, list[Path]] = {LOOP: [], MODELS: [], OTHERS: []}
    loop = [ROOT / name for name in OWN_FOLDERS] if way == OURS else [checkout / LOOP_FILE.parent]
    places = [checkout, *map(Path, os.environ.get("PYTHONPATH", "").split(os.pathsep)), Path(get_path("purelib"))]
    for file in sorted(executed):
        package = next(
            (file.relative_to(each.resolve()).parts[0] for each in places if file.is_relative_to(each.resolve())), ""
        )
        if any(file.is_relative_to(folder.resolve()) for folder in loop):
            found[LOOP].append(file)
        elif package in OF_PACKAGE:
            found[OF_PACKAGE[package]].append(file)
    return found


def counted(files: Iterable[Path]) -> tuple[int, int]:
    """Return the number of files and of their lines of code."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    return len(texts), sum(map(lines_of_code, texts))


def lines_of_code(text: str) -> int:
    """Count the lines that are neither blank nor only a comment or part of a docstring."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)
