"""Processes that hold one of a benchmark's own actors each."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.actor import Actor, this_host

TIMEOUT = 300.0  # seconds, of every call
SCRIPTS = str(Path(__file__).resolve().parents[1])
# Monarch pickles an actor's class by name: its process has to be able to import it.
IMPORTABLE = {"PYTHONPATH": os.pathsep.join([SCRIPTS, *filter(None, [os.environ.get("PYTHONPATH")])])}


@dataclass(frozen=True)
class Ranks:
    procs: Any
    actors: list[Any]

    @classmethod
    def spawn(cls, name: str, count: int, actor: type[Actor]) -> "Ranks":
        os.environ |= {**IMPORTABLE, "OMP_NUM_THREADS": "1"}
        procs = this_host().spawn_procs(per_host={name: count}, name=name)
        mesh = procs.spawn("rank", actor)
        return cls(procs, [mesh.slice(**{name: i}) for i in range(count)])

    async def each(self, verb: str, *arguments: Any, own: Sequence[Any] | None = None) -> list[Any]:
        """Call an endpoint of every rank at once. `own` has the first argument of each rank."""
        firsts = [() for _ in self.actors] if own is None else [(value,) for value in own]
        pairs = zip(self.actors, firsts, strict=True)
        calls = [getattr(actor, verb).call_one(*first, *arguments).as_asyncio() for actor, first in pairs]
        return list(await asyncio.wait_for(asyncio.gather(*calls), TIMEOUT))

    async def end(self) -> None:
        await asyncio.wait_for(self.procs.stop().as_asyncio(), 60)
