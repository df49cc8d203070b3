"""Alerts: which events call, what a command and a webhook get, and that none of their failures reaches the run."""

import asyncio
import json
import random
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from titan_rl.config.sections import Config, MetricsSection
from titan_rl.environment import ALERT
from titan_rl.ext.alerts.alerting import EVENTS
from titan_rl.ext.alerts.checks import problems, warnings
from titan_rl.record.incidents import Incidents
from titan_rl.record.run_log import RunLog
from titan_rl.record.sinks import tracking
from titan_rl.wire.errors import RunError

APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


def config_of(alert: str, on: list[str] | None = None, seconds: float = 30.0) -> Config:
    events = list(EVENTS) if on is None else on
    return Config(metrics=MetricsSection(trackers=[], alert=alert, alert_on=events, alert_seconds=seconds))


def python(program: str, *arguments: object) -> str:
    return shlex.join([sys.executable, "-c", program, *map(str, arguments)])


def run(folder: Path, config: Config, *, error: BaseException | None = None, events: int = 1) -> list[str]:
    """Drive a run's sinks through a fault, a collapse and an end. Return its warnings."""
    said = list[str]()

    async def driven() -> None:
        async with tracking(folder, "x", config, resumed=False, warn=said.append) as sinks:
            incidents = Incidents(folder, config.fault, lambda text: None)
            incidents.observers.append(lambda text: sinks.event("fault", text))
            with RunLog(folder, "x", config, trackers=sinks) as log:
                log.step(3, {"loss": 1.0}, {}, [])
                for number in range(events):
                    incidents.lost("generator0", RunError(f"generator0 died ({number})"))
                log.event("warning", "step 3: entropy collapsed")
                if error is not None:
                    raise error
                log.summary({})

    with nullcontext() if error is None else pytest.raises(type(error)):
        asyncio.run(driven())
    return said


def test_a_command_gets_each_event_and_the_end(tmp_path: Path) -> None:
    folder, out = tmp_path / "my run", tmp_path / "out.jsonl"
    assert run(folder, config_of(python(APPEND, out))) == []
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["text"] for each in found] == [
        "my run: fault: generator0 died (0)",
        "my run: warning: step 3: entropy collapsed",
        "my run: finished: after step 3",
    ]
    assert [(each["event"], each["step"], each["folder"]) for each in found] == [
        (event, 3, str(folder)) for event in ("fault", "warning", "finished")
    ]


@pytest.mark.parametrize(
    ("error", "end"),
    [(RunError("no learning signal"), "failed: no learning signal"), (asyncio.CancelledError(), "stopped: after")],
)
def test_only_chosen_events_call_and_an_end_has_its_reason(tmp_path: Path, error: BaseException, end: str) -> None:
    out = tmp_path / "out.jsonl"
    assert run(tmp_path / "run", config_of(python(APPEND, out), ["failed", "stopped"]), error=error) == []
    (line,) = out.read_text().splitlines()
    assert json.loads(line)["text"].startswith(f"run: {end}")


@pytest.fixture
def server() -> Iterator[Any]:
    """A webhook that answers with `status`, after `seconds`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            webhook.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(webhook.seconds)
            self.send_response(webhook.status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    class Webhook(HTTPServer):
        bodies, status, seconds = list[bytes](), 204, 0.0

    with Webhook(("127.0.0.1", 0), Handler) as webhook:
        threading.Thread(target=webhook.serve_forever, args=(0.02,), daemon=True).start()
        yield webhook
        webhook.shutdown()


def test_a_webhook_gets_them_by_post_at_an_address_of_the_environment(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALERT, f"http://127.0.0.1:{server.server_port}/S3CRET")
    assert run(tmp_path / "run", config_of(ALERT)) == []
    assert [json.loads(body)["event"] for body in server.bodies] == ["fault", "warning", "finished"]
    assert "S3CRET" not in (tmp_path / "run/config.toml").read_text()
    server.status = 500
    assert run(tmp_path / "run", config_of(ALERT)) == [
        "metrics.alert: exit code 1; the server answered with status 500; later failures are not shown"
    ]


def test_a_call_that_hangs_is_killed_at_its_deadline(tmp_path: Path, server: Any) -> None:
    """A command with a child, one that does not read, and a server that does not answer."""
    forks = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); "
    for command in (python(forks + "time.sleep(99)"), f"http://127.0.0.1:{server.server_port}/"):
        server.seconds = 5.0
        before = time.monotonic()
        said = run(tmp_path / "run", config_of(command, ["fault"], seconds=1.0))
        assert said == ["metrics.alert: no end within 1 s, so that it was killed; later failures are not shown"]
        assert time.monotonic() - before < 5


def test_alerts_that_do_not_keep_up_are_counted(tmp_path: Path) -> None:
    said = run(tmp_path / "run", config_of(python("import time; time.sleep(99)"), seconds=0.5), events=150)
    killed, unsent = said
    assert "so that it was killed" in killed
    assert unsent.startswith("metrics.alert: 1")
    assert unsent.endswith(" events were not sent")


@pytest.mark.parametrize("seed", range(10))
def test_no_failure_of_a_command_reaches_the_run(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    program = draw.choice(
        [
            "raise SystemExit(3)",
            "import os; os.kill(os.getpid(), 9)",
            "import sys; sys.stdin.close()",
            "import sys; sys.stdout.write('x' * 10**6); sys.stderr.write('y' * 10**6); sys.exit(1)",
            "import sys; sys.stderr.buffer.write(b'\\xff\\n'); sys.exit(1)",
        ]
    )
    gone = tmp_path / "program"
    command = draw.choice([python(program), str(gone)])
    assert len(run(tmp_path / "run", config_of(command))) == (0 if "stdin.close" in command else 1)


BAD = {
    "no-such-program --x": 'metrics.alert: expected a program on PATH, or an http(s) address, found "no-such-program"',
    "sh 'x": "metrics.alert: expected a command, found one that cannot be split into words: No closing quotation",
    "https:///secret": "metrics.alert: expected an address such as https://host/path, found one without a host",
    "http://h:99999/secret": "metrics.alert: expected an address such as https://host/path, found one without a host",
    ALERT: f"metrics.alert: expected the environment variable {ALERT} to hold a command or an address, found none",
}


@pytest.mark.parametrize("alert", BAD)
def test_a_bad_destination_is_refused(alert: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALERT, raising=False)
    assert list(problems(config_of(alert))) == [BAD[alert]]


def test_events_are_checked() -> None:
    (problem,) = problems(config_of("true", ["faults"]))
    assert problem.startswith("metrics.alert_on: expected any of fault, warning, finished, stopped, failed, found")
    assert list(problems(config_of("true"))) == list(warnings(config_of("true"))) == []
    (problem,) = problems(config_of("", ["fault"]))
    assert problem.startswith("metrics.alert_on: expected no events without metrics.alert")
    assert list(warnings(config_of("true", []))) == ["metrics.alert is never called: metrics.alert_on is empty"]
