"""Verdicts on honest programs, and on programs that try to pass without solving anything."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from titan_rl.ext.sandbox import code_tests
from titan_rl.ext.sandbox.code_tests import check_row, examine, program, row_tests, same_lines
from titan_rl.ext.sandbox.execution import Execution, ExecutionLimits, Verdict
from titan_rl.ext.sandbox.local import LocalSandbox
from titan_rl.tasks.reward_shapes import component
from titan_rl.tasks.rewards import Answered
from titan_rl.wire.errors import SandboxRefused
from titan_rl.wire.types import Prompt

SEED, DRAWN = 20261128, 16
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
    "interrupt process 1": "import os\nif os.fork() == 0:\n  while True: os.kill(1, 2)\ndef f(x): return 0",
    "an error without a text": """
class Err(Exception):
    def __str__(self): raise ValueError
    __repr__ = __str__
def f(x): raise Err""",
    "answer without a question": """
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
def send(kind, *header, sent=(), unused=()):
    data = json.dumps([kind, header, sent, unused]).encode()
    s.sendall(struct.pack("I", len(data)) + data)
def receive():
    size, = struct.unpack("I", s.recv(4))
    return json.loads(s.recv(size))
def names(*names): receive(); send("value", ["tuple", names])
TYPE = [2, "class", ["F", [], ["__call__", "__eq__"], True]]
F = [4, "instance", [["object", 2]]]
"""
SPOKEN = {
    "builtins": """
names("__builtins__", "all", "abs", "f"); receive(); send("value", ["object", 4], sent=[TYPE, F])
while True: receive(); send("value", True)""",
    "plain data that equals everything": """
names("f"); receive(); send("value", ["object", 4], sent=[TYPE, F])
while True: receive(); send("value", ["object", 4])""",
    "a module": """
names("f"); receive(); send("value", ["module", ["unittest.__main__"]])""",
    "a special method that no class has": """
names("f"); receive(); send("value", ["object", 4], sent=[[2, "class", ["F", [], ["__class__", "__contains__"], 1]], F])
while True: receive(); send("value", True)""",
    "an error that exits": """
names("f"); receive(); send("value", ["object", 4], sent=[TYPE, F])
while True: receive(); send("raised", ["error", ["SystemExit"]])""",
    "an error that ends a loop": """
names("f"); receive(); send("value", ["object", 4], sent=[TYPE, F])
while True: receive(); send("raised", ["error", ["StopIteration"]])""",
    "a class of errors that ends a loop": """
E = [6, "class", ["E", [["builtin", ["StopIteration"]], ["builtin", ["SystemExit"]]], [], False]]
names("f"); receive(); send("value", ["object", 4], sent=[TYPE, F])
receive(); send("raised", ["object", 8], sent=[E, [8, "instance", [["object", 6]]]])
while True: receive(); send("raised", ["object", 8])""",
    "no names": """
receive(); send("value", 3)""",
    "what the tests hold": """
names("f"); receive(); send("value", ["object", 4], sent=[TYPE, F])
while True:
    receive(); stolen = 0
    for name in ("__globals__", "__code__", "gi_frame", "__class__"):
        for operation, more in (("get", []), ("set", [6])):
            send("ask", operation, [["object", 1], name, *more], {})
            if receive()[0] == "value": stolen = 6
    send("value", stolen)""",
    "a class that it makes in the tests' process": """
names("f"); receive(); send("value", ["object", 4], sent=[TYPE, F])
while True:
    receive()
    members = [8, "dict", ["__eq__", ["builtin", ["bool"]]]]
    send("ask", "__call__", [["builtin", ["type"]], "K", ["tuple", []], ["object", 8]], {}, sent=[members])
    send("ask", "__call__", [receive()[1][0]], {})
    send("value", receive()[1][0])""",
    "an object of the tests": """
names("f"); receive(); send("value", ["object", 1])""",
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
        "f(i for i in range(3))\nassert f(3) == 6",
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
        ("def f(n):\n  for i in range(n): yield i * i",
         "assert list(f(4)) == [0, 1, 4, 9]\ng = f(2); assert next(g) == 0"),
        ("def f(x, *, y=1): return x + y", "assert f(1, y=3) == 4"),
        ("def f(x): return x", "from solution import f as g\nassert g(1) == 1"),
        ("def f(x): return x",
         "import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(f(1), 1)\n"
         "if __name__ == '__main__': unittest.main()"),
        ("import xml.etree.ElementTree as ET\nimport os.path as p\ndef f(): return ET.fromstring('<a>5</a>').text",
         "import xml.etree.ElementTree as ET\nassert f() == '5'\nassert ET.fromstring('<b/>').tag == 'b'"),
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


UNITTEST = """
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(f(3), 6)
unittest.main()"""
DIFFERENCE = """
class A:
    def __sub__(s, o): return Z()
    __rsub__ = __sub__
