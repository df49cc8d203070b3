"""Built-in verifiers."""

import json
import sys
from types import ModuleType
from typing import Any

import pytest

from titan_rl.tasks.rewards import Answered
from titan_rl.tasks.verifiers import VERIFIERS
from titan_rl.wire.types import Prompt


def verified(name: str, text: str, answer: str = "", row: dict[str, Any] | None = None, **arguments: Any) -> float:
    prompt = Prompt(0, "q", [], answer, row or {})
    return VERIFIERS[name](arguments)(prompt, Answered(text, [0] * len(text)))


@pytest.mark.parametrize(
    ("text", "answer", "tolerance", "reward"),
    [
        ("about 3.14", "3.14159", 1e-2, 1.0),
        ("about 3.14", "3.14159", 1e-6, 0.0),
        ("-2", "-2.0", 0.0, 1.0),
        ("none", "1", 0.1, 0.0),
        ("1/3", "0.333333", 1e-5, 1.0),
        ("so 5", "x #### 5", 0.0, 1.0),
    ],
)
def test_numbers_within_a_tolerance(text: str, answer: str, tolerance: float, reward: float) -> None:
    assert verified("number", text, answer, tolerance=tolerance) == reward


def test_patterns_are_the_argument_or_the_reference() -> None:
    assert verified("regex", "yes, 12", pattern=r"^yes.*\d{2}$") == 1.0
    assert verified("regex", "no", "y", pattern="^yes") == 0.0
    assert verified("regex", "abc", "b.$") == 1.0


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"n": 1}', 1.0),
        ('{"n": "1"}', 0.0),
        ("[]", 0.0),
        ("{", 0.0),
        ("[" * 100_000, 0.0),
        ('first ```json\n{}\n``` then\n```json\n{"n": 2}\n``` done', 1.0),
        ('```JSON\r\n{"n": 2}\r\n```', 1.0),
        ('```json\n{"n": 2}', 1.0),
        ('```\n{"n": 2}\n``` then ```\n{}\n```', 0.0),
    ],
)
def test_json_is_held_to_a_schema(text: str, reward: float) -> None:
    assert verified("json_schema", text, schema=json.dumps(SCHEMA)) == reward
    assert verified("json_schema", text, json.dumps(SCHEMA)) == reward
    assert verified("json_schema", text, "", {"schema": SCHEMA}) == reward


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ('{"x": NaN}', {"type": "object"}),
        ("Infinity", {"type": "number"}),
        ("1e400", {"type": "number"}),
        ("1e400", {"multipleOf": 7}),
        ("1" + "0" * 400, {"multipleOf": 0.1}),
        ('{"x": 9, "x": 5}', {"properties": {"x": {"maximum": 6}}}),
        ('"not an email"', {"type": "string", "format": "email"}),
    ],
)
def test_answers_that_are_no_json_or_match_no_format_are_wrong(text: str, schema: dict[str, Any]) -> None:
    assert verified("json_schema", text, json.dumps(schema)) == 0.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1.0),
        ("<answer>b</answer>", 0.5),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<think></think><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_in_their_order(text: str, reward: float) -> None:
    assert verified("format", text) == reward


