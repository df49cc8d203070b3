"""Programs of users of titan_rl as a library, each in a process: Monarch starts once in one."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil

CONFIG = """
base = "grpo_llama"
[job]
dump_folder = "{folder}"
[cold_start]
steps = 0
[task]
reward = "toy_reward:odd"
[eval]
size = 8
interval = 0
[rollout]
groups_per_step = 4
[training]
steps = 2
[parallelism]
data_parallel_shard_degree = 1
"""
BEGIN = """
import asyncio, json, math, os, signal, sys
import numpy as np
import titan_rl

def shown(**values):
    print("SHOWN", json.dumps(values), flush=True)

async def main():
"""
END = "\n\nasyncio.run(main())\n"


def write_config(at: Path) -> None:
    at.mkdir(parents=True, exist_ok=True)
    (at / "toy.toml").write_text(CONFIG.format(folder=at / "run"))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


def started(at: Path, body: str, *, blocking: bool = False) -> "subprocess.Popen[str]":
    """Start a program whose coroutine `main`, or, if `blocking`, whose function `main` is `body`, in a folder with a
    config toy.toml."""
    write_config(at)
    begin, end = (BEGIN.replace("async def", "def"), "\n\nmain()\n") if blocking else (BEGIN, END)
    (at / "program.py").write_text(begin + textwrap.indent(textwrap.dedent(body), "    ") + end)
    return subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=at,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finished(
    at: Path, body: str, *, code: int = 0, timeout: float = 300, blocking: bool = False
) -> list[dict[str, Any]]:
    """Run a program to its end, and return the values that it has shown."""
    process = started(at, body, blocking=blocking)
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, output
    return [json.loads(line.partition(" ")[2]) for line in output.splitlines() if line.startswith("SHOWN ")]


def assert_gone(processes: list[psutil.Process], seconds: float = 20) -> None:
    """Wait until processes have ended."""
    until = time.monotonic() + seconds
    while (left := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]) and (
        time.monotonic() < until
    ):
        time.sleep(0.1)
    assert not left, [(p.pid, p.cmdline()) for p in left]
