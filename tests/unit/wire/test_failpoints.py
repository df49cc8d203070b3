"""Failpoints carry out an order once, and are inert in a process that is not armed."""

import json
import os
import subprocess
import sys
from pathlib import Path

from titan_rl.wire.failpoints import FOLDER, HITS, FaultOrder, give

RANK = "generator0[tp=0]"


def at_failpoints(folder: Path, *, armed: bool) -> str:
    """Return the output of a process of RANK that reaches its failpoints twice."""
    program = """
import asyncio
from titan_rl.wire import failpoints
def passed(action):
    try:
        return action()
    except failpoints.InjectedFault as fault:
        return str(fault)
for _ in range(2):
    print(passed(lambda: failpoints.hit("put")), passed(lambda: asyncio.run(failpoints.reached("step"))), sep="; ")
"""
    environment = {k: v for k, v in os.environ.items() if k != FOLDER} | {"TITAN_RL_PROC": RANK}
    environment |= {FOLDER: str(folder)} if armed else {}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_an_order_is_obeyed_once(tmp_path: Path) -> None:
    give(tmp_path, RANK, "put", FaultOrder("damage"))
    give(tmp_path, RANK, "step", FaultOrder("raise"))
    give(tmp_path, "generator1[tp=0]", "put", FaultOrder("raise"))
    assert at_failpoints(tmp_path, armed=True) == f"True; ordered at step of {RANK}\nFalse; None\n"
    hits = [json.loads(line) for line in (tmp_path / HITS).read_text().splitlines()]
    assert [(hit["rank"], hit["point"], hit["do"]) for hit in hits] == [
        (RANK, "put", "damage"),
        (RANK, "step", "raise"),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {HITS, "generator1[tp=0] put"}


def test_failpoints_are_inert_without_the_variable(tmp_path: Path) -> None:
    give(tmp_path, RANK, "put", FaultOrder("damage"))
    give(tmp_path, RANK, "step", FaultOrder("raise"))
    before = sorted(tmp_path.iterdir())
    assert at_failpoints(tmp_path, armed=False) == "False; None\n" * 2
    assert sorted(tmp_path.iterdir()) == before