@pytest.mark.parametrize(("n", "reward"), [(0, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (99, 0.0)])
def test_length_falls_to_nothing_at_twice_the_longest(n: int, reward: float) -> None:
    assert verified("length", "x" * n, longest=10) == reward


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("B", "B", 1.0),
        ("(b)", "B", 0.0),
        (" **B**.", "(B)", 1.0),
        ("B) 42", "B", 1.0),
        ("B. The mitochondria", "B", 1.0),
        ("The answer is (B).", "B", 1.0),
        ("The correct answer is **B**: it is A's twin.", "B", 1.0),
        ("Answer: B", "b", 1.0),
        ("**Answer:** B", "B", 1.0),
        ("the answer is option B because C is false", "B", 1.0),
        ("So \\boxed{B}", "B", 1.0),
        ("\\boxed{\\textbf{(B)}\\ 42}", "B", 1.0),
        ("\\boxed{\\text{B}}", "C", 0.0),
        ("The answer is A. No, the answer is B.", "B", 1.0),
        ("The answer is A. No, the answer is B.", "A", 0.0),
        ("\\boxed{A}, and \\boxed{B}", "A", 0.0),
        ("The answer is B or C", "B", 0.0),
        ("\\boxed{B, C}", "B", 0.0),
        ("\\boxed{BC}", "B", 0.0),
        ("A, B, C, D", "A", 0.0),
        ("A B C D", "A", 0.0),
        ("The answer is A triangle", "A", 0.0),
        ("The answer is not B", "B", 0.0),
        ("A dog", "A", 0.0),
        ("", "A", 0.0),
        ("answer " * 20_000, "A", 0.0),
        ("\\boxed{" * 20_000, "A", 0.0),
    ],
)
def test_letters_of_options(text: str, answer: str, reward: float) -> None:
    assert verified("choice", text, answer) == reward


def test_a_choice_needs_a_letter() -> None:
    with pytest.raises(ValueError, match="expects a letter in the reference answer, found '42'"):
        verified("choice", "B", "42")


WRITTEN = {
    "½": r"$\frac{1}{2}$",
    "\u22122½": r"$-2\frac{1}{2}$",
    "so √2": r"so \sqrt{2}",
    "√(x+1)": r"$\sqrt{x+1}$",
    "2π.": r"$2\pi $",
    r"\boxed{45°}": r"\boxed{45^\circ }",
    r"\fbox{x²}": r"\boxed{x^{2}}",
    r"$1\,200\,000$": "$1200000$",
    r"$1{,}200$": "$1200$",
    "1.2e6": r"$1.2\times 10^{6}$",
    "(1, 2)": "$(1, 2)$",
    "B": "$B$",
    "3!": "$3!$",
    "5": "5",
    "5 m": "5 m",
    "5 km": "5 km",
    "The answer is 5!": "The answer is 5!",
    "x = 5, as $x > 0$": "x = 5, as $x > 0$",
}


def test_math_says_what_to_install_or_asks_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself need not be here; its interface (0.9) is enough."""
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"pip install titan-rl\[math\]"):
        VERIFIERS["math"]({})
    asked: list[Any] = []

    def parse(pred: str, *, parsing_timeout: int, raise_on_error: bool) -> list[Any]:
        assert raise_on_error, "or an answer that takes too long is silently wrong"
        asked.append(pred)
        return [pred.strip("$")] if pred else []

    def verify(gold: list[Any], target: list[Any], *, timeout_seconds: int, raise_on_error: bool) -> bool:
        return gold == target

    fake = ModuleType("math_verify")
    fake.__dict__.update(parse=parse, verify=verify)
    monkeypatch.setitem(sys.modules, "math_verify", fake)
    errors = ModuleType("math_verify.errors")
    errors.__dict__["TimeoutException"] = type("TimeoutException", (BaseException,), {})
    monkeypatch.setitem(sys.modules, "math_verify.errors", errors)
    assert verified("math", "x+1", "x+1") == 1.0
    assert verified("math", "x", "$x+1$") == 0.0
    assert asked == ["$x+1$", "$x+1$", "$x+1$", "$x$"]

    for written, latex in WRITTEN.items():
        verified("math", written, "5")
        assert asked.pop() == latex

    def slow(gold: list[Any], target: list[Any], **how: Any) -> bool:
        raise errors.__dict__["TimeoutException"]

    fake.__dict__["verify"] = slow
    assert verified("math", "9^{9^{9}}", "x") == 0.0
    fake.__dict__["parse"] = lambda pred, **how: []
    with pytest.raises(ValueError, match="expects an expression in the reference answer, found 'no'"):
        verified("math", "x", "no")
