"""Answers Prometheus: the last value of every metric of a run, as a gauge with the run's name.

    run log ── log ──> ScrapedRun ── text ──> HTTP server, a thread in the host's network ──> Prometheus

The policies of one run share a server: the first one listens, and the last one to end closes it.
"""

import asyncio
import ipaddress
import math
import os
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from titan_rl.config.sections import Config
from titan_rl.isolation import outside
from titan_rl.record.sinks import Axis, Event, State, Warn

LOOPBACK = "127.0.0.1"
PATH = "/metrics"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_SECONDS = 5.0  # until a client that sends nothing is cut off
END_SECONDS = 2.0
POLL_SECONDS = 0.1  # until a server that is to end notices
SECONDS = "titan_rl_last_step_timestamp_seconds"
FAULTS = "titan_rl_faults_total"
ATTEMPTS = "titan_rl_attempts_total"
STATES = ("running", "finished", "stopped", "failed")

Address = tuple[str, int]


def address_of(text: str) -> Address:
    """Return the address and the port that a text names: "9400", "127.0.0.1:9400" or "[::1]:9400"."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"expected a port, found {port!r}")
    return str(ipaddress.ip_address(host)), int(port)


def listener(address: Address) -> socket.socket:
    """Return a socket that listens, in the network of the calling thread."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family)


def reason(error: OSError) -> str:
    """Return why an address cannot be listened on, without the address."""
    return os.strerror(error.errno) if error.errno else str(error)


class ScrapedRun:
    """Holds the last metrics of a run."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._values = {FAULTS: 0.0, ATTEMPTS: 1.0}
        self._state = "running"

    hints = ()

    def log(
        self, axis: Axis, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None:
        found = {"titan_rl_step": float(step), SECONDS: time.time()}
        for key, value in scalars.items():
            found[metric_name(key)] = float(value)
        with self._lock:
            self._values |= found

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Ignore them: Prometheus has numbers only."""

    def event(self, event: Event, text: str) -> None:
        if event == "fault":
            self._count(FAULTS)

    def rewind(self) -> None:
        self._count(ATTEMPTS)

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        self._state = state

    def _count(self, name: str) -> None:
        with self._lock:
            self._values[name] += 1

    def lines(self) -> dict[str, list[str]]:
        """Return the lines of each metric."""
        label = f'run="{escaped(self._name)}"'
        with self._lock:
            values = dict(self._values)
        lines = {name: [f"{name}{{{label}}} {number(value)}"] for name, value in values.items()}
        lines["titan_rl_state"] = [
            f'titan_rl_state{{{label},state="{state}"}} {int(state == self._state)}' for state in STATES
        ]
        return lines


def metric_name(key: str) -> str:
    """Return the name that a metric has in Prometheus: titan_rl_reward_mean."""
    return "titan_rl_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)


def escaped(text: str) -> str:
    """Return the value of a label as the format writes it."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")


def exposition(runs: Sequence[ScrapedRun]) -> str:
    """Return the page: all lines of a metric together, with its type before them."""
    lines = dict[str, list[str]]()
    for run in runs:
        for name, found in run.lines().items():
            lines.setdefault(name, []).extend(found)
    text = list[str]()
    for name, found in sorted(lines.items()):
        text += [f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}", *found]
    return "\n".join(text) + "\n"


class ScrapeServer(HTTPServer):
    """Serves the runs of one process at an address."""

    def __init__(self, address: Address) -> None:
        self.runs = list[ScrapedRun]()
        super().__init__(address, ScrapeHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = outside(lambda: listener(address))
        threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,), name="prometheus", daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore it: a client that goes away is no problem of the run."""

    def end(self) -> None:
        """Stop answering. A client that is slow on purpose does not hold up the run's end."""
        ending = threading.Thread(target=self.shutdown, daemon=True)
        ending.start()
        ending.join(END_SECONDS)
        self.server_close()


class ScrapeHandler(BaseHTTPRequestHandler):
    timeout = CLIENT_SECONDS
    server_version, sys_version = "titan_rl", ""

    def do_GET(self) -> None:
        assert isinstance(self.server, ScrapeServer)
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, f"the metrics are at {PATH}")
            return
        body = exposition(self.server.runs).encode()
        self.send_response(200)
        self.send_header("Content-Type", TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: the terminal is the run's."""


SERVERS = dict[Address, ScrapeServer]()
"""The servers of this process."""


@asynccontextmanager
async def scraped(
    folder: Path, config_name: str, config: Config, *, resumed: bool, warn: Warn
) -> AsyncIterator[ScrapedRun]:
    """Serve a run's metrics while the body runs. Without its address the run trains, with a warning."""
    address, run = address_of(config.metrics.prometheus), ScrapedRun(config.metrics.run_name or folder.absolute().name)
    try:
        server = SERVERS.get(address) or ScrapeServer(address)
    except OSError as error:  # taken since the check
        warn(f"metrics.prometheus: {config.metrics.prometheus} cannot be listened on: {reason(error)}")
        yield run
        return
    SERVERS[address] = server
    server.runs.append(run)
    try:
        yield run
    finally:
        server.runs.remove(run)
        if not server.runs:
            del SERVERS[address]
            await asyncio.to_thread(server.end)
