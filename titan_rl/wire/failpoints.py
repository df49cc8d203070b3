"""Faults on order: where titan_rl.chaos makes this process fail.

    chaos ── FOLDER/"generator0[tp=0] read" ──> failpoint "read" of that rank ── FOLDER/hits.jsonl ──> chaos

A failpoint is inert in a process that was not started with TITAN_RL_CHAOS=FOLDER: it is one test of an empty string.
Only the environment arms it, and no config reaches that. An order is obeyed once, unless it says to keep it.
"""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Literal, NamedTuple

FOLDER = "TITAN_RL_CHAOS"
HITS = "hits.jsonl"

_folder = os.environ.get(FOLDER, "")
_rank = os.environ.get("TITAN_RL_PROC", "")


class InjectedFault(RuntimeError):
    """Nothing is wrong but that somebody asked for it."""


class FaultOrder(NamedTuple):
    """What to do at a failpoint. `damage` is the caller's to do."""

    do: Literal["raise", "wait", "damage"]
    seconds: float = 0.0  # wait
    keep: bool = False  # every time from now on


def give(folder: Path, rank: str, point: str, order: FaultOrder) -> None:
    """Chaos' side."""
    path = folder / f"{rank} {point}"
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(order._asdict()))
    draft.rename(path)


async def reached(point: str) -> None:
    """Others of this process may go on while it waits."""
    if _folder and (order := _take(point)) is not None:
        await asyncio.sleep(order.seconds)
        _obey(order, point)


def hit(point: str) -> bool:
    """Nothing in this process goes on while it waits. Whether to damage what is at hand."""
    if not _folder or (order := _take(point)) is None:
        return False
    time.sleep(order.seconds)
    _obey(order, point)
    return order.do == "damage"


def _take(point: str) -> FaultOrder | None:
    path = Path(_folder, f"{_rank} {point}")
    try:
        order = FaultOrder(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    if not order.keep:
        path.unlink()
        line = {"rank": _rank, "point": point, "do": order.do, "time": time.time()}
        with Path(_folder, HITS).open("a") as hits:
            hits.write(json.dumps(line) + "\n")
    return order


def _obey(order: FaultOrder, point: str) -> None:
    if order.do == "raise":
        raise InjectedFault(f"ordered at {point} of {_rank}")
