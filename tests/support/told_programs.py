"""Programs of a test that need a process of their own."""

import json
import os
import subprocess
import sys
from typing import Any


def told(program: str, *arguments: object, given: str = "", env: dict[str, str] | None = None) -> Any:
    """Run a program in a process of its own, and return what it prints as JSON after FOUND."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        input=given,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))
