"""A task of Python functions so small that a model of 135M parameters writes some of them: task.name =
"titan_rl.ext.sandbox.small_functions:small_functions", task.reward = "code_tests".

    "Write a Python function f(x) that returns x times 3 plus 2." -> "def f(x):\\n    return x * 3 + 2"
"""

import random
from typing import Any

KINDS = (
    ("x", "returns x times {a} plus {b}", "x * {a} + {b}"),
    ("x", "adds {a} to x and multiplies the sum by {b}", "(x + {a}) * {b}"),
    ("x", "returns the square of x, minus {a}", "x * x - {a}"),
    ("x", "returns True if x is divisible by {a}, else False", "x % {a} == 0"),
    ("xs", "returns how many numbers of the list xs are larger than {a}", "sum(x > {a} for x in xs)"),
    ("xs", "returns the sum of the list xs, times {a}", "sum(xs) * {a}"),
    ("s", "returns the first {a} characters of the string s", "s[:{a}]"),
    ("s", "returns the string s repeated {a} times", "s * {a}"),
)
"""The argument, the words and the expression of each kind."""
CONSTANTS = range(2, 62)
INPUTS = {
    "x": "range(200)",
    "xs": "[[n * k % 97 for k in range(n)] for n in range(60)]",
    "s": '["abcdefghij" * n for n in range(10)]',
}
"""The inputs of a function's test, by its argument: they tell every constant from all others."""


def small_functions(seed: int, eval_size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the functions to train on and the held-out ones: each kind with each constant once."""
    draw = random.Random(seed)
    rows = [row(*kind, a=a, b=draw.randint(2, 20)) for kind in KINDS for a in CONSTANTS]
    draw.shuffle(rows)
    return rows[eval_size:], rows[:eval_size]


def row(argument: str, words: str, expression: str, a: int, b: int) -> dict[str, Any]:
    """Return one function: the question, its program, and a test of it."""
    body = expression.format(a=a, b=b)
    return {
        "question": f"Write a Python function f({argument}) that {words.format(a=a, b=b)}.",
        "answer": f"def f({argument}):\n    return {body}",
        "tests": [f"for value in {INPUTS[argument]}:\n    assert f(value) == (lambda {argument}: {body})(value)"],
    }
