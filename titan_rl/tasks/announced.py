"""Says how far a long check is, so that a large file does not look like a hang."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

SILENT_SECONDS = 3.0  # between two notes


def announced(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield the items. Every few seconds, print to stderr how many there were."""
    then = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        if time.monotonic() - then > SILENT_SECONDS:
            then = time.monotonic()
            of = "" if total is None else f" of {total:,}"
            with suppress(OSError, ValueError):  # nothing reads it
                print(f"titan_rl: {what}: {count:,}{of} rows", file=sys.stderr, flush=True)
