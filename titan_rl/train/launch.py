"""Bring the meshes of a run up together, and take them down whatever happens.

controller ── trainer mesh (dp, tp)                                    the first GPUs
           ├─ generator replicas (tp) each                             the next ones
           └─ reference, teacher, reward model, critic (dp, tp) each   the next ones, where the algorithm has them
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

from monarch.actor import HostMesh, shutdown_context, this_host

from titan_rl.actors.quiet import without_lines
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.config.sections import RoleSection
from titan_rl.meshes.faults import Watch
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.healing import GeneratorPolicy
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.meshes.roles import CriticMesh, FrozenMesh
from titan_rl.meshes.trainers import TrainerMesh
from titan_rl.preflight.setup import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.record.terminal import Terminal
from titan_rl.wire.errors import RunError
from titan_rl.wire.vllm_params import verify_complete

Mesh = TypeVar("Mesh", bound=ModelMesh)

CLOSE_SECONDS = 5.0  # a clean goodbye; what does not manage it in time is killed with the controller


@dataclass(frozen=True, slots=True)
class Meshes:
    """Every mesh of a run; None where the algorithm needs none, or lends its weights to the trainers."""

    trainers: TrainerMesh
    generators: GeneratorMesh | None = None
    reference: FrozenMesh | None = None
    teacher: FrozenMesh | None = None
    reward_model: FrozenMesh | None = None
    critic: CriticMesh | None = None
    colocated: bool = False  # generators and trainers take turns on the same devices

    async def turn_of_trainers(self) -> None:
        """The engines sleep until they are given new weights."""
        if self.colocated and self.generators is not None:
            await self.generators.sleep()

    def named(self, name: str) -> ModelMesh | None:
        """One that can be respawned whole; the generators are not one."""
        return next((mesh for mesh in self.all if isinstance(mesh, ModelMesh) and mesh.name == name), None)

    @property
    def all(self) -> "list[ModelMesh | GeneratorMesh]":
        every = (self.trainers, self.generators, self.reference, self.teacher, self.reward_model, self.critic)
        return [mesh for mesh in every if mesh is not None]


@asynccontextmanager
async def launch(setup: Setup, terminal: Terminal, incidents: Incidents) -> AsyncIterator[tuple[Meshes, Watch]]:
    """Spawn and start all meshes, concurrently; take them down whatever happens. What is driven by the watch ends, by
    name, when a rank dies that is not a generator's: those are replaced by their mesh."""
    watch = Watch(tended=["generator"])
    meshes: Meshes | None = None
    try:
        with without_lines(b"Monarch internal logs are being written"):
            host = this_host()
        meshes = await watch.drive(_start(host, setup, terminal, incidents))
        yield meshes, watch
    except RunError as error:
        raise await watch.explained(error) from None
    finally:
        watch.close()
        if meshes is not None:
            asynchronous = setup.config.checkpoint.async_mode != "disabled"  # closing waits for the last checkpoint
            seconds = setup.config.comm.train_timeout_seconds if asynchronous else CLOSE_SECONDS
            with suppress(Exception):  # on the way out, nothing may mask what ended the run
                await asyncio.wait_for(asyncio.gather(*(mesh.close() for mesh in meshes.all)), seconds)


async def _start(host: HostMesh, setup: Setup, terminal: Terminal, incidents: Incidents) -> Meshes:
    """GPUs are dealt in the order of this list."""
    config, starting = setup.config, {}
    g, first, colocated = config.generator, 0, config.placement.kind == "colocated"

    def deal(count: int) -> dict[str, str]:
        nonlocal first
        first += count
        return _resources(setup, first=first - count, count=count)

    async def begun(mesh: Awaitable[Mesh], what: str) -> Mesh:
        with terminal.phase(what):
            made = await mesh
            await made.start()
        return made

    async def role(name: str, own: RoleSection) -> ModelMesh:
        gpus = deal(own.parallelism.world_size)
        if name == "critic":
            return await begun(CriticMesh.spawn(host, config, setup.shape, gpus), "critic: processes, model, optimizer")
        shape = setup.role_shapes.get(name, setup.shape)
        spawning = FrozenMesh.spawn(host, name, own.parallelism, config, shape, gpus)
        return await begun(spawning, f"{name}: processes, model")

    spawning = TrainerMesh.spawn(host, config, setup.shape, deal(config.parallelism.world_size))
    starting["trainers"] = begun(spawning, "trainer: processes, model, optimizer")
    if setup.samples_rollouts:
        count = g.replicas * g.tensor_parallel_degree
        deal(max(0, count - config.parallelism.world_size) if colocated else count)  # beyond those they share
        starting["generators"] = _generators(host, setup, terminal, incidents)
    for name, own in config.roles.items():
        starting[name] = role(name, own)
    return Meshes(**dict(zip(starting, await asyncio.gather(*starting.values()), strict=True)), colocated=colocated)


async def _generators(host: HostMesh, setup: Setup, terminal: Terminal, incidents: Incidents) -> GeneratorMesh:
    config, g = setup.config, setup.config.generator
    settings = EngineSettings(
        **{**asdict(g), "max_model_len": g.max_model_len or config.training.seq_len},
        model_dir=str(setup.model_folder),
        sleeps=config.placement.kind == "colocated",
        seed=config.debug.seed,
    )
    tp = g.tensor_parallel_degree
    with terminal.phase("generator: processes, vLLM engine"):
        mesh = await GeneratorMesh.spawn(
            host,
            settings,
            replicas=g.replicas,
            env=vllm_cpu.ENV if setup.device == "cpu" else {},
            env_of=lambda at: _resources(setup, first=_first_gpu(setup, at["replica"]), count=tp),
            policy=GeneratorPolicy(
                init_seconds=config.comm.init_timeout_seconds,
                seconds=config.comm.train_timeout_seconds,
                hang_seconds=config.fault.hang_seconds,
                # What a moved sample draws depends on when it moved: never in a synchronous run.
                steals=config.rollout.lag > 0 and g.replicas > 1,
                incidents=incidents,
                min_replicas=config.fault.min_replicas,
            ),
        )
        for rank in await mesh.start():
            verify_complete(rank.shapes, setup.shape, tp)
    return mesh


def _first_gpu(setup: Setup, replica: int) -> int:
    """Behind the trainers; of a replica that comes while the run is under way, behind everybody."""
    config, g = setup.config, setup.config.generator
    first = 0 if config.placement.kind == "colocated" else config.parallelism.world_size
    if replica >= g.replicas:
        first += sum(role.parallelism.world_size for role in config.roles.values())
    return first + replica * g.tensor_parallel_degree


def _resources(setup: Setup, *, first: int, count: int) -> dict[str, str]:
    """The GPUs that a mesh's processes see, in rank order; none on CPU, even where the host has some. And threads."""
    gpus = ",".join(str(i) for i in range(first, first + count)) if setup.device == "cuda" else ""
    return {"CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": str(setup.config.hosts.threads)}


async def shutdown() -> None:
    """Say goodbye to Monarch, which takes its sockets along."""
    with suppress(Exception):
        await asyncio.wait_for(shutdown_context().as_asyncio(), CLOSE_SECONDS)
