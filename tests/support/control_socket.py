"""A control socket with a few commands, in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from titan_rl.ext.control.server import Control
from titan_rl.wire.errors import CommandRefused

STATUS = {
    "run": {"state": "training", "phase": "rl", "step": 3, "of": 8, "saved": None, "up_seconds": 75.2, "held_out": 0.5},
    "ranks": [
        {"name": "trainer[dp=0 tp=0]", "pid": 11, "state": "serving", "since_seconds": 70.0},
        {"name": "generator0[tp=0]", "pid": 12, "state": "starting", "since_seconds": 1.5},
    ],
    "waits": [],
    "restarts": {"generators": 1},
}


async def status() -> dict[str, Any]:
    return STATUS


async def add(a: int, b: int = 1) -> int:
    return a + b


async def never() -> None:
    await asyncio.sleep(3600)


async def refuse() -> None:
    raise CommandRefused("not now")


async def fail() -> None:
    raise RuntimeError("the engine is gone")


@asynccontextmanager
async def serving(folder: Path, sockets: Path, announce: Callable[[str], Any] = len) -> AsyncIterator[Control]:
    control = Control(folder, sockets / "control", announce=announce)
    control.question(status=status)
    control.offer(add=add, never=never, refuse=refuse, fail=fail)
    async with control:
        yield control
