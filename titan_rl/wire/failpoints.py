"""Failpoints: places where titan_rl chaos can make this process fail.

    chaos ── FOLDER/"generator0[tp=0] read" ──> failpoint "read" of that rank ── FOLDER/hits.jsonl ──> chaos

A failpoint does nothing in a process that was started without TITAN_RL_CHAOS=FOLDER: it tests one empty string. Only
the environment arms it, no config key does. An order is executed once, unless it has `keep`.
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
    """An error raised on order, without any other cause."""


class FaultOrder(NamedTuple):
    """What to do at a failpoint. The caller carries out `damage`."""

    do: Literal["raise", "wait", "damage"]
    seconds: float = 0.0  # to wait
    keep: bool = False  # execute it every time


def give(folder: Path, rank: str, point: str, order: FaultOrder) -> None:
    """Leave an order for a rank. Called by titan_rl.tools.chaos."""
    path = folder / f"{rank} {point}"
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(order._asdict()))
    draft.rename(path)


async def reached(point: str) -> None:
    """Execute an order if there is one. Other tasks of this process may run during its wait."""
    if _folder and (order := _take(point)) is not None:
        await asyncio.sleep(order.seconds)
        _obey(order, point)


def hit(point: str) -> bool:
    """Execute an order if there is one. Its wait blocks the process. Return True if the caller must do damage."""
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
