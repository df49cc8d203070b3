import random
from collections.abc import Iterator
from contextlib import closing
from itertools import permutations
from typing import Any

import pytest

from titan_rl.ext.sandbox.code_tests import check_row, examine
from titan_rl.ext.sandbox.local import LocalSandbox
from titan_rl.ext.sandbox.small_functions import CONSTANTS, KINDS, row, small_functions

Kind = tuple[str, str, str]
PAIRS = 300


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LocalSandbox]:
    with closing(LocalSandbox(workers=1)) as sandbox:
        yield sandbox


def test_functions_are_distinct_and_follow_from_the_seed() -> None:
    train, heldout = small_functions(3, 64)
    assert (train, heldout) == small_functions(3, 64) != small_functions(4, 64)
    questions = {row["question"] for row in (*train, *heldout)}
    assert len(questions) == len(train) + len(heldout) == len(KINDS) * len(CONSTANTS)
    assert len(heldout) == 64


def passes(program: str, function: dict[str, Any]) -> bool:
    names = dict[str, Any]()
    exec(program, names)
    (test,) = function["tests"]
    try:
        exec(test, names)
    except (AssertionError, TypeError, IndexError):
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_test_tells_every_constant_from_all_others(kind: Kind) -> None:
    functions = [row(*kind, a=a, b=3) for a in CONSTANTS]
    assert all(passes(function["answer"], function) for function in functions)
    pairs = random.Random(0).sample([*permutations(functions, 2)], PAIRS)
    assert not any(passes(other["answer"], function) for function, other in pairs)


def test_the_sandbox_agrees(sandbox: LocalSandbox) -> None:
    functions = [row(*kind, a=5, b=7) for kind in KINDS]
    for function, other in zip(functions, functions[1:] + functions[:1], strict=True):
        check_row(function["answer"], function, sandbox)
        for written in (function, other):
            solved = examine(f"```python\n{written['answer']}\n```", function["answer"], function, sandbox).solved
            assert solved == (written is function)
