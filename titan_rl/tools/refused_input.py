"""Refuses input of a user, by a message that names the argument to change."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from titan_rl.wire.program import USAGE


class UsageError(Exception):
    """The text names the expected value, the actual one, and the argument to change."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def named_refusals(prog: str) -> Iterator[None]:
    """Turn a refusal into one line and its exit code."""
    try:
        yield
    except UsageError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(error.code) from None
