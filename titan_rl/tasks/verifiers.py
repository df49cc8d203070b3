"""Built-in verifiers: names for task.reward, task.rewards, task.eval_reward and task.grader.

Each is made from task.reward_args, so that a bad argument is found before a run starts, and judges one answer. Those
that may hang ("regex", "math", "json_schema", "reasoning_gym") run in reward processes, as a user's functions do.
"""

import json
import re
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any
from unicodedata import normalize

from titan_rl.config.toml import as_float
from titan_rl.tasks.examples import GYM
from titan_rl.tasks.rewards import (
    BUILT_IN,
    GROUPING,
    VULGAR,
    Answered,
    Reward,
    braced_power,
    expected_number,
    last_number_of,
)
from titan_rl.wire.parts import needed_part
from titan_rl.wire.types import Prompt

JUDGE_ARGUMENTS = ("judge_url", "judge_model", "judge_key", "judge_prompt", "judge_scale", "judge_tokens")
Arguments = Mapping[str, bool | int | float | str]
Verify = Callable[[Prompt, Any], Any]  # judges one answer; those in AT_ONCE judge all
FENCED = re.compile(r"```(?:json)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
MATH_SECONDS = 5  # math-verify's deadlines; the process's is task.reward_seconds


def argument(arguments: Arguments, key: str, kind: type, default: Any = None) -> Any:
    """Return an argument of task.reward_args. Raise ValueError if it is missing, or of another type."""
    value = arguments.get(key, default)
    if kind is float and type(value) is int:
        value = as_float(value)
    if type(value) is not kind:
        nouns = {str: "a string", int: "an integer", float: "a number"}
        found = "none" if value is None else repr(value)
        raise ValueError(f"task.reward_args: expected {key} to be {nouns[kind]}, found {found}")
    return value


def by_text(reward: Reward) -> Callable[[Arguments], Verify]:
    return lambda arguments: lambda prompt, answer: reward(prompt, answer.text, answer.messages)


def near_number(arguments: Arguments) -> Verify:
    """1.0 if the answer's last number is within `tolerance` of the reference's, relative to the latter."""
    tolerance = argument(arguments, "tolerance", float, 1e-6)
    if not 0 <= tolerance < 1:
        raise ValueError(f"task.reward_args: expected a tolerance from 0 to below 1, found {tolerance:g}")

    def verify(prompt: Prompt, answer: Answered) -> float:
        expected = expected_number(prompt.answer)
        if expected is None:
            raise ValueError(f'"number" expects a number in the reference answer, found {prompt.answer[:80]!r}')
        found = last_number_of(answer.text)
        return float(found is not None and abs(found - expected) <= tolerance * abs(expected))

    return verify


def pattern(arguments: Arguments) -> Verify:
    """1.0 if `pattern`, or else the reference answer as a pattern, is found in the answer."""
    try:
        compiled = re.compile(argument(arguments, "pattern", str)) if "pattern" in arguments else None
    except re.error as error:
        raise ValueError(f"task.reward_args: expected pattern to be a regular expression, found {error}") from error

    def verify(prompt: Prompt, answer: Answered) -> float:
        return float((compiled or re.compile(prompt.answer)).search(answer.text) is not None)

    return verify


def json_schema(arguments: Arguments) -> Verify:
    """1.0 if the answer, or the last fenced block in it, is JSON that the schema accepts. The schema is `schema` (JSON,
    or a file with it), else the row's column "schema", else the reference answer."""
    import jsonschema
    from jsonschema.validators import validator_for

    def validator(schema: Any) -> Any:
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        return kind(schema, format_checker=kind.FORMAT_CHECKER)

    fixed = None
    if "schema" in arguments:
        text = argument(arguments, "schema", str)
        try:
            if not text.lstrip().startswith("{"):
                if not Path(text).is_file():  # a FIFO would be waited for
                    raise ValueError(f"no regular file at {text}")
                text = Path(text).read_text("utf-8")
            fixed = validator(json.loads(text))
        except (OSError, ValueError, jsonschema.SchemaError) as error:
            first = str(error).splitlines()[0]
            raise ValueError(
                f"task.reward_args: expected schema to be a JSON schema or a file, found {first}"
            ) from error

    def verify(prompt: Prompt, answer: Answered) -> float:
        schema = prompt.row.get("schema", prompt.answer)
        valid = fixed or validator(json.loads(schema) if isinstance(schema, str) else schema)
        blocks = FENCED.findall(answer.text)
        try:
            found = json.loads(
                blocks[-1] if blocks else answer.text,
                parse_constant=_no_json,
                parse_float=_finite,
                object_pairs_hook=_without_doubles,
            )
            return float(valid.is_valid(found))
        except (ValueError, RecursionError, OverflowError):
            return 0.0

    return verify


def _no_json(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    if not isfinite(value := float(text)):
        raise ValueError(f"{text} is beyond any float")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


LATEX: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (VULGAR, lambda found: r"\frac{{{}}}{{{}}}".format(*normalize("NFKC", found[0]).split("\u2044"))),
    (re.compile("(?<=[\\w)}])[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+"), braced_power),
    (re.compile("\u221a\\s*(\\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile("\u221a\\s*\\(([^()]*)\\)"), r"\\sqrt{\1}"),
    (GROUPING, ""),
    (re.compile(r"(?<=\d)[eE]([-+]?\d{1,3})(?!\w)"), r"\\times 10^{\1}"),  # 1.2e6
    (re.compile(r"\\fbox\b"), r"\\boxed"),
)
SYMBOLS = {
    "\u2212": "-",
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "°": r"^\circ ",
}
ENVIRONMENT = re.compile(r"\$|\\(?:boxed|begin|[(\[])")
VARIABLE = r"(?<![A-Za-z])[abceijknpqrtuvxyz](?![A-Za-z])"  # the other letters may be units: 5 m
SOLE_TERM = re.compile(
    rf"(?=.*(?:[\\^!]|[(\[{{].*,|{VARIABLE})|[A-Za-z]$)"
    r"(?:\\[A-Za-z]+|[A-Za-z](?![A-Za-z])|[^\\A-Za-z])+"
)
"""A text without words that math-verify would read the last number of: 2\\sqrt{3}, 3!, 2x, (1, 2)."""


def in_latex(text: str) -> str:
    """Return a text with LaTeX in the place of ½, √2, 10⁶, 1\\,200 and 1.2e6, which math-verify does not read. A text
    that is one term gets the dollars that it lacks."""
    for pattern, latex in LATEX:
        text = pattern.sub(latex, text)
    text = text.translate(str.maketrans(SYMBOLS)).strip()
    bare = text.rstrip(".")
    return f"${bare}$" if not ENVIRONMENT.search(text) and len(bare) < 200 and SOLE_TERM.fullmatch(bare) else text


def math(arguments: Arguments) -> Verify:
    """1.0 if the answer's mathematical expression equals the reference's, by math-verify. An answer that cannot be
    evaluated in time is wrong: else an unsure policy would gain by one, as an answer without a reward costs nothing."""
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]
        from math_verify.errors import TimeoutException  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError('"math" needs a package: pip install titan-rl[math]') from error

    how: Any = {"parsing_timeout": MATH_SECONDS, "raise_on_error": True}

    def judge(prompt: Prompt, answer: Answered) -> float:
        text = in_latex(prompt.answer)
        gold = parse(text if "$" in text or "\\boxed" in text else f"${text}$", **how)
        if not gold:
            raise ValueError(f'"math" expects an expression in the reference answer, found {text[:80]!r}')
        try:
            found = parse(in_latex(answer.text), **how)
            return float(verify(gold, found, timeout_seconds=MATH_SECONDS, raise_on_error=True))
        except (Exception, TimeoutException):  # or too deep, large or odd an expression for SymPy
            return 0.0

    return judge


BOX = re.compile(r"\\boxed\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_OPTION = r"[\W_]*([A-Z])(?![A-Za-z]|\s*(?:,|/|or\b|and\b)[\W_]*[A-Z]\b)"  # B, but not of "B or C"
BOXED_OPTION = re.compile(rf"\\boxed\{{\s*(?:\\[a-z]+\{{)?{_OPTION}")
STATED_OPTION = re.compile(
    r"\b(?i:answer|option|choice)\b[*_]*(?::|\s+is\b|)[*_:]*\s*(?:(?i:option|choice)\b)?"
    rf"{_OPTION}(?<![AI](?=\s+[a-z]))"  # not of "A triangle"
)
SOLE_OPTION = re.compile(rf"{_OPTION}(?:[).:]|[\W_]*\Z)")


def choice(arguments: Arguments) -> Verify:
    """1.0 if the last option in the answer is the reference's letter: \\boxed{B}, else "The answer is (B).", else a
    text such as "B" or "B) 42"."""

    def verify(prompt: Prompt, answer: Answered) -> float:
        expected = re.fullmatch(r"\W*([A-Za-z])\W*", prompt.answer)
        if expected is None:
            raise ValueError(f'"choice" expects a letter in the reference answer, found {prompt.answer[:80]!r}')
        boxed = BOX.findall(answer.text)
        if boxed:
            last = BOXED_OPTION.match(boxed[-1])
        else:
            last = next(reversed([*STATED_OPTION.finditer(answer.text)]), SOLE_OPTION.match(answer.text))
        return float(last is not None and last[1] == expected[1].upper())

    return verify


def tagged(arguments: Arguments) -> Verify:
    """The share of `tags` that the answer has as <tag>...</tag>, each once and in this order; 0 if anything else is
    between or around them."""
    tags = [tag.strip() for tag in argument(arguments, "tags", str, "think,answer").split(",")]
    if not all(re.fullmatch(r"\w+", tag) for tag in tags):
        raise ValueError(f"task.reward_args: expected tags to be names such as think,answer, found {','.join(tags)!r}")

    def verify(prompt: Prompt, answer: Answered) -> float:
        rest, good = answer.text.strip(), 0
        for tag in tags:
            begin, end = f"<{tag}>", f"</{tag}>"
            if rest.startswith(begin) and end in rest and rest.count(begin) == rest.count(end) == 1:
                good, rest = good + 1, rest.partition(end)[2].lstrip()
        return 0.0 if rest else good / len(tags)

    return verify


def length(arguments: Arguments) -> Verify:
    """1.0 for an answer of at most `longest` tokens, falling linearly to 0.0 at twice that length."""
    longest = argument(arguments, "longest", int)
    if longest < 1:
        raise ValueError(f"task.reward_args: expected longest to be at least 1, found {longest}")
    return lambda prompt, answer: max(0.0, min(1.0, 2.0 - len(answer.tokens) / longest))


def from_part(name: str) -> Callable[[Arguments], Verify]:
    """Return the factory of a reward that is an optional part of this installation."""
    return lambda arguments: needed_part(f"reward {name}", "task.reward")(arguments, argument)


VERIFIERS: dict[str, Callable[[Arguments], Verify]] = {
    **{name: by_text(reward) for name, reward in BUILT_IN.items()},
    "number": near_number,
    "regex": pattern,
    "json_schema": json_schema,
    "math": math,
    "choice": choice,
    "format": tagged,
    "length": length,
    **{name: from_part(name) for name in ("code_tests", GYM, "judge", "judge_group")},
}
"""By the names that the config uses."""
AT_ONCE = ("judge_group",)
"""Those that judge all answers to a prompt in one call."""
TAKES: dict[str, tuple[str, ...]] = {
    "number": ("tolerance",),
    "regex": ("pattern",),
    "json_schema": ("schema",),
    "format": ("tags",),
    "length": ("longest",),
    GYM: ("extract",),
    "judge": JUDGE_ARGUMENTS,
    "judge_group": JUDGE_ARGUMENTS,
}
"""The keys of task.reward_args that each of them reads."""