class Z:
    def __bool__(s): return False
    def __len__(s): return 0
    def __iter__(s): return iter(())
    def __str__(s): return "-0e5"
    def __format__(s, form): return "0.00"
def f(x): return A()"""
# Wrong programs, each with a test that a judge which trusts the program's objects lets pass.
CHEATING_OBJECTS = {
    "load_tests": ("def f(x): return 0\ndef load_tests(loader, tests, pattern): return lambda result: None", UNITTEST),
    "load_tests of a module": (
        "def f(x): return 0\ndef load_tests(loader, tests, pattern): return lambda result: None",
        UNITTEST.replace("unittest.main()", "import sys\nload = unittest.defaultTestLoader.loadTestsFromModule\n"
                         "assert unittest.TextTestRunner().run(load(sys.modules['__main__'])).wasSuccessful()"),
    ),
    "SkipTest": ("import unittest\ndef f(x): raise unittest.SkipTest('no')", UNITTEST),
    "StopIteration ends all": ("def f(x): raise StopIteration", "assert all(map(f, [2, 3, 5]))"),
    "StopIteration ends a loop": (
        "def f(x): raise StopIteration", "for got, want in zip(map(f, [1, 2]), [1, 4]): assert got == want"),
    "StopIteration ends next": ("def f(x): raise StopIteration", "assert next(map(f, [3]), 7) == 7"),
    "StopIteration ends filter": ("def f(x): raise StopIteration", "assert list(filter(f, [1, 2])) == []"),
    "a subclass of StopIteration": (
        "class End(StopIteration): pass\ndef f(x): raise End", "assert all(map(f, [2, 3, 5]))"),
    "StopIteration of an operator": (
        "class A:\n  def __getitem__(s, i): raise StopIteration\ndef f(x): return A()",
        "r = f(3)\nassert all(map(lambda i: r[i] == 1, range(3)))"),
    "StopAsyncIteration": (
        "async def f(x): raise StopAsyncIteration", "import asyncio\nassert all(asyncio.run(f(i)) for i in range(3))"),
    "__contains__": ("class A:\n  def __contains__(s, x): return True\ndef f(x): return A()", "assert '()' in f(2)"),
    "__contains__ of a list": (
        "class A(list):\n  def __contains__(s, x): return True\ndef f(x): return A()", "assert '()' in f(2)"),
    "__contains__ and assertIn": (
        "class A:\n  def __contains__(s, x): return True\ndef f(x): return A()",
        UNITTEST.replace("assertEqual(f(3), 6)", "assertIn(6, f(3))")),
    "__len__": (
        "class A:\n  def __len__(s): return 2\n  def __iter__(s): return iter(())\ndef f(x): return A()",
        "r = f(3)\nassert len(r) == 2\nfor got, want in zip(r, [1, 2]): assert got == want"),
    "__len__ and __getitem__": (
        "class A:\n  def __len__(s): return 2\n  def __getitem__(s, i):\n    if i > 5: raise IndexError\n    return 0\n"
        "  def __contains__(s, x): return True\ndef f(x): return A()",
        "r = f(3)\nassert len(r) == 2 and 1 in r and 2 in r"),
    "__eq__ with its own kind": (
        "class M:\n  def __init__(s, *a): pass\n  def __eq__(s, o): return True\n  def mul(s, o): return M()",
        "assert M([[1, 2]]).mul(M([[3], [4]])) == M([[11]])"),
    "__eq__ of a list": (
        "class A(list):\n  def __eq__(s, o): return True\ndef f(x): return A()", "assert f(3) == [6]"),
    "__sub__ and __abs__": (
        "class A:\n  def __sub__(s, o): return 0\ndef f(x): return A()", "assert abs(f(2) - 4) < 1e-9"),
    "__sub__ gives an object": (
        "class A:\n  def __sub__(s, o): return s\n  def __abs__(s): return 0\n  def __float__(s): return 0.0\n"
        "  def __mul__(s, o): return 0\ndef f(x): return A()",
        "import math\nd = f(2) - 4\ntry: passed = abs(d) < 1e-9\nexcept Exception: passed = False\n"
        "try: passed = passed or d * d < 1e-9\nexcept Exception: pass\n"
        "try: passed = passed or math.isclose(d, 0)\nexcept Exception: pass\nassert passed"),
    "__sub__ gives plain data with a class": (
        "import enum\nclass Z(enum.IntEnum):\n  ZERO = 0\nclass A:\n  def __sub__(s, o): return Z.ZERO\n"
        "def f(x): return A()", "assert f(2) - 4 < 1e-9"),
    "the truth of a difference": (DIFFERENCE, "assert not (f(3) - 6)"),
    "the items of a difference": (DIFFERENCE, "assert list(f(3) - {1, 2}) == [] == [*({1, 2} - f(3))]"),
    "the iterator of a difference": (
        "class A:\n  def __xor__(s, o): return iter(())\ndef f(x): return A()", "assert list(f(3) ^ {1, 2}) == []"),
    "the length of a difference": (DIFFERENCE, "assert len(f(3) - {1, 2}) == 0"),
    "the text of a difference": (DIFFERENCE, "assert float(str(f(3) - 6)) == 0"),
    "the format of a difference": (DIFFERENCE, "assert f'{f(3) - 6:.2f}' == '0.00'"),
    "the attributes of a difference": (
        "class R:\n  days = 0\n  def total_seconds(s): return 0.0\nclass D:\n  def __sub__(s, o): return R()\n"
        "def f(x): return D()",
        "from datetime import datetime\nd = f('2020-01-02') - datetime(2020, 1, 2)\n"
        "try: passed = d.days == 0\nexcept Exception: passed = False\n"
        "try: passed = passed or abs(d.total_seconds()) < 1\nexcept Exception: pass\nassert passed"),
    "a difference's difference": (
        "class R:\n  def parts(s): return R()\n  def __len__(s): return 0\n  def __iter__(s): return iter(())\n"
        "  first = (0, [0.0])\nclass D:\n  def __sub__(s, o): return R()\ndef f(x): return D()",
        "d = (f(3) - 6).parts()\ntry: passed = d.first == (0, [0])\nexcept Exception: passed = False\n"
        "try: passed = passed or not list(d)\nexcept Exception: pass\nassert passed"),
    "the quotient and the rest": (
        "class Q:\n  def __iter__(s): return iter([1, 0])\nclass D:\n  def __divmod__(s, o): return Q()\n"
        "def f(x): return D()", "q, r = divmod(f(3), 6)\nassert q == 1 and r == 0"),
    "an item of a difference": (
        "class Q:\n  def __getitem__(s, i): return 0\nclass D:\n  def __sub__(s, o): return Q()\n"
        "def f(x): return D()", "assert (f(3) - 6)[0] == 0"),
    "the text of no time": (
        "class R:\n  def __str__(s): return '0:00:00'\nclass D:\n  def __sub__(s, o): return R()\n"
        "def f(x): return D()",
        "from datetime import datetime\nassert str(f('') - datetime(2020, 1, 2)) == '0:00:00'"),
    "a method like an operator": (
        "class D:\n  def symmetric_difference(s, o): return set()\n  difference = symmetric_difference\n"
        "def f(x): return D()",
        "try: passed = not f(3).difference({1})\nexcept Exception: passed = False\n"
        "assert passed or not f(3).symmetric_difference({1, 2})"),
    "what assertSetEqual tells it": (
        "class S:\n  def difference(s, o):\n    s.o = list(o)\n    return set()\n"
        "  def __iter__(s): return iter(s.o)\ndef f(x): return S()",
        UNITTEST.replace("assertEqual(f(3), 6)", "assertSetEqual(f(3), {2, 3})")),
    "the judge's print": (
        "import sys\ndef peer():\n  f = sys._getframe()\n  while 'peer' not in f.f_locals: f = f.f_back\n"
        "  return f.f_locals['peer']\nlast = []\ndef spy(*a, **k): last[:] = a\n"
        "def f(x):\n  if not last:\n    try: peer().ask('replace', x, None, None, spy, None)\n"
        "    except Exception: pass\n  return last[-1] if last else None",
        "f([0])\nfor x, want in (([1], [1]), ([2, 3], [4, 9])):\n  print(x, want)\n  assert f(x) == want"),
    "records of a mock": (
        "def f(g):\n  g(2)\n  g.reset_mock()\n  g(1)",
        "from unittest.mock import Mock\ng = Mock()\ntry: f(g)\nexcept AttributeError: pass\n"
        "g.assert_called_once_with(1)"),
    "__exit__ hides an assertion": (
        "class M:\n  def __enter__(s): return s\n  def __exit__(s, *e): return True\n  def f(s, x): return 0",
        "with M() as m: assert m.f(3) == 6"),
    "__aexit__ hides an assertion": (
        "class M:\n  async def __aenter__(s): return s\n  async def __aexit__(s, *e): return True",
        "import asyncio\nasync def main():\n  async with M() as m: assert m == 6\nasyncio.run(main())"),
    "an argument is changed": (
        "def f(a):\n  a.sort()\n  return list(a)", "a = [3, 1, 2]\nassert f(a) == [1, 2, 3]\nassert a == [3, 1, 2]"),
    "an argument is changed later": (
        "class S:\n  def __init__(s, a): s.a = a\n  def add(s, x): s.a.append(x)\n  def all(s): return list(s.a)",
        "a = [1]\ns = S(a); s.add(2)\nassert s.all() == [1, 2] and a == [1]"),
    "an argument is returned": (
        "def f(a): return a", "a = [1, [2]]\nb = f(a)\nassert b == a and b is not a and b[1] is not a[1]"),
    "a default argument is shared": (
        "def f(x, into=[]):\n  into.append(x)\n  return into", "a = f(1); b = f(2)\nassert a == [1]"),
    "a planted module": (
        "import os, sys, types\nroot = sys.path[-1]\ntry:\n  os.makedirs(root, exist_ok=True)\n"
        "  open(root + '/evil.py', 'w').write('raise SystemExit(0)')\nexcept OSError: pass\n"
        "open('evil.py', 'w').write('raise SystemExit(0)')\nf = evil = types.ModuleType('evil')",
        "assert f(3) == 6"),
    "a module that is named and used": (
        "class np:\n  @staticmethod\n  def isclose(a, b): return True\n"
        "def f(x): return 0", "assert np.isclose(f(3), 6)"),
    "a redefined built-in": ("def f(x): return 0\ndef len(x): return 6", "assert len(f(3)) == 6"),
    "no tests at all": ("", "assert f(3) == 6"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATING_OBJECTS)
def test_no_object_of_a_program_judges_it(name: str, sandbox: LocalSandbox) -> None:
    verdict = sandbox.run_tests_here(*with_tests(CHEATING_OBJECTS[name]))
    assert not verdict.solved, verdict
    assert verdict.execution.status == "ok", verdict


def test_no_way_to_read_a_difference_judges_a_program(sandbox: LocalSandbox) -> None:
    """Draw operators, ways to read their results, and values that each wrong program can give."""
    draw = random.Random(SEED)
    for _ in range(DRAWN):
        op, kind = draw.choice(["sub", "xor", "mod", "truediv", "floordiv"]), draw.choice(["", "r"])
        sign = {"sub": "-", "xor": "^", "mod": "%", "truediv": "/", "floordiv": "//"}[op]
        zero = draw.choice(["0", "0.0", "False", "''", "[]", "(0, 0)", "{'a': 0}", "[[0.0], ()]"])
        code = (
            f"class R:\n  x = {zero}\n  def call(s): return R()\n  def get(s): return {zero}\n"
            f"  def __getitem__(s, i): return {zero}\n  def __call__(s): return {zero}\n  r = property(lambda s: R())\n"
            f"class D:\n  def __{kind}{op}__(s, o): return R()\ndef f(x): return D()"
        )
        way = "".join(draw.choices([".call()", ".r"], k=draw.randrange(3))) + draw.choice([".x", ".get()", "[0]", "()"])
        found = f"(f(3) {sign} 6)" if not kind else f"(6 {sign} f(3))"
        verdict = sandbox.run_tests_here(code, [f"assert {found}{way} == {zero}"])
        assert not verdict.solved, (code, way)


def with_tests(case: tuple[str, ...]) -> tuple[str, list[str]]:
    return case[0], list(case[1:])


RIGHT = {
    "in place": (
        "def f(a): a.sort()", "a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]",
        "a = [[2, 1]]\nf(a[0])\nassert a == [[1, 2]]"),
    "in place, of every kind": (
        "def f(a, b, c, d, e):\n  a['x'] = [1]; b.add(2); c.append(3); d.update('aa'); e[0] = 9",
        "from collections import Counter, deque\na, b, c, d, e = {}, set(), deque(), Counter(), bytearray(b'a')\n"
        "f(a, b, c, d, e)\nassert (a, b, list(c), d, e) == ({'x': [1]}, {2}, [3], {'a': 2}, bytearray([9]))"),
    "one list in two places": (
        "def f(a):\n  a[0].append(1)\n  return a", "b = []\na = f([b, b])\n"
        "assert a == [[1], [1]] and b == [1] and a[0] is b"),
    "a list that holds itself": ("def f(a):\n  a.append(a)\n  return a", "a = []\nassert f(a) is a and a[0] is a"),
    "a list that the program keeps": (
        "class S:\n  def __init__(s, a): s.a = a\n  def sum(s): return sum(s.a)",
        "a = [1]\ns = S(a)\na.append(4)\nassert s.sum() == 5 and s.a is a",
        "s = S([1]); s.a.append(2)\nassert s.sum() == 3"),
    "a generator that works in place": (
        "def f(a):\n  for i in range(len(a)):\n    a[i] += 1\n    yield i", "a = [1, 2]\n"
        "assert list(f(a)) == [0, 1] and a == [2, 3]"),
    "an endless generator": (
        "def f():\n  n = 0\n  while True:\n    yield n\n    n += 1",
        "from itertools import islice\nassert list(islice(f(), 3)) == [0, 1, 2]",
        "assert [a for a, _ in zip(f(), range(3))] == [0, 1, 2]"),
    "an iterator": (
        "class C:\n  def __init__(s, n): s.n = n\n  def __iter__(s): return s\n  def __len__(s): return s.n\n"
        "  def __next__(s):\n    if not s.n: raise StopIteration\n    s.n -= 1\n    return s.n",
        "c = C(3)\nassert len(c) == 3 and list(c) == [2, 1, 0]"),
    "an iterator of the tests": ("def f(it): return [2 * x for x in it]", "assert f(i for i in range(3)) == [0, 2, 4]"),
    "operators": (
        "class V:\n  def __init__(s, x): s.x = x\n  def __add__(s, o): return V(s.x + o.x)\n"
        "  def __mul__(s, k): return V(s.x * k)\n  __rmul__ = __mul__\n  def __neg__(s): return V(-s.x)\n"
        "  def __iadd__(s, o):\n    s.x += o.x\n    return s\n  def __matmul__(s, o): return s.x * o.x\n"
        "  def __abs__(s): return abs(s.x)\n  def __float__(s): return float(s.x)\n"
        "  def __eq__(s, o): return s.x == o.x\n  def __hash__(s): return hash(s.x)",
        "v = V(1)\nassert v + V(2) == V(3) and v * 3 == 3 * v == V(3) and -v == V(-1) and v != V(2)\n"
        "assert V(2) @ V(4) == 8 and abs(V(-2)) == 2 and float(V(2)) == 2.0 and len({V(1), V(1)}) == 1\n"
        "w = v; w += V(4)\nassert w is v and v.x == 5"),
    "order": (
        "import functools\n@functools.total_ordering\nclass V:\n  def __init__(s, x): s.x = x\n"
        "  def __lt__(s, o): return s.x < o.x\n  def __eq__(s, o): return s.x == o.x",
        "assert V(2) > V(1) <= V(1) and max(V(1), V(3)).x == 3 and sorted([V(2), V(1)])[0] == V(1)"),
    "items": (
        "class L:\n  def __init__(s): s.d = {}\n  def __setitem__(s, k, v): s.d[k] = v\n"
        "  def __getitem__(s, k): return s.d[k]\n"
        "  def __delitem__(s, k): del s.d[k]\n  def __iter__(s): return iter(s.d)\n  def __len__(s): return len(s.d)",
        "c = L(); c['a'] = 1; c['b'] = 2; del c['b']\n"
        "assert c['a'] == 1 and 'a' in c and 'b' not in c and len(c) == 1"),
    "a subclass of list": (
        "class S(list):\n  def push(s, x): s.append(x)\ndef f(): return S([1])",
        "s = S(); s.push(3)\nassert s == [3] and 3 in s and len(s) == 1 and f() == [1] and f() != [2]"),
    "a context manager": (
        "class M:\n  def __enter__(s): return 5\n  def __exit__(s, *e): return False",
        "with M() as v: assert v == 5",
        "try:\n  with M(): raise KeyError('x')\nexcept KeyError: pass\nelse: raise AssertionError"),
    "a context manager of a generator": (
        "import contextlib\nlog = []\n@contextlib.contextmanager\ndef m():\n  log.append('in')\n  try: yield 5\n"
        "  finally: log.append('out')", "with m() as v: assert v == 5\nassert log == ['in', 'out']"),
    "async": (
        "import asyncio\nasync def f(x):\n  await asyncio.sleep(0)\n  return 2 * x",
        "import asyncio\nassert asyncio.run(f(3)) == 6",
        "import asyncio\nasync def main(): return await asyncio.gather(f(1), f(2))\n"
        "assert asyncio.run(main()) == [2, 4]"),
    "async for and with": (
        "async def f(n):\n  for i in range(n): yield i\nclass M:\n  async def __aenter__(s): return 5\n"
        "  async def __aexit__(s, *e): pass",
        "import asyncio\nasync def main():\n  async with M() as m: return [m async for _ in f(2)]\n"
        "assert asyncio.run(main()) == [5, 5]"),
    "a class of the tests": (
        "def f(node):\n  total = 0\n  while node:\n    total += node.val; node.val = 0; node = node.next\n"
        "  return total",
        "class ListNode:\n  def __init__(self, val, next=None): self.val, self.next = val, next\n"
        "n = ListNode(1, ListNode(2))\nassert f(n) == 3 and n.val == 0"),
    "a namedtuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f().x == 1 and f() == (1, 2) == P(1, 2)"),
    "the collections": (
        "from collections import *\n"
        "def f(s): return Counter(s), deque([1]), OrderedDict(a=1), defaultdict(list, a=[1])",
        "from collections import deque\nc, d, o, e = f('aab')\nassert c.most_common(1) == [('a', 2)] and c['z'] == 0\n"
        "assert d == deque([1]) and o == {'a': 1} and e == {'a': [1]}"),
    "dates": (
        "from datetime import *\ndef f(d): return d + timedelta(days=1)",
        "from datetime import *\nassert f(date(2020, 1, 1)) == date(2020, 1, 2)\n"
        "assert f(datetime(2020, 1, 1, 5, tzinfo=timezone.utc)) == datetime(2020, 1, 2, 5, tzinfo=timezone.utc)"),
    "an enum": (
        "import enum\nclass C(enum.Enum):\n  RED = 1\n  BLUE = 2\nclass N(enum.IntEnum):\n  ONE = 1\n"
        "def f(): return C.RED",
        "assert f() == C.RED and f() is C.RED and f() != C.BLUE and f().value == 1 and f().name == 'RED'\n"
        "assert len(C) == 2 and [c.value for c in C] == [1, 2] and C['RED'] is C.RED and N.ONE == 1"),
    "an exception": (
        "class Base(Exception): pass\nclass Err(Base):\n  def __init__(s, code): s.code = code\ndef f(x): raise Err(5)",
        "try: f(1)\nexcept Err as e: assert e.code == 5\nelse: raise AssertionError",
        "import unittest\nclass T(unittest.TestCase):\n  def test(self):\n    with self.assertRaises(Base): f(1)\n"
        "unittest.main()"),
    "an exception that extends ValueError": (
        "class Err(ValueError): pass\ndef f(x): raise Err('bad', x)",
        "try: f(1)\nexcept ValueError as e: assert e.args == ('bad', 1) and 'bad' in str(e) and isinstance(e, Err)\n"
        "else: raise AssertionError"),
    "isinstance": (
        "class A: pass\nclass B(A):\n  pass\ndef f(): return B()",
        "b = f()\nassert isinstance(b, A) and isinstance(b, B) and type(b) is B "
        "and issubclass(B, A) and not callable(b)"),
    "a decorator": ("def deco(f):\n  def g(*a): return f(*a) + 1\n  return g", "assert deco(lambda x: x)(1) == 2"),
    "a function of the tests that raises": (
        "def f(g):\n  try: g()\n  except KeyError: return 1", "def g(): raise KeyError('x')\nassert f(g) == 1"),
    "the name of a built-in": ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
    "a class with the name of a library": ("class queue:\n  def size(s): return 0", "q = queue()\n"
        "assert q.size() == 0"),
    "a library that the tests do not import": ("import math\ndef f(x): return x", "assert math.isclose(f(2), 2)"),
    "a main program": (
        "def f(x): return 2 * x\nif __name__ == '__main__':\n  print(f(int(input())))", "assert f(3) == 6"),
    "its own tests": (
        "import unittest\ndef f(x): return x\nclass T(unittest.TestCase):\n  def test(s): s.assertEqual(f(1), 1)\n"
        "if __name__ == '__main__': unittest.main()", "assert f(1) == 1"),
    "pickled objects": (
        "import pickle\nclass A:\n  x = 1\ndef f(): return pickle.loads(pickle.dumps(A())).x", "assert f() == 1"),
    "printed output": (
        "import sys\ndef f(n):\n  print('hi', n)\n  sys.stdout.write('ho')", "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out: f(1)\nf(2)\nassert out.getvalue() == 'hi 1\\nho'",
        "import io\nfrom unittest.mock import patch\nwith patch('sys.stdout', new_callable=io.StringIO) as out: f(3)\n"
        "assert out.getvalue() == 'hi 3\\nho'",
        "from unittest.mock import patch\nwith patch('builtins.print') as p: f(1)\np.assert_called_once_with('hi', 1)"),
    "typed input": (
        "import sys\ndef f(): return int(input('n? ')) * 2\ndef g(): return sys.stdin.readline() + sys.stdin.read()",
        "from unittest.mock import patch\nwith patch('builtins.input', return_value='4'): assert f() == 8\n"
        "with patch('builtins.input', side_effect=['1', '2']): assert (f(), f()) == (2, 4)",
        "import io, sys\nsys.stdin = io.StringIO('3\\nx\\ny')\nassert f() == 6 and g() == 'x\\ny'"),
    "arguments of other classes": (
        "def f(pattern, rng, o, q): return pattern.findall('aab'), rng.random(), o.x, q.get()",
        "import queue, random, re, types\nq = queue.Queue()\nq.put(1)\n"
        "assert f(re.compile('a'), random.Random(3), types.SimpleNamespace(x=2), q) == "
        "(['a', 'a'], random.Random(3).random(), 2, 1)"),
    "mocks as arguments": (
        "def f(client, tell):\n  tell(client.get('x', timeout=3)['v'])",
        "from unittest.mock import Mock\nclient, tell = Mock(), Mock()\nclient.get.return_value = {'v': 5}\n"
        "f(client, tell)\nclient.get.assert_called_once_with('x', timeout=3)\ntell.assert_called_once_with(5)"),
    "paths and identifiers": (
        "from pathlib import Path\nimport uuid, ipaddress\nfrom datetime import timezone\n"
        "def f(p): return p / 'b', p.suffix, uuid.UUID(int=5), ipaddress.ip_address('10.0.0.1'), timezone.utc",
        "from pathlib import Path\nimport uuid, ipaddress\nfrom datetime import timezone\n"
        "assert f(Path('a.x')) == (Path('a.x/b'), '.x', uuid.UUID(int=5), ipaddress.ip_address('10.0.0.1'), "
        "timezone.utc)"),
    "views of dicts": (
        "def f(d): return d.keys(), d.values(), d.items()",
        "k, v, i = f({'a': 1})\nassert k == {'a'} and list(v) == [1] and i == {('a', 1)}"),
    "names, docstrings and attributes": (
        "import functools\ndef deco(g):\n  @functools.wraps(g)\n  def h(*a): return g(*a)\n  return h\n"
        "class A:\n  'Doc.'\n  def __init__(s): s.x = 1\n@deco\ndef f():\n  'Doc of f.'",
        "@deco\ndef g():\n  'Doc of g.'\nassert (g.__name__, g.__doc__, f.__name__, f.__doc__) == "
        "('g', 'Doc of g.', 'f', 'Doc of f.') and A.__doc__ == A().__doc__ == 'Doc.'\n"
        "assert vars(A()) == {'x': 1} == A().__dict__"),
    "a generic class": (
        "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass Box(Generic[T]):\n  def __init__(s, v): s.v = v",
        "assert Box[int](3).v == 3"),
    "send and throw": (
        "def f():\n  total = 0\n  while True:\n    try: x = yield total\n    except KeyError: x = 10\n"
        "    if x is None: return total\n    total += x",
        "g = f(); next(g)\nassert g.send(3) == 3 and g.throw(KeyError('x')) == 13\ntry: g.send(None)\n"
        "except StopIteration as e: assert e.value == 13\nelse: assert False"),
    "copies": (
        "class A:\n  def __init__(s, v): s.v = v",
        "import copy\na = A([1]); b, c = copy.copy(a), copy.deepcopy(a)\na.v.append(2)\n"
        "assert b.v == [1, 2] and c.v == [1]"),
    "results of operators": (
        "class V:\n  def __init__(s, *x): s.x = x\n  def __mul__(s, k): return V(*(k * x for x in s.x))\n"
        "  def __iter__(s): return iter(s.x)\n  def __len__(s): return len(s.x)\n  def __repr__(s): return f'V{s.x}'",
        "v = V(1, 2) * 3\nassert v.x == (3, 6) and list(v) == [3, 6] and len(v) == 2 and str(v) == 'V(3, 6)'"),
    "names of arguments": (
        "def f(self, operation, arguments=0): return self + operation + arguments",
        "assert f(operation=1, self=2, arguments=3) == 6"),
    "large numbers": ("import math\ndef f(n): return math.factorial(n)", "import math\n"
        "assert f(3000) == math.factorial(3000)"),
    "deep data": (
        "def f(n):\n  v = []\n  for _ in range(n): v = [v]\n  return v",
        "v, n = f(5000), 0\nwhile v: v, n = v[0], n + 1\nassert n == 5000"),
    "threads": (
        "class C:\n  n = 0\n  def inc(s): s.n += 1",
        "import threading\nc = C()\nts = [threading.Thread(target=c.inc) for _ in range(8)]\n"
        "for t in ts: t.start()\nfor t in ts: t.join()\nassert c.n == 8"),
    "differences": (
        "class V:\n  def __init__(s, *x): s.x = x\n  def __sub__(s, o): return V(*(a - b for a, b in zip(s.x, o)))\n"
        "  def __getitem__(s, i): return s.x[i]\n  def __iter__(s): return iter(s.x)\n  def all(s): return s.x\n"
        "  def __mul__(s, k): return V(*(k * a for a in s.x))",
        "v = V(3, 2) - [1, 2]\nassert list(v) == [2, 0] and v[0] == 2 and v.x == v.all() == (2, 0)\n"
        "assert (V(1, 2) * 0).x == (0, 0) == (V(1, 2) - V(1, 2)).x"),
    "a class of sets": (
        "class S:\n  def __init__(s, *x): s.x = x\n  def __iter__(s): return iter(s.x)\n"
        "  def difference(s, o): return S(*(a for a in s.x if a not in o))",
        "assert set(S(1, 2).difference({1})) == {2} == set(S(1, 2).difference(S(1)))",
        UNITTEST.replace("assertEqual(f(3), 6)", "assertSetEqual({*S(1, 2)}, {1, 2})")),
    "seeds": (
        "import random\ndef f(): return random.randint(1, 10 ** 9)",
        "import random\nrandom.seed(7)\na = [f() for _ in range(3)]\nrandom.seed(7)\n"
        "assert a == [f() for _ in range(3)]",
        "import random\nrandom.seed('x')\na = random.randint(1, 10 ** 9)\nassert f() == a"),
    "warnings": (
        "import warnings\nclass Old(UserWarning): pass\n"
        "def f(x):\n  warnings.warn('old', DeprecationWarning)\n  warnings.warn('mine', Old)\n  return x",
        "import warnings\nwith warnings.catch_warnings(record=True) as w:\n  warnings.simplefilter('always')\n  f(3)\n"
        "assert [str(each.message) for each in w] == ['old', 'mine'] and issubclass(w[1].category, Old)",
        "import warnings\nwith warnings.catch_warnings():\n  warnings.simplefilter('error')\n"
        "  try: f(3)\n  except DeprecationWarning: pass\n  else: assert False",
        UNITTEST.replace("self.assertEqual(f(3), 6)", "\n        with self.assertWarns(Old): f(6)")),
    "warnings at its import": (
        "import warnings\nwarnings.warn('early')\nA = '\\d'\ndef f(x): return x\nwarnings.warn('late')",
        "assert f(3) == 3 and A == chr(92) + 'd'"),
    "logs": (
        "import logging\nlog = logging.getLogger('x.y')\ndef f(x):\n  log.error('bad %d', x)\n  log.debug('more')",
        UNITTEST.replace("self.assertEqual(f(3), 6)", "\n        with self.assertLogs('x') as seen: f(3)"
                         "\n        self.assertEqual(seen.output, ['ERROR:x.y:bad 3'])"),
        UNITTEST.replace("self.assertEqual(f(3), 6)", "\n        with self.assertLogs(level='DEBUG') as seen: f(3)"
                         "\n        self.assertEqual(seen.output, ['ERROR:x.y:bad 3', 'DEBUG:x.y:more'])"
                         "\n        with self.assertNoLogs('x.z'): f(3)")),
    "settings of the tests' process": (
        "import os\nfrom decimal import Decimal\ndef deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
        "def home(): return os.environ.get('MY_HOME')\ndef third(): return Decimal(1) / 3\n"
        "def here(): return os.getcwd()",
        "import sys\nsys.setrecursionlimit(5000)\nassert deep(2000) == 2000",
        "import os\nos.environ['MY_HOME'] = '/x'\nassert home() == '/x'\ndel os.environ['MY_HOME']\n"
        "assert home() is None",
        "from unittest.mock import patch\nimport os\nwith patch.dict(os.environ, MY_HOME='y'): assert home() == 'y'",
        "from decimal import Decimal, getcontext, localcontext\nwith localcontext() as c:\n  c.prec = 5\n"
        "  assert third() == Decimal('0.33333')\nassert len(str(third())) > 20",
        "import os\nos.mkdir('sub')\nos.chdir('sub')\nassert here().endswith('/sub')"),
    "an ellipsis": ("def f(x): return x, ..., NotImplemented", "assert f(...) == (..., ..., NotImplemented)"),
    "many calls with long lists": (
        "def f(a): return sum(a)", "for n in range(300): assert f(list(range(1000))) == 499500"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes(name: str, sandbox: LocalSandbox) -> None:
    verdict = sandbox.run_tests_here(*with_tests(RIGHT[name]))
    assert verdict.solved, verdict


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


TESTS_NOTHING: dict[str, tuple[str, dict[str, Any]]] = {
    "HumanEval without an entry point": ("", {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"}),
    "functions of pytest": ("", {"tests": "def test_add():\n    assert add(1, 2) == 3\n"}),
    "unittest without main": ("", {"tests": UNITTEST.replace("unittest.main()", "")}),
    "a comment": ("", {"tests": "# later\n"}),
    "the reference program": ("def add(a, b):\n    return a + b", {"unit_tests": ["assert add(1, 2) == 3"]}),
    "no output": ("", {"tests": {"inputs": ["1"], "outputs": [""]}}),
}


@pytest.mark.parametrize("name", TESTS_NOTHING)
def test_a_row_that_tests_nothing_is_refused(name: str, sandbox: LocalSandbox) -> None:
    with pytest.raises(ValueError, match="expects tests that an empty program fails"):
        check_row(*TESTS_NOTHING[name], sandbox)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_tests_is_not_refused(name: str, sandbox: LocalSandbox) -> None:
    row, answer, _ = ROWS[name]
    check_row(answer, row, sandbox)


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
    assert same_lines("1\n2", "1\r\n2\r\n")
    assert not same_lines("1\x0b2\x1c3\u20284", "1\n2\n3\n4")
