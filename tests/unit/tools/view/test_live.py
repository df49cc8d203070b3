"""The server of a live page answers every request line, and lets nothing be printed."""

import socket
import threading

import pytest

from titan_rl.tools.view.live import LiveServer


@pytest.mark.parametrize("path", ["http://[/?token=x", "//[", "/?token=", "/?" + "&a" * 20_000])
def test_an_odd_address_is_refused(path: str, capfd: pytest.CaptureFixture[str]) -> None:
    server = LiveServer(0, dict, int)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        with socket.create_connection(("127.0.0.1", server.server_address[1]), 20) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n".encode())
            assert b"".join(iter(lambda: client.recv(4096), b"")).startswith(b"HTTP/1.0 403")
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    assert capfd.readouterr() == ("", "")
