"""Serves the page of active runs on loopback, to clients that know the token in its address."""

import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from titan_rl.tools.view.page import page, script_json

REQUEST_SECONDS = 10.0  # for a client to send its request
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LiveServer(ThreadingHTTPServer):
    """Answers / with the page and /data.json with its data, which `read` collects anew if `state` has changed."""

    daemon_threads = True

    def __init__(self, port: int, read: Callable[[], dict[str, Any]], state: Callable[[], Any]) -> None:
        super().__init__(("127.0.0.1", port), LiveRequest)
        self._read, self._state, self.token = read, state, secrets.token_urlsafe(24)
        self._lock, self._known = threading.Lock(), (None, dict[str, Any]())

    def read(self) -> dict[str, Any]:
        """Return the data. To collect a long run takes seconds, so that requests wait for one collection."""
        with self._lock:
            state = self._state()
            if state != self._known[0]:
                self._known = state, self._read()
            return self._known[1]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/?token={self.token}"


class LiveRequest(BaseHTTPRequestHandler):
    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        """Answer a request that has the token and names this host: a page of another site has neither."""
        try:
            url = urlsplit(self.path)
        except ValueError:  # no address that the server printed
            url = urlsplit("")
        token = parse_qs(url.query).get("token", [""])[0]
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in ("127.0.0.1", "localhost") or not secrets.compare_digest(
            token.encode(), self.server.token.encode()
        ):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "expected the address that titan_rl view printed\n")
        elif url.path == "/":
            self._answer(HTTPStatus.OK, "text/html", page(self.server.read()))
        elif url.path == "/data.json":
            self._answer(HTTPStatus.OK, "application/json", script_json(self.server.read()))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "expected / or /data.json\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the path of a request has the token."""
