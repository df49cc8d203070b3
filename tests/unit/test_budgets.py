"""The plugin that prints what test files cost, and names those over their budgets."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.budgets import Budgets, budgets, cpu_seconds

ROOT = Path(__file__).parents[2]


def report(nodeid: str, cpu: float, when: str = "call") -> Any:
    keywords = {"slow": 1} if "slow" in nodeid else {}
    return SimpleNamespace(nodeid=nodeid, cpu_seconds=cpu, duration=2 * cpu, when=when, keywords=keywords)


def test_a_file_over_its_budget_is_named_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "budgets.toml"
    path.write_text('default = 5\n[files]\n"tests/large.py" = 60\n')
    plugin = Budgets(path)
    for name, cpu in (("large", 59.0), ("small", 4.0), ("slow", 99.0)):
        plugin.pytest_runtest_logreport(report(f"tests/{name}.py::test_one", cpu))
    assert plugin.exceeded() == []
    plugin.pytest_runtest_logreport(report("tests/small.py::test_two", 2.0, "setup"))
    said = "over budget: tests/small.py took 6 CPU seconds of 5 (tests/budgets.toml)"
    assert plugin.exceeded() == [said]
    terminal: Any = SimpleNamespace(section=lambda title, **_: print(title), write_line=lambda line, **_: print(line))
    plugin.pytest_terminal_summary(terminal)
    lines = capsys.readouterr().out.splitlines()
    assert "    59.0    118.0  tests/large.py" in lines
    assert "     6.0     12.0  tests/small.py" in lines
    assert lines[-1] == said


def test_files_with_large_budgets_run_first_and_their_tests_in_order(tmp_path: Path) -> None:
    path = tmp_path / "budgets.toml"
    path.write_text('default = 5\n[files]\n"b.py" = 60\n"c.py" = 4\n')
    items: Any = [SimpleNamespace(nodeid=name) for name in ("a.py::y", "a.py::x", "b.py::y", "b.py::x", "c.py::x")]
    Budgets(path).pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["b.py::y", "b.py::x", "a.py::y", "a.py::x", "c.py::x"]


def test_the_seconds_of_a_live_child_count_and_those_of_its_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass\n"  # more than is asked for: ticks are rounded down
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print('up', flush=True); input()"
    before = cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        alive = cpu_seconds()
        child.communicate(b"\n")
    assert alive - before >= 0.3
    assert cpu_seconds() >= alive, "nor are they lost with the child"


def test_every_budget_is_of_a_file() -> None:
    _, by_file = budgets(ROOT / "tests/budgets.toml")
    assert [name for name in by_file if not (ROOT / name).exists()] == []
