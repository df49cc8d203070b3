"""Processes that hold one of a benchmark's own actors each."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monarch.actor import Actor, this_host

TIMEOUT = 300.0  # seconds, of every call
SCRIPTS = str(Path(__file__).resolve().parents[1])
# Monarch pickles an actor's class by name: its process has to be able to import it.
IMPORTABLE = {"PYTHONPATH": os.pathsep.join([SCRIPTS, *filter(None, [os.environ.get("PYTHONPATH")])])}


class Ranks:
    def __init__(self, name: str, count: int, actor: type[Actor]) -> None:
        os.environ |= {**IMPORTABLE, "OMP_NUM_THREADS": "1"}
        self._procs: Any = this_host().spawn_procs(per_host={name: count}, name=name)
        mesh = self._procs.spawn("rank", actor)
        self._actors: list[Any] = [mesh.slice(**{name: i}) for i in range(count)]

    async def each(self, verb: str, *arguments: Any, own: Sequence[Any] | None = None) -> list[Any]:
        """Call an endpoint of every rank at once. `own` has the first argument of each rank."""
        firsts = [() for _ in self._actors] if own is None else [(value,) for value in own]
        pairs = zip(self._actors, firsts, strict=True)
        calls = [getattr(actor, verb).call_one(*first, *arguments).as_asyncio() for actor, first in pairs]
        return list(await asyncio.wait_for(asyncio.gather(*calls), TIMEOUT))

    async def one(self, rank: int, verb: str, *arguments: Any) -> Any:
        """Call an endpoint of one rank."""
        return await asyncio.wait_for(getattr(self._actors[rank], verb).call_one(*arguments).as_asyncio(), TIMEOUT)

    async def end(self) -> None:
        await asyncio.wait_for(self._procs.stop().as_asyncio(), 60)
