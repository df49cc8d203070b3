"""Reward functions that fail as user code may. The completion selects how."""

import asyncio
import os
import pickle
import re
import subprocess
import time
from contextlib import suppress

_leak: list[bytes] = []


def obey(completion: str) -> float:
    """Fail as the completion demands, and return its last digit."""
    word, _, rest = completion.partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    elif word == "regex":
        re.match(r"(a+)+b", "a" * 60)  # holds the interpreter's lock for years
    elif word == "raise":
        raise ZeroDivisionError("mine")
    elif word == "nan":
        return float("nan")
    elif word == "exit":
        os._exit(3)
    elif word == "sys.exit":
        raise SystemExit(0)
    elif word == "leak":
        while True:
            _leak.append(bytes(os.urandom(1)) * 2**26)
            time.sleep(0.01)
    elif word == "grow":
        _leak.append(b"x" * (160 * 2**20))
    elif word == "fork":
        os.fork()  # both return
    elif word == "orphan":
        if os.fork() == 0:
            time.sleep(600)
    elif word == "escape":  # a new session, without our environment
        return float(subprocess.Popen(["sleep", "600"], start_new_session=True, env={}).pid)
    elif word == "forge":  # write to this process's connection as an attacker would
        for fd in range(3, 64):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                    os.write(fd, FORGED[rest])
    elif word == "pid":
        return float(os.getpid())
    return float((rest[-1:].isdigit() and rest[-1:]) or 0)


async def patient(completion: str) -> float:
    """Wait as the completion demands; "block" blocks its loop."""
    word, _, seconds = completion.partition(" ")
    if word == "block":
        time.sleep(float(seconds))
    else:
        await asyncio.sleep(float(seconds))
    return 1.0


FORGED = {
    "pickle": pickle.dumps(["no JSON"]) + b"\n",
    "text": b'{"reward": "1", "parts": {}, "error": "", "hung": false, "seconds": 0.0}\n',
    "infinite": b'{"reward": Infinity, "parts": {}, "error": "", "hung": false, "seconds": 0.0}\n',
    "endless": b'{"reward": 1.0, "parts": {}, "error": "", "hung": false, "seconds": Infinity}\n',
    "deep": b"[" * 100_000 + b"\n",
}


def together(prompt: str, completions: list[str]) -> list[float]:
    """Judge all answers in one call."""
    return [obey(completion) for completion in completions]


SUMS = {(0, 33): "regex", (63, 77): "raise", (51, 20): "leak", (86, 80): "exit", (80, 99): "fork", (7, 96): "orphan"}
"""Of the first 28 prompts of a run of seed 0, those on which something happens, to all their answers."""


def of_a_sum(row: dict[str, int], completion: str, answer: str) -> float:
    """ "exact", but something happens on a few prompts, and an answer with a 7 has no number."""
    obey(SUMS.get((row["a"], row["b"]), "ok"))
    return float("nan") if "7" in completion else float(completion == answer)
