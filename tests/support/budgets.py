"""A pytest plugin: runs expensive test files first, and prints the CPU and wall seconds that files and tests took.

Budgets are CPU seconds, which other programs on the machine change little. They warn and never fail a test.
"""

import os
import tomllib
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
SHOWN = 12  # files, and tests


@dataclass
class Seconds:
    """CPU and wall seconds of a test, or of all tests in a file."""

    cpu: float = 0.0
    wall: float = 0.0

    def add(self, report: Any) -> None:
        self.cpu += report.cpu_seconds
        self.wall += report.duration


def cpu_seconds(pid: int | str = "self") -> float:
    """Return the CPU seconds of a process, its live descendants, and the ended ones that they have waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:  # it ended; its parent's next reading has its seconds
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS + sum(map(cpu_seconds, children.split()))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def budgets(path: Path) -> tuple[float, dict[str, float]]:
    """Return the default budget and the budgets of single files, in CPU seconds."""
    table = tomllib.loads(path.read_text())
    return table["default"], table["files"]


class Budgets:
    """Collects the seconds of every phase of every test."""

    def __init__(self, path: Path) -> None:
        self.default, self.by_file = budgets(path)
        self.files: defaultdict[str, Seconds] = defaultdict(Seconds)
        self.tests: defaultdict[str, Seconds] = defaultdict(Seconds)
        self.slow: set[str] = set()  # files of which slow tests ran: no budget includes those
        self._before = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Move files with large budgets to the front: started last, one would keep a single worker busy at the end."""
        items.sort(key=lambda item: -self.budget(item.nodeid))

    def pytest_collection_finish(self) -> None:
        self._before = cpu_seconds()  # imports belong to no test

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self._before = max(0.0, now - self._before), now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a report, which may come from another process: tests/unit runs in parallel."""
        file = file_of(report.nodeid)
        self.files[file].add(report)
        self.tests[report.nodeid].add(report)
        if "slow" in report.keywords:
            self.slow.add(file)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        if len(self.files) > 1:
            terminalreporter.section("CPU seconds and wall seconds, fixtures included", sep="=")
            for table in (self.files, self.tests):
                for name, spent in sorted(table.items(), key=lambda row: -row[1].cpu)[:SHOWN]:
                    write(f"{spent.cpu:8.1f} {spent.wall:8.1f}  {name}")
        for line in self.exceeded():
            write(line, yellow=True)

    def budget(self, nodeid: str) -> float:
        """Return the CPU seconds that the file of a test may take."""
        return self.by_file.get(file_of(nodeid), self.default)

    def exceeded(self) -> list[str]:
        """Name the files that took more than their budgets."""
        return [
            f"over budget: {name} took {spent.cpu:.0f} CPU seconds of {budget:g} (tests/budgets.toml)"
            for name, spent in self.files.items()
            if spent.cpu > (budget := self.budget(name)) and name not in self.slow
        ]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budgets(config.rootpath / "tests/budgets.toml"), "budgets")
