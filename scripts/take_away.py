"""Copies the tree without some of its optional parts, and runs the rest. Started by scripts/without.

NAME   a folder of titan_rl/ext, or "tools"; without any, the names are printed
--all  everything in titan_rl/ext, and the tools
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from layers import ROOT, imports, modules

TOOLS = "tools"
TESTED = ("batch", "config", "kernels", "meshes", "record", "rollout", "tasks", "text", "train", "wire")
"""Folders of tests/unit whose tests run in the copy."""
LEFT_OUT = ("tests/unit/config/test_presets.py",)  # reads every shipped config, of extensions too
RUN_SECONDS = 300
SITE = "site"
UNINSTALLED = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if not getattr(each, "__module__", "").startswith("__editable__")]
"""
"""Hides the modules of this tree, which an editable install would find in place of missing ones."""


def parts() -> list[str]:
    return [*sorted(path.name for path in (ROOT / "titan_rl/ext").iterdir() if (path / "__init__.py").exists()), TOOLS]


def copied(to: Path, names: Iterable[str]) -> None:
    """Copy what git knows, or would, without these parts."""
    gone = [f"titan_rl/ext/{name}/" for name in names] + [f"tests/unit/ext/{name}/" for name in names]
    if TOOLS in names:
        gone += ["titan_rl/tools/", "tests/unit/tools/"]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        source = ROOT / name
        if not name.startswith(tuple(gone)) and (source.is_file() or source.is_symlink()):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name, follow_symlinks=False)


def tests_without(tree: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the test files of TESTED that import nothing which the copy lacks, not through tests/support either."""
    support = {f"support.{path.stem}": path for path in (tree / "tests/support").glob("*.py")}
    support |= {f"golden.{path.stem}": path for path in (tree / "tests/golden").glob("*.py")}

    def lacks(path: Path, seen: set[Path]) -> bool:
        if path in seen:
            return False
        seen.add(path)
        names = [name for name, _ in imports(path, {**known, **support})]
        return any(lacks(support[name], seen) if name in support else not present(tree, name) for name in names)

    for folder in TESTED:
        for path in sorted((tree / "tests/unit" / folder).rglob("test_*.py")):
            fixtures = [above / "conftest.py" for above in path.parents if (above / "conftest.py").exists()]
            left_out = str(path.relative_to(tree)) in LEFT_OUT
            if not left_out and not any(lacks(each, set()) for each in (path, *fixtures)):
                yield str(path.relative_to(tree))


def present(tree: Path, module: str) -> bool:
    path = tree.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def called(tree: Path, *command: str) -> None:
    """Run a command in the copy, whose modules come before this tree's."""
    done = subprocess.run([sys.executable, *command], cwd=tree, env=environment(tree))
    if done.returncode:
        raise SystemExit(f"without: exit code {done.returncode} of {' '.join(command)[:200]}")


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{tree.parent / SITE}:{tree}"}


def import_all(tree: Path) -> None:
    """Import every module of the copy but tools, and kernels that need Triton."""
    names = [name for name in modules() if present(tree, name) and not name.startswith("titan_rl.tools")]
    names = [name for name in names if not name.endswith(("__main__", "_triton", "triton_kernels"))]
    called(tree, "-c", f"import importlib\nfor name in {names}: importlib.import_module(name)")


def trained(tree: Path, folder: Path) -> None:
    """Train a few steps, resume, lose a generator, and end with exported weights."""
    keys = {"job.dump_folder": folder, "cold_start.steps": 40, "cold_start.stop_at": 0, "checkpoint.interval": 2}
    keys |= {"eval.size": 16, "algorithm.max_dead_steps": 0}
    command = ["-m", "titan_rl.run", "--config", "grpo_llama", *(f"--{key}={value}" for key, value in keys.items())]
    called(tree, *command, "--training.steps", "4")
    command = [sys.executable, *command, "--training.steps", "24"]
    process = subprocess.Popen(command, cwd=tree, env=environment(tree), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    killed, lines = False, list[str]()
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
        if not killed and line.split()[:1] == ["8/24"]:
            os.kill(rank_of(process.pid, "generator"), signal.SIGKILL)
            killed = True
    code = process.wait(RUN_SECONDS)
    output = "".join(lines)
    steps = re.findall(r"^ +(\d+/24) ", output, re.MULTILINE)
    wrong = [
        *([f"exit code {code}"] if code else []),
        *([] if steps and steps[0] == "5/24" else ["it did not resume after step 4"]),
        *(["no generator was lost and replaced"] if not killed or "is back" not in output else []),
        *(["no weights were exported"] if not (folder / "hf/config.json").is_file() else []),
    ]
    if wrong:
        raise SystemExit(f"without: grpo_llama: {', '.join(wrong)}")


def rank_of(controller: int, kind: str) -> int:
    """Return the newest launcher of a rank of this kind: the rank dies with it."""
    import psutil

    def named(process: psutil.Process) -> bool:
        try:
            return process.environ().get("TITAN_RL_RANK", "").split(" ")[-1].startswith(kind)
        except (psutil.Error, OSError):
            return False

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = [each for each in psutil.Process(controller).children(recursive=True) if named(each)]
        if found:
            return found[-1].pid
    raise SystemExit(f"without: found no process of a {kind}")


def main(argv: Sequence[str]) -> int:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/without", description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true", help="take all of them away")
    parser.add_argument("--no-tests", action="store_true", help="run no tests, train only")
    options = parser.parse_args(argv)
    names = parts() if options.all else options.names
    if not names:
        print("\n".join(parts()))
        return 0
    if unknown := sorted({*names} - {*parts()}):
        parser.error(f"expected any of {', '.join(parts())}, found {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="without-") as scratch:
        tree = Path(scratch) / "tree"
        copied(tree, names)
        (tree.parent / SITE).mkdir()
        (tree.parent / SITE / "sitecustomize.py").write_text(UNINSTALLED, encoding="utf-8")
        import_all(tree)
        trained(tree, Path(scratch) / "run")
        if not options.no_tests:
            files = list(tests_without(tree, modules()))
            marks = "not slow and not gpu and not root"
            called(tree, "-m", "pytest", "-q", "-m", marks, "-n", "2", "--dist", "loadfile", *files)
    print(f"without {', '.join(names)}: trained, resumed, recovered and exported")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
