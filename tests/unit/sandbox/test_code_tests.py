"""Verdicts on programs: those of honest ones, and of those that try to pass without solving anything."""

from collections.abc import Iterator
from typing import Any

import pytest

from titan_rl.sandbox import code_tests
from titan_rl.sandbox.code_tests import examine, program, row_tests, same_lines
from titan_rl.sandbox.execution import Execution, ExecutionLimits, SandboxRefused, Verdict
from titan_rl.sandbox.local import LocalSandbox
from titan_rl.tasks.reward_shapes import component
from titan_rl.tasks.rewards import Answered
from titan_rl.wire.types import Prompt

CHEATS = {
    "exit": "import os; os._exit(0)",
    "exit when called": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "import sys; sys.exit(0)",
    "raise SystemExit": "def f(x): raise SystemExit(0)",
    "print the verdict": 'print(\'{"exit_code": 0, "tests": {"passed": 1, "failures": []}}\')\ndef f(x): pass',
    "write the verdict everywhere": """
import os
def f(x):
    for d in range(256):
        for pid in ("self", 1):
            for path in (f"/proc/{pid}/fd/{d}", f"/dev/fd/{d}"):
                try: open(path, "w").write('{"exit_code": 0, "tests": {"passed": 1, "failures": []}}')
                except OSError: pass
        try: os.write(d, b'{"exit_code": 0, "tests": {"passed": 1, "failures": []}}')
        except OSError: pass""",
    "an object that equals everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    __lt__ = __gt__ = __le__ = __ge__ = __eq__
    def __sub__(self, other): return self
    __rsub__ = __abs__ = __add__ = __radd__ = __sub__
def f(x): return Any()""",
    "a number that equals everything": """
class Any(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
def f(x): return Any()""",
    "replace what judges": """
def all(x): return True
def abs(x): return 0
def isinstance(a, b): return True
class math:
    @staticmethod
    def isclose(*a, **k): return True
def f(x): return 0""",
    "patch the interpreter": """
import builtins, sys
builtins.all = builtins.any = lambda x: True
builtins.abs = lambda x: 0
sys.settrace(lambda *a: None)
def f(x): return 0""",
    "find the tests": """
import gc, os, sys
def f(x):
    for o in gc.get_objects():
        if isinstance(o, str) and "assert f(" in o: return 6
    frame = sys._getframe()
    while frame:
        if any("assert" in str(v) for v in frame.f_locals.values()): return 6
        frame = frame.f_back
    for name in os.listdir("/proc/1/fd"): open(f"/proc/1/fd/{name}").read()
    return 0""",
    "stop process 1": "import os, signal\ndef f(x):\n  for s in (9, 19, 11, 15): os.kill(1, s)\n  return 0",
    "answer what was not asked": """
import json, os, socket, struct
def f(x):
    for text in (["value", 6], ["value", ["yours", 0]], ["ask", "call", 0, [[], {}]]):
        data = json.dumps(text).encode()
        os.write(3, struct.pack("I", 1 << 30) + data)
    return 0""",
    "endless answer": "def f(x): return list(range(10 ** 7))",
    "nested answer": "def f(x):\n  v = 0\n  for _ in range(900): v = [v]\n  return v",
    "hang": "def f(x):\n  while True: pass",
}
SPEAK = """
import json, os, socket, struct
s = socket.socket(fileno=3)
def send(message):
    data = json.dumps(message).encode()
    s.sendall(struct.pack("I", len(data)) + data)
def receive():
    size, = struct.unpack("I", s.recv(4))
    return json.loads(s.recv(size))
"""
SPOKEN = {
    "builtins": """
receive(); send(["value", ["list", ["__builtins__", "f"]]])
while True:
    _, operation, number, arguments = receive()
    fake = [["all", ["mine", 5]], ["range", ["mine", 6]]]
    if number == 6: send(["value", ["list", []]])
    else: send(["value", ["dict", [["tuple", each] for each in fake]] if "__builtins__" in arguments else True])""",
    "a module that exits": """
receive(); send(["value", ["list", ["f"]]])
receive(); send(["value", ["mine", 1]])
while True:
    receive(); send(["value", ["module", "unittest.__main__"]])""",
    "an error that exits": """
receive(); send(["value", ["list", ["f"]]])
while True:
    receive(); send(["raised", "SystemExit", ""])""",
    "no names": """
receive(); send(["value", 3])""",
    "what the tests hold": """
receive(); send(["value", ["list", ["f"]]])
receive(); send(["value", ["yours", 0]])
while True:
    receive(); send(["ask", "get", 0, ["__globals__"]])""",
}
JUDGED = ["import math\nassert f(3) == 6\nassert abs(f(2) - 4) < 1e-9\nassert all(f(i) == 2 * i for i in range(9))"]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    sandbox = LocalSandbox(limits=ExecutionLimits(cpu_seconds=1, wall_seconds=20, memory_mb=256), workers=1)
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes(name: str, sandbox: LocalSandbox) -> None:
    found = sandbox.run_tests_here(CHEATS[name], JUDGED)
    assert not found.solved, found
    assert found.execution.status != "sandbox_failed", found


@pytest.mark.parametrize("name", SPOKEN)
def test_a_solution_that_speaks_for_itself_does_not_pass(name: str, sandbox: LocalSandbox) -> None:
    for test in (
        *JUDGED,
        "assert all(f(i) == 2 * i for i in range(3))",
        "import os\nf(3)\nf(lambda: 1)\nassert f(3) == 6",
    ):
        found = sandbox.run_tests_here(SPEAK + SPOKEN[name], [test])
        assert not found.solved, found


def test_the_names_of_a_library_are_the_librarys(sandbox: LocalSandbox) -> None:
    assert not sandbox.run_tests_here(CHEATS["replace what judges"], ["assert math.isclose(f(3), 6)"]).solved
    assert sandbox.run_tests_here("import math\ndef f(x): return 2 * x", ["assert math.isclose(f(3), 6)"]).solved


def test_an_honest_program_passes(sandbox: LocalSandbox) -> None:
    found = sandbox.run_tests_here("def f(x):\n  print('hello')\n  return 2 * x", [*JUDGED, "assert f(2) == 5"])
    assert (found.passed, found.total, found.solved) == (1, 2, False)
    assert found.failures == ["test 1: AssertionError"]
    assert found.execution.stdout.startswith("hello\n")


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(): return {1: (2, [3.5, {4}]), 'a': None, b'x': frozenset({1}), True: 1j}",
         "assert f() == {1: (2, [3.5, {4}]), 'a': None, b'x': frozenset({1}), True: 1j}"),
        ("def f(): return 10 ** 100, float('inf'), range(3)", "assert f() == (10 ** 100, float('inf'), range(3))"),
        ("from decimal import Decimal\ndef f(): return Decimal('1.10')",
         "from decimal import Decimal\nassert f() == Decimal('1.1')"),
        ("def f(x):\n  if x < 0: raise ValueError('negative')",
         "try:\n  f(-1)\n  assert False\nexcept ValueError as e:\n  assert 'negative' in str(e)"),
        ("class Stack:\n  def __init__(self): self.items = []\n  def push(self, x): self.items.append(x)\n"
         "  def __len__(self): return len(self.items)",
         "s = Stack(); s.push(3); s.push(4)\nassert s.items == [3, 4] and len(s) == 2"),
        ("class P:\n  def __init__(self, x): self.x = x\n  def __eq__(self, o): return self.x == o.x",
         "assert P(1) == P(1)"),
        ("def f(g, x): return g(g(x))", "assert f(lambda x: x + 3, 1) == 7"),
        ("def f(n):\n  for i in range(n): yield i * i",
         "assert list(f(4)) == [0, 1, 4, 9]\ng = f(2); assert next(g) == 0"),
        ("def f(x, *, y=1): return x + y", "assert f(1, y=3) == 4"),
        ("def f(x): return x", "from solution import f as g\nassert g(1) == 1"),
        ("import collections\ndef f(s): return collections.Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("def f(x): return x",
         "import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(f(1), 1)\n"
         "if __name__ == '__main__': unittest.main()"),
        ("import xml.etree.ElementTree as ET\nimport os.path as p\ndef f(): return ET.fromstring('<a>5</a>').text",
         "assert f() == '5'\nassert ET.fromstring('<b/>').tag == 'b'"),
        ("async def f(x): return x", "import asyncio\nassert callable(f)"),
    ],
)  # fmt: skip
def test_what_passes_between_tests_and_solution(code: str, test: str, sandbox: LocalSandbox) -> None:
    found = sandbox.run_tests_here(code, [test])
    assert found.solved, found


def test_a_failing_unittest_fails(sandbox: LocalSandbox) -> None:
    test = (
        "import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(f(1), 2)\n"
        "if __name__ == '__main__': unittest.main()"
    )
    assert not sandbox.run_tests_here("def f(x): return x", [test]).solved


ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "MBPP": (
        {"test_list": ["assert f(3) == 6", "assert f(4) == 8"], "test_imports": ["import math"]},
        "",
        "def f(x): return 2 * x",
    ),
    "HumanEval": (
        {"test": "def check(candidate):\n    assert candidate(3) == 6", "entry_point": "f"},
        "",
        "def f(x): return 2 * x",
    ),
    "the answer": ({}, "assert f(3) == 6", "def f(x): return 2 * x"),
    "a list in the answer": ({}, '["assert f(3) == 6"]', "def f(x): return 2 * x"),
    "inputs and outputs": (
        {"tests": {"inputs": ["3\n", "4\n"], "outputs": ["6", "8\n"]}},
        "",
        "print(2 * int(input()))",
    ),
    "inputs and outputs as text": ({"tests": '{"inputs": ["3"], "outputs": ["6"]}'}, "", "print(2 * int(input()))"),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_shapes_of_rows(name: str, sandbox: LocalSandbox) -> None:
    row, answer, code = ROWS[name]
    right, wrong = f"Sure:\n```python\n{code}\n```\nDone.", f"```python\n{code.replace('2 *', '3 *')}\n```"
    assert examine(right, answer, row, sandbox).solved
    assert not examine(wrong, answer, row, sandbox).solved
    assert not examine("", answer, row, sandbox).solved


def test_the_reward_is_built_in(monkeypatch: pytest.MonkeyPatch, sandbox: LocalSandbox) -> None:
    monkeypatch.setattr(code_tests, "shared", lambda: sandbox)
    prompt = Prompt(0, "Double it.", [1], "assert f(3) == 6", {})
    scores = [component("code_tests").call(prompt, Answered(f"def f(x): return {n} * x")) for n in (2, 3)]
    assert scores == [1.0, 0.0]


def test_nothing_run_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def run_tests_here(self, code: str, tests: list[str], *, setup: str) -> Verdict:
            return Verdict(0, 1, [], Execution("sandbox_failed", detail="namespaces: no"))

    monkeypatch.setattr(code_tests, "shared", Broken)
    with pytest.raises(SandboxRefused, match="the sandbox failed: namespaces: no"):
        code_tests.code_tests("", "assert f(3) == 6", {})


def test_a_row_without_tests_is_named() -> None:
    with pytest.raises(ValueError, match='expects tests in the column "tests" or in the answer'):
        row_tests("", {})
    with pytest.raises(ValueError, match="of the same length"):
        row_tests("", {"tests": {"inputs": ["1"], "outputs": []}})


def test_program_is_the_last_block() -> None:
    assert program("```python\na\n```\n```py\nb\n```") == "b\n"
    assert program("```python\ncut off") == "cut off"
    assert program("print(1)") == "print(1)"


def test_same_lines() -> None:
    assert same_lines("1 \n2\n\n", "1\n2")
    assert not same_lines("1\n2\n3", "1\n2")
    assert not same_lines("1 2", "12")
