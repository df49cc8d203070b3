"""Answers `ctl RUN status` and `ctl RUN scale`."""

import time
from typing import Any

from titan_rl.meshes import deaths
from titan_rl.meshes.faults import waits
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.preflight.placement import most_replicas, slots_per_host
from titan_rl.preflight.plan import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.train.bring_up import Meshes
from titan_rl.train.stop import Stop
from titan_rl.wire.errors import CommandRefused
from titan_rl.wire.gpus import visible_gpus

UNSAVED = "expected checkpoint.enable = true, found false: nothing is saved"  # why a run cannot be paused
STANDING = ("watch", "take")  # calls that stay open while a replica serves


class Status:
    def __init__(self, stop: Stop, incidents: Incidents, *, saves: bool) -> None:
        """`saves` is false in a run without checkpoints: none of its steps is saved."""
        self.meshes: Meshes | None = None  # None while they are being started
        self._stop, self._incidents, self._saves = stop, incidents, saves
        self._began = time.monotonic()

    async def answer(self) -> dict[str, Any]:
        run = self._stop.status() | {"seconds": round(time.monotonic() - self._began, 1)}
        return {
            "run": run if self._saves else run | {"saved": None},
            "ranks": self._ranks(),
            "waits": [
                {"for": wait.actor, "verb": wait.verb, "seconds": round(time.monotonic() - wait.since, 1)}
                for wait in waits()
                if wait.verb not in STANDING
            ],
            "faults": [incident.record() for incident in self._incidents.all],
        }

    def _ranks(self) -> list[dict[str, Any]]:
        """Return the ranks with their state. In a run across hosts each has the host that its pid is of."""
        states: dict[str, tuple[str, float]] = {}
        if self.meshes is not None and (generators := self.meshes.generators) is not None:
            coming = [replica for replica in generators.coming.values() if replica is not None]
            for replica in [*generators.replicas.values(), *coming]:
                states |= dict.fromkeys(replica.ranks, (replica.state, replica.since))
        if self.meshes is not None and (environments := self.meshes.environments) is not None:
            states |= environments.ranks
        away, begun, ranks = deaths.away(), deaths.begun(), []
        places = {rank: ("", pid) for rank, pid in deaths.alive().items()} | away
        for rank, (host, pid) in sorted(places.items()):
            state, since = states.get(rank, ("up" if self.meshes else "starting", begun.get(rank, self._began)))
            process = {"host": host, "pid": pid} if away else {"pid": pid}
            seconds = round(time.monotonic() - since, 1)
            ranks.append({"rank": rank, **process, "state": state, "seconds": seconds})
        return ranks


class Scale:
    """`scale generators=N`."""

    def __init__(self, setup: Setup, generators: GeneratorMesh) -> None:
        self._setup, self._generators = setup, generators

    async def answer(self, generators: int) -> dict[str, int]:
        config = self._setup.config
        least, most = config.fault.min_replicas, self._most()
        if type(generators) is not int or not least <= generators <= most:
            raise CommandRefused(
                f"generators: expected {least} (fault.min_replicas) to {most} (what this host has room for), "
                f"found {generators!r}"
            )
        return {"generators": await self._generators.scale(generators)}

    def _most(self) -> int:
        """Return how many replicas fit next to all other processes of the run."""
        config = self._setup.config
        return most_replicas(config, slots_per_host(config, visible_gpus() if self._setup.device == "cuda" else 0))
