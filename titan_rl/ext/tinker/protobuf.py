"""Protocol Buffers' wire format: a message to its fields by number, and back. No schema: callers know the types."""

import struct
from collections.abc import Iterator
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
WIDTHS = {FIXED64: 8, FIXED32: 4}


def fields(message: bytes) -> dict[int, list[Any]]:
    """Return every value of each field: an integer of a varint, else bytes. Raise ValueError if it is no message.

    >>> fields(field(1, "a") + field(2, 300))
    {1: [b'a'], 2: [300]}
    """
    found, at = dict[int, list[Any]](), 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(message, at)
        else:
            size, at = (WIDTHS[kind], at) if kind in WIDTHS else _varint(message, at)
            if kind not in (BYTES, *WIDTHS) or size < 0 or at + size > len(message):
                raise ValueError(f"expected a message in Protocol Buffers' format, found byte {at} of another")
            value, at = message[at : at + size], at + size
        found.setdefault(number, []).append(value)
    return found


def integers(values: list[Any]) -> list[int]:
    """Return a repeated integer, which may be packed."""
    return [each for value in values for each in ([value] if isinstance(value, int) else _varints(value))]


def field(number: int, value: int | float | str | bytes) -> bytes:
    """Encode a field. A float is a double."""
    if isinstance(value, int):
        return _encoded(number << 3 | VARINT) + _encoded(value)
    if isinstance(value, float):
        return _encoded(number << 3 | FIXED64) + struct.pack("<d", value)
    value = value.encode() if isinstance(value, str) else value
    return _encoded(number << 3 | BYTES) + _encoded(len(value)) + value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(message[at : at + 10]):
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value - (1 << 64) * (value >> 63), at + i + 1
    raise ValueError(f"expected a message in Protocol Buffers' format, found an endless integer at byte {at}")


def _varints(values: bytes) -> Iterator[int]:
    at = 0
    while at < len(values):
        value, at = _varint(values, at)
        yield value


def _encoded(value: int) -> bytes:
    encoded, value = bytearray(), value % (1 << 64)
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
