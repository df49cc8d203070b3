"""Seats of an episode that a whole model plays, from a folder: the run starts an engine for it, and asks it as it asks
any endpoint (endpoint_seats.py).

    [environment.endpoints.user] folder ──> generator_user0 ──> http://127.0.0.1:PORT/v1 ──> the user's turns

The model may be of any family, with another tokenizer and chat template than the policy's. It is never trained, and
none of its tokens reaches a trainer. A lost engine is replaced by one that loads the same folder.
"""

import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial

from titan_rl.ext.agents.conversation import ChatText
from titan_rl.ext.agents.policy_endpoint import PolicyEndpoint
from titan_rl.ext.agents.seat_folders import setups_of_seats
from titan_rl.meshes.generator_mesh import SYNC, GeneratorMesh
from titan_rl.meshes.hosts import RankPlace, local_host
from titan_rl.meshes.replica import Replica
from titan_rl.preflight.plan import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.record.terminal import Terminal
from titan_rl.train.bring_up import start_generators
from titan_rl.train.rank_places import resources
from titan_rl.wire.errors import RequestRefused, RunError
from titan_rl.wire.gpus import visible_devices
from titan_rl.wire.types import Completion, Request

HOST = "127.0.0.1"
MODEL = "model"  # its name at its endpoint


class SeatModel:
    """A frozen model that plays seats: its engine, behind an endpoint on loopback."""

    def __init__(self, name: str, setup: Setup, seats: Sequence[str]) -> None:
        self.name, self.seats = name, seats
        self.failed: Callable[[RunError], None] = lambda _: None
        self.key = f"sk-{secrets.token_hex(16)}"
        self._setup = setup
        self._bound = socket.create_server((HOST, 0))
        self._mesh: GeneratorMesh | None = None
        self._endpoint: PolicyEndpoint | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._bound.getsockname()[1]}/v1"

    @property
    def ranks(self) -> dict[str, tuple[str, float]]:
        """Return the state of each rank, and since when."""
        replicas = self._mesh.replicas.values() if self._mesh else ()
        return {rank: (replica.state, replica.since) for replica in replicas for rank in replica.ranks}

    async def start(self, place: RankPlace, terminal: Terminal, incidents: Incidents | None) -> None:
        own = self._setup
        mesh = await start_generators(lambda *_: place, own, terminal, incidents, loaded=True, name=self.name)
        mesh.tend(partial(_load, mesh, own.config.comm.train_timeout_seconds), lambda _: None)
        self._mesh = mesh
        self._endpoint = PolicyEndpoint(
            self,
            ChatText(own.tokenizer),
            key=self.key,
            sampling=own.sampling,
            context=own.config.longest_rollout,
            model=MODEL,
        )
        await self._endpoint.listen(self._bound)

    async def generate(self, request: Request) -> list[Completion]:
        """Sample. Once the engine is lost for good, report it."""
        assert self._mesh is not None
        try:
            return await self._mesh.generate(request)
        except RequestRefused:
            raise
        except RunError as error:
            self.failed(error)
            raise

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._mesh is not None:
            await self._mesh.close()


async def _load(mesh: GeneratorMesh, seconds: float, replica: Replica) -> None:
    """Let a new engine serve the weights that it has read from the folder."""
    await mesh.connect_late(replica, [[]], SYNC, seconds)
    await replica.fetch_weights(None, seconds)
    await replica.switch_weights(0, seconds)


def models_of(setup: Setup) -> list[SeatModel]:
    """Return the models of environment.endpoints, which are to be started."""
    folders = setup.config.environment.folders
    return [
        SeatModel(*each, seats) for each, seats in zip(setups_of_seats(setup).items(), folders.values(), strict=True)
    ]


def places_of(setup: Setup) -> list[RankPlace]:
    """Return the place of each model's engine: on GPUs the last ones, which no other rank gets."""
    count = len(setup.config.environment.folders)
    gpus = visible_devices()[-count:] if setup.device == "cuda" and count else [""] * count
    return [RankPlace(local_host(), 1, resources(setup, "generator", [gpu] if gpu else [])) for gpu in gpus]
