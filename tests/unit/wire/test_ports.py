"""Free ports of a host's address."""

import errno
import socket

import pytest

from titan_rl.wire.ports import free_port, listener, port_range


def test_ports_are_taken_from_a_range_the_latest_ones_last() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = range(taken, taken + 4)
        found = {free_port("127.0.0.1", ports) for _ in range(40)}
        assert found <= {*ports} - {taken}
        assert found, "a port that is taken is passed over"
        used = sorted(found)
        assert free_port("127.0.0.1", used, used) == used[0]
        with pytest.raises(OSError, match=f"none of the ports {taken}-{taken} of 127.0.0.1 is free") as error:
            listener("127.0.0.1", [taken])
    assert error.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("text", ["26700", "26700-26704", "26710-26700", "0-10", "65530-65536", "a-b", "-1", "1-2-3"])
def test_a_range_of_ports_is_refused_by_what_was_found(text: str) -> None:
    with pytest.raises(ValueError, match=f'such as "26700-26799", found "{text}"'):
        port_range(text)
    assert port_range("26700-26705") == range(26700, 26706)
    assert not port_range("")
