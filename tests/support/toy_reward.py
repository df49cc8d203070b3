"""A reward that a random policy earns with about every second answer."""

from collections.abc import Sequence
from typing import Any


def odd(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 2) for text in completions]
