"""Plain data: values that two processes exchange, and containers of which both have a copy."""

from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from itertools import chain
from pathlib import PosixPath, PurePosixPath
from typing import Any
from uuid import UUID

BY_TEXT = (Decimal, PosixPath, PurePosixPath, UUID, IPv4Address, IPv6Address, IPv4Network, IPv6Network)
DATA: Mapping[type, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    int: (lambda value: [hex(value)], lambda text: int(text, 16)),
    tuple: (list, lambda *items: items),
    frozenset: (list, lambda *items: frozenset(items)),
    bytes: (lambda value: [value.hex()], bytes.fromhex),
    complex: (lambda value: [value.real, value.imag], complex),
    range: (lambda value: [value.start, value.stop, value.step], range),
    slice: (lambda value: [value.start, value.stop, value.step], slice),
    **{kind: (lambda value: [str(value)], kind) for kind in BY_TEXT},
    Fraction: (lambda value: [value.numerator, value.denominator], Fraction),
    date: (lambda value: [value.isoformat()], date.fromisoformat),
    time: (lambda value: [value.isoformat()], time.fromisoformat),
    datetime: (lambda value: [value.isoformat()], datetime.fromisoformat),
    timedelta: (lambda value: [value.days, value.seconds, value.microseconds], timedelta),
    timezone: (lambda value: value.__getinitargs__(), timezone),
    type({}.keys()): (list, lambda *keys: dict.fromkeys(keys).keys()),
    type({}.values()): (list, lambda *values: dict(enumerate(values)).values()),
    type({}.items()): (list, lambda *items: dict(items).items()),
}
"""Types that pass by value: their parts, and what makes a value of these."""
DATA_BY_NAME = {kind.__name__: make for kind, (_, make) in DATA.items()}

EXACT: Mapping[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    list: list.copy,
    set: lambda value: {*set.__iter__(value)},
    dict: dict.copy,
}
"""The value of an object whose class extends plain data, without that class."""
SCALARS = (int, float, str, bytes)

CONTAINERS: tuple[type, ...] = (list, dict, set, bytearray, deque, defaultdict, OrderedDict, Counter)
"""Types that both sides have a copy of."""
CONTAINERS_BY_NAME = {kind.__name__: kind for kind in CONTAINERS}


def items_of(container: Any) -> list[Any]:
    """Return a container's items, or a dict's keys and values in turn."""
    return [*chain(*container.items())] if isinstance(container, dict) else list(container)


def fill(container: Any, items: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        dict.update(container, zip(items[::2], items[1::2], strict=True))
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


def exact_value(value: Any) -> Any:
    return next(exact(value) for kind, exact in EXACT.items() if isinstance(value, kind))


def is_error(kind: Any) -> bool:
    """Return True for classes of errors, other than StopIteration and StopAsyncIteration."""
    ends = (StopIteration, StopAsyncIteration)
    return isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends)


@cache
def named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)
