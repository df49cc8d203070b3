"""The process of one tracker.

    python -m titan_rl.ext.trackers SERVICE REPLIES        REPLIES is a descriptor

It reads messages from stdin, one JSON line each, and answers each one. Signals to all processes of a job leave it
alone: it ends after "finish", or soon after its run was killed.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

from titan_rl.ext.trackers.messages import Begin, Service
from titan_rl.ext.trackers.services import CLASSES, ENVIRONMENT, Tracker

NICE = 19  # ranks go first
ORPHAN_SECONDS = 30  # for the rest of a run that was killed


def main(service: Service, replies: TextIO) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    def reply(**values: Any) -> None:
        with suppress(BrokenPipeError):  # the run was killed
            print(json.dumps(values), file=replies, flush=True)

    tracker: Tracker | None = None
    for line in sys.stdin.buffer:
        name, arguments = json.loads(line)
        error = ""
        try:
            if tracker is None:
                tracker = CLASSES[service](Begin(**arguments[0]))
                reply(begun={"id": tracker.id, "where": tracker.where})
            else:
                getattr(tracker, name)(*arguments)
        except Exception as found:
            error = describe(found)
            print(error, file=sys.stderr, flush=True)
        reply(done=name, error=error)
        if tracker is None:
            return
        if name == "finish":
            return
    signal.alarm(ORPHAN_SECONDS)  # its default action ends the process
    if tracker is not None:
        tracker.finish("failed", {})


def describe(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[2]), "w") as replies:
        main(cast(Service, sys.argv[1]), replies)
