"""Cases of a test that are run before a release, and not for every change."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], *kept: int) -> list[Any]:
    """Return a test's cases, of which those at the indices `kept` are run for every change and the others are slow."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=() if i in kept else pytest.mark.slow) for i, row in enumerate(rows)]
