"""Say which case of a loop failed: a test of hundreds of small cases is one test."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case_named(name: object) -> Iterator[None]:
    """Add the case's name to the exception that fails it. pytest prints the notes of an exception."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {name}")
        raise
