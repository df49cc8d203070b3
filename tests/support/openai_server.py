"""A process of `titan_rl serve`."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.running import Run


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[Run, str, str]]:
    """Yield a served process as a Run, its URL and its key. `folder` gets its log."""
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "titan_rl", "serve", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TITAN_RL_TEST_RUN": str(folder)},
        )
    deadline = time.monotonic() + 200
    while "OPENAI_API_KEY=" not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    said = dict(line.strip().split("=", 1) for line in log.read_text().splitlines() if line.startswith("  OPENAI_"))
    try:
        assert said, log.read_text()
        yield Run(folder, process), said["OPENAI_BASE_URL"], said["OPENAI_API_KEY"]
    finally:
        process.kill()
        process.wait()
