"""The reward "code_tests": 1.0 if the program of a completion passes the tests of its row.

row["tests"], or the answer: a program of asserts | a list of them | {"inputs": [...], "outputs": [...]}
row["test_setup"]: what the tests import; row["entry_point"]: the function that HumanEval's check(candidate) gets
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from titan_rl.ext.sandbox.execution import Execution, Verdict
from titan_rl.ext.sandbox.local import LocalSandbox, shared
from titan_rl.wire.errors import SandboxRefused

FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
COLUMNS = ("tests", "test_list", "test")


def code_tests(completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """Return 1.0 if the completion's program passes every test of its row, else 0.0."""
    return float(examine(completion, answer, row).solved)


def examine(completion: str, answer: str, row: Mapping[str, Any], sandbox: LocalSandbox | None = None) -> Verdict:
    """Run the tests of a row against the program in a completion. Raise if the row has none, or nothing was run."""
    sandbox = sandbox or shared()
    tests, code = row_tests(answer, row), program(completion)
    if isinstance(tests, Mapping):
        verdict = _by_output(sandbox, code, tests["inputs"], tests["outputs"])
    else:
        setup = "\n".join(
            [*row.get("test_imports", ()), str(row.get("test_setup") or row.get("test_setup_code") or "")]
        )
        if row.get("entry_point"):
            tests = [f"{test}\ncheck({row['entry_point']})" for test in tests]
        verdict = sandbox.run_tests_here(code, tests, setup=setup)
    if verdict.execution.status == "sandbox_failed":
        raise SandboxRefused(f"the sandbox failed: {verdict.execution.detail}")
    return verdict


def check_row(answer: str, row: Mapping[str, Any], sandbox: LocalSandbox) -> None:
    """Raise ValueError if the tests of a row cannot be read, or test nothing: an empty program passes them."""
    if examine("", answer, row, sandbox).solved:
        hint = "without entry_point, check(candidate) is not called; functions test_* and TestCases need a call as well"
        raise ValueError(f'"code_tests" expects tests that an empty program fails ({hint})')


def program(completion: str) -> str:
    """Return the last fenced block of a completion; all of it if there is none."""
    blocks = FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def row_tests(answer: str, row: Mapping[str, Any]) -> list[str] | dict[str, list[str]]:
    """Return the tests of a row: programs, or inputs and outputs. They may be JSON in a text."""
    found: Any = next((row[name] for name in COLUMNS if row.get(name)), answer)
    if isinstance(found, str) and found.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):  # else a program
            found = json.loads(found)
    if isinstance(found, Mapping):
        texts: list[Any] = [found.get("inputs"), found.get("outputs")]
        if all(isinstance(each, list | tuple) for each in texts) and len(texts[0]) == len(texts[1]) > 0:
            return {"inputs": [*map(_text, texts[0])], "outputs": [*map(_text, texts[1])]}
    elif isinstance(found, str) and found.strip():
        return [found]
    elif isinstance(found, Sequence) and found and all(isinstance(each, str) for each in found):
        return list(found)
    raise ValueError(
        '"code_tests" expects tests in the column "tests" or in the answer: a program, a list of '
        f'programs, or {{"inputs": [...], "outputs": [...]}} of the same length, found {str(found)[:80]!r}'
    )


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _by_output(sandbox: LocalSandbox, code: str, inputs: Sequence[str], outputs: Sequence[str]) -> Verdict:
    """Run the program on each input, up to the first that fails. Outputs are compared here, out of its reach."""
    execution = Execution("ok")
    for number, (stdin, expected) in enumerate(zip(inputs, outputs, strict=True)):
        execution = sandbox.run_here(code, stdin=stdin)
        if execution.status != "ok":
            return Verdict(number, len(inputs), [f"test {number}: {execution.status}: {execution.detail}"], execution)
        if not same_lines(execution.stdout, expected):
            return Verdict(number, len(inputs), [f"test {number}: expected {expected[:80]!r}"], execution)
    return Verdict(len(inputs), len(inputs), [], execution)


def same_lines(found: str, expected: str) -> bool:
    """Return True if the texts are equal but for white space at the ends of lines and of the text."""
    lines = [re.split(r"\r?\n", text.rstrip()) for text in (found, expected)]
    pairs = zip_longest(*lines)
    return all(a is not None and b is not None and a.rstrip() == b.rstrip() for a, b in pairs)
