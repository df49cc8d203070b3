"""Messages in Protocol Buffers' format, compared with the library's own."""

from contextlib import suppress

import pytest
from google.protobuf import descriptor_pb2, struct_pb2, wrappers_pb2
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.ext.tinker.protobuf import field, fields, integers


@given(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.binary(), st.text())
def test_encodes_as_the_library(number: int, real: float, data: bytes, text: str) -> None:
    for kind, value in (
        (wrappers_pb2.Int64Value, number),
        (wrappers_pb2.DoubleValue, real),
        (wrappers_pb2.BytesValue, data),
        (wrappers_pb2.StringValue, text),
    ):
        assert kind.FromString(field(1, value)).value == value


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.text(), st.floats(width=32, allow_nan=False))
def test_decodes_what_the_library_encodes(numbers: list[int], name: str, real: float) -> None:
    location = descriptor_pb2.SourceCodeInfo.Location(path=numbers, leading_comments=name)
    found = fields(location.SerializeToString())
    assert integers(found.get(1, [])) == numbers  # packed
    assert found[3] == [name.encode()]
    assert integers([value for number in numbers for value in fields(field(1, number))[1]]) == numbers
    assert wrappers_pb2.FloatValue.FromString(wrappers_pb2.FloatValue(value=real).SerializeToString()).value == real
    assert len(fields(struct_pb2.Value(number_value=real).SerializeToString())[2][0]) == 8


@given(st.binary(max_size=60))
def test_other_bytes_are_a_value_error(data: bytes) -> None:
    with suppress(ValueError):
        assert all(fields(data).values())


@given(st.integers(-(2**63), -1))
def test_a_length_below_zero_is_refused(length: int) -> None:
    """Such a length would lead back to bytes that were read, for ever."""
    with pytest.raises(ValueError, match="expected a message"):
        fields(b"\x0a" + field(0, length)[1:])


def test_a_cut_message_is_refused() -> None:
    message = field(1, "model") + field(2, 2**40)
    for length in (1, 3, len(message) - 1):
        with pytest.raises(ValueError, match="expected a message"):
            fields(message[:length])
