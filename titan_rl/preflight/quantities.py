"""Writes numbers as people read them."""

from collections.abc import Sequence

GIB = 2**30


def count(n: float) -> str:
    return _scaled(n, 1000, ("", "K", "M", "B"))


def size(nbytes: float) -> str:
    return _scaled(nbytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while n >= base and power < len(units) - 1:
        n, power = n / base, power + 1
    return f"{n:.3g}{units[power]}"
