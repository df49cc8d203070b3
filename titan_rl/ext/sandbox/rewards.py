"""The built-in reward of programs."""

from collections.abc import Callable, Mapping
from typing import Any

from titan_rl.ext.sandbox.code_tests import code_tests
from titan_rl.tasks.rewards import Answered
from titan_rl.wire.types import Prompt


def passes_tests(arguments: Mapping[str, Any], argument: Callable[..., Any]) -> Callable[[Prompt, Answered], float]:
    """1.0 if the program in the answer passes the tests of its row, in the sandbox (docs/security.md)."""
    return lambda prompt, answer: code_tests(answer.text, prompt.answer, prompt.row)
