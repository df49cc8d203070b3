"""Start all meshes of a run, and stop them at the end, also after errors.

controller ── trainer mesh (dp, tp)                                    the first GPUs (preflight/placement.py)
           ├─ generator replicas (tp) each                             the next ones
           ├─ environments                              no GPU
           └─ reference, teacher, reward model, critic (dp, tp) each   the next ones, if the algorithm needs them
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol, cast

from monarch.actor import shutdown_context

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.actors.vllm.engine_adapters import EngineAdapters, engine_adapters
from titan_rl.actors.vllm.launch_env import BATCH_INVARIANT
from titan_rl.actors.vllm.vllm_params import verify_complete
from titan_rl.config.auto import BLOCK_TOKENS
from titan_rl.config.sections import Config
from titan_rl.meshes import deaths
from titan_rl.meshes.faults import Watch
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.hosts import Host, RankPlace, local_host
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.meshes.replica import GeneratorPolicy
from titan_rl.meshes.starter import starter
from titan_rl.preflight.memory import beside_engine
from titan_rl.preflight.plan import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.record.terminal import Terminal
from titan_rl.train.rank_places import RankPlaces, joined_places, resources
from titan_rl.wire.errors import RunError
from titan_rl.wire.gpus import PLANNED, visible_devices
from titan_rl.wire.model_shape import SpecShape
from titan_rl.wire.parts import needed_part
from titan_rl.wire.sessions import Driver
from titan_rl.wire.spans import Recorded
from titan_rl.wire.types import IMAGES, RoleName

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads both
CLOSE_SECONDS = 5.0  # for a clean end; what takes longer is killed with the controller
HURRIED_SECONDS = 0.5
GOODBYE_SECONDS = 0.3  # for Monarch's last messages, to processes that are dead. Monarch itself takes 0.3 at exit


class Environments(Driver, Protocol):
    """The mesh of processes that play rollouts."""

    @property
    def ranks(self) -> dict[str, tuple[str, float]]:
        """Return the state of each rank, and since when."""
        ...

    def spans(self) -> Mapping[str, Awaitable[Recorded]]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Meshes:
    """Every mesh of a run. None: the algorithm needs none, or the trainers hold the role's weights themselves."""

    trainers: ModelMesh
    generators: GeneratorMesh | None = None
    reference: ModelMesh | None = None
    teacher: ModelMesh | None = None
    reward_model: ModelMesh | None = None
    critic: ModelMesh | None = None
    environments: Environments | None = None
    colocated: bool = False  # generators and trainers take turns on the same devices
    on_gpus: bool = False
    hosts: Sequence[Host] = ()
    rank_places: RankPlaces | None = None  # where meshes are started again

    async def turn_of_trainers(self) -> None:
        """Put colocated engines to sleep until the next weight sync."""
        if self.colocated and self.generators is not None:
            await self.generators.sleep()

    async def leave_gpus_to_trainers(self) -> None:
        """End the trainers, which start again next, and wait for the replicas that are being started on the GPUs that
        they share: vLLM measures how much memory is free, which nothing else may change meanwhile."""
        if self.colocated and self.on_gpus and self.generators is not None:
            await self.trainers.kill()
            await self.generators.settled()

    def of(self, policy: str, slot: int) -> "Meshes":
        """Return the meshes as one of several policies sees them."""
        generators = self.generators and self.generators.of(policy, slot)
        return replace(self, trainers=self.trainers.of(policy), generators=generators)

    def named(self, name: str) -> ModelMesh | None:
        """Return a mesh that is respawned as a whole; the generator mesh replaces its replicas itself."""
        return next((mesh for mesh in self.all if isinstance(mesh, ModelMesh) and mesh.name == name), None)

    @property
    def all(self) -> "list[AnyMesh]":
        roles = (self.reference, self.teacher, self.reward_model, self.critic)
        every = (self.trainers, self.generators, self.environments, *roles)
        return [mesh for mesh in every if mesh is not None]


AnyMesh = ModelMesh | GeneratorMesh | Environments


Launch = Callable[[Setup, Terminal, Incidents, Callable[[], bool]], AbstractAsyncContextManager[tuple[Meshes, Watch]]]
"""Starts all meshes of a run: `launch`, or a simulation of it."""


@asynccontextmanager
async def closed_at_end(
    watch: Watch, close_seconds: Callable[[], float] = lambda: CLOSE_SECONDS
) -> AsyncIterator[list[AnyMesh]]:
    """Yield a list for the meshes to close at the end, also after errors. A RunError becomes the death behind it."""
    meshes = list[AnyMesh]()
    try:
        yield meshes
    except RunError as error:
        raise await watch.explained(error) from None
    finally:
        watch.close()
        with suppress(Exception):  # nothing may mask the error that ended the run
            await asyncio.wait_for(asyncio.gather(*(mesh.close() for mesh in meshes)), close_seconds())


@asynccontextmanager
async def launch(
    setup: Setup, terminal: Terminal, incidents: Incidents, hurries: Callable[[], bool] = lambda: False
) -> AsyncIterator[tuple[Meshes, Watch]]:
    """Start all meshes. Dead generators and environments are replaced by their mesh; the death of another rank is
    raised. If a stop `hurries`, busy ranks are killed at the end."""
    starter().warn = terminal.warn
    deaths.kill_seconds = deaths.KILL_SECONDS[setup.device]
    # A host whose agent dies is lost (titan_rl/ext/hosts).
    watch = Watch(tended=["generator", "environment", "agent", "snapshots"])
    meshes: Meshes | None = None

    def regrow_generators() -> None:
        if meshes is not None and meshes.generators is not None:
            meshes.generators.regrow()

    def close_seconds() -> float:
        if hurries():  # the last checkpoint was waited for
            return HURRIED_SECONDS
        asynchronous = setup.config.checkpoint.async_mode != "disabled"  # closing waits for the last checkpoint
        return setup.config.comm.train_timeout_seconds if asynchronous else CLOSE_SECONDS

    async with (
        joined_places(setup, terminal.warn, regrow_generators) as rank_places,
        closed_at_end(watch, close_seconds) as to_close,
    ):
        started = await watch.drive(_start(rank_places, setup, terminal, incidents))
        meshes = replace(started, hosts=rank_places.hosts, rank_places=rank_places)
        to_close += meshes.all
        yield meshes, watch


async def _start(rank_places: RankPlaces, setup: Setup, terminal: Terminal, incidents: Incidents) -> Meshes:
    """Start all meshes. Generators that share the trainers' GPUs start before them: vLLM measures how much memory is
    free, which nothing else may change meanwhile."""
    config = setup.resolved
    shapes = {**setup.role_shapes, "critic": setup.shape.with_value_head()}

    async def started(role: RoleName) -> ModelMesh:
        trains = role in ("trainer", "critic")
        with terminal.phase(f"{role}: processes, model{', optimizer' if trains else ''}"):
            env = {PLANNED: setup.device, **_allocator_env(setup)}
            policies = {name: policy.resolved for name, policy in setup.policies.items()} if role == "trainer" else {}
            places, shape = partial(rank_places.of_model, role), shapes.get(role, setup.shape)
            mesh = ModelMesh(places, role, config, shape, env, policies)
            await mesh.start()
        return mesh

    starting: dict[str, Callable[[], Awaitable[Any]]] = {"trainers": partial(started, "trainer")}
    if setup.config.samples_rollouts:
        starting["generators"] = partial(start_generators, rank_places.of_replica, setup, terminal, incidents)
        if setup.config.rollout_code:
            starting["environments"] = partial(_environments(), rank_places.of_environment, setup, terminal, incidents)
    for role in config.roles:
        starting[role] = partial(started, cast(RoleName, role))
    meshes: dict[str, Any] = {}
    others = [name for name in starting if name != "generators"]
    for names in (["generators"], others) if _share_gpus(setup) else (starting,):
        meshes |= zip(names, await asyncio.gather(*(starting[name]() for name in names)), strict=True)
    return Meshes(**meshes, colocated=config.placement.kind == "colocated", on_gpus=setup.device == "cuda")


@asynccontextmanager
async def launch_loaded(
    setup: Setup, terminal: Terminal
) -> AsyncIterator[tuple[GeneratorMesh, Environments | None, Watch]]:
    """Start generators that load the weights in setup.model_folder, and the environments, without trainers. A lost
    process is not replaced: the watch raises an error that names it."""
    deaths.kill_seconds = deaths.KILL_SECONDS[setup.device]
    watch = Watch(tended=[])
    async with closed_at_end(watch) as to_close:
        host = local_host()

        def placed(replica: int, _: bool) -> RankPlace:
            tp = setup.config.generator.tensor_parallel_degree
            devices = visible_devices()[replica * tp : (replica + 1) * tp] if setup.device == "cuda" else []
            return RankPlace(host, tp, resources(setup, "generator", devices))

        generators = await watch.drive(start_generators(placed, setup, terminal, None, loaded=True))
        to_close.append(generators)
        environments = None
        if setup.config.rollout_code:
            environments = await watch.drive(_environments()(lambda _: host, setup, terminal, None))
            to_close.append(environments)
        yield generators, environments, watch


@asynccontextmanager
async def launch_served(
    setup: Setup, terminal: Terminal, base: Callable[[ModelMesh], Awaitable[Path]]
) -> AsyncIterator[tuple[ModelMesh, GeneratorMesh, Watch]]:
    """Start trainers, whose adapters clients train, and generators that load the folder `base` of the frozen weights,
    and adapters from the folders that requests name. A lost process is not replaced, as in launch_loaded."""
    deaths.kill_seconds = deaths.KILL_SECONDS[setup.device]
    watch = Watch(tended=[])
    async with joined_places(setup, terminal.warn, lambda: None) as rank_places, closed_at_end(watch) as to_close:
        env = {PLANNED: setup.device, **_allocator_env(setup)}
        trainers = ModelMesh(partial(rank_places.of_model, "trainer"), "trainer", setup.resolved, setup.shape, env)
        with terminal.phase("trainer: processes, model"):
            await watch.drive(trainers.start())
        to_close.append(trainers)
        loaded = replace(setup, model_folder=await base(trainers))
        adapters = needed_part("folder adapters", "serve")(setup.config.lora, setup.shape)
        starting = start_generators(rank_places.of_replica, loaded, terminal, None, loaded=True, adapters=adapters)
        generators = await watch.drive(starting)
        to_close.append(generators)
        yield trainers, generators, watch


def _environments() -> Callable[..., Coroutine[Any, Any, Environments]]:
    return needed_part("environments", "environment.name")


def generator_policy(config: Config, incidents: Incidents | None) -> GeneratorPolicy:
    return GeneratorPolicy(
        init_seconds=config.comm.init_timeout_seconds,
        seconds=config.comm.train_timeout_seconds,
        hang_seconds=config.fault.hang_seconds,
        incidents=incidents,
        min_replicas=config.fault.min_replicas,
    )


async def start_generators(
    rank_place_of: Callable[[int, bool], RankPlace],
    setup: Setup,
    terminal: Terminal,
    incidents: Incidents | None,
    *,
    loaded: bool = False,
    adapters: EngineAdapters | None = None,
    name: str = "generator",
) -> GeneratorMesh:
    """Start the engines. They get their weights by weight sync, or, if `loaded`, from setup.model_folder; then requests
    may use `adapters`."""
    config = setup.resolved
    g, lora = config.generator, None if loaded else config.lora.in_vllm
    quantization = "none" if loaded else g.quantization  # on landing, and `loaded` weights do not land
    settings = EngineSettings(
        **{**asdict(g), "max_model_len": g.max_model_len or config.training.seq_len, "quantization": quantization},
        model_dir=str(setup.model_folder),
        shape=setup.shape,
        block_size=BLOCK_TOKENS[setup.device],
        enable_prefix_caching=not setup.shape.recurrent_heads,  # vLLM has states at the ends of whole blocks only
        sleeps=config.placement.kind == "colocated" and bool(config.placement.sleep) and not loaded,
        images=str(setup.folder / IMAGES) if config.model.vision != "none" else "",
        load_format="auto" if loaded else "dummy",
        head_dtype=config.model.head_dtype,
        seed=config.debug.seed,
        records=() if loaded else config.recorded_columns,
        adapters=adapters or engine_adapters(lora, setup.shape, max(1, len(setup.policies)), config.opponent_slots),
    )
    tp = g.tensor_parallel_degree
    with terminal.phase(f"{name}: processes, vLLM engine"):
        mesh = await GeneratorMesh.spawn(
            rank_place_of,
            settings,
            replicas=g.replicas,
            env=_engine_env(setup),
            policy=generator_policy(config, incidents),
            name=name,
        )
        ranks = await mesh.start()
        if not (loaded and isinstance(setup.shape, SpecShape)):  # whose folder may have more, such as a vision tower
            filled = [layout.with_adapters(setup.shape, lora) for layout in await mesh.layouts()]
            for rank, layout in zip(ranks, cycle(filled)):
                verify_complete(rank.shapes, layout.shapes, quantization)
        if loaded:
            await mesh.connect([[] for _ in range(tp)])
            await mesh.pull(0)
        elif _share_gpus(setup):
            asleep = await mesh.sleep()  # the trainers' turn to start; the first weights wake it
            if asleep:
                terminal.note(beside_engine(config, setup.shape, *min(asleep.values()), setup.adapters.slots))
    if setup.device == "cuda":
        recorded = f", because engines record {' and '.join(settings.records)}" if settings.records else ""
        scheduling = "asynchronous" if g.async_scheduling else f"synchronous{recorded}"
        terminal.note(f"{name}: vLLM's {ranks[0].runner} model runner; scheduling: {scheduling}")
    return mesh


def _share_gpus(setup: Setup) -> bool:
    """Return True if generators and trainers use the same GPUs."""
    return setup.device == "cuda" and setup.config.placement.kind == "colocated" and setup.config.samples_rollouts


def _allocator_env(setup: Setup) -> dict[str, str]:
    """Return the allocator setting of a model's rank on a GPU, unless the user has set one. Segments that grow leave
    fewer gaps between activations of different lengths."""
    if setup.device == "cpu" or any(name in os.environ for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


def _engine_env(setup: Setup) -> dict[str, str]:
    if setup.device == "cpu":
        return vllm_cpu.ENV
    return BATCH_INVARIANT if setup.config.debug.deterministic else {}


async def kill_ranks() -> None:
    """Kill the processes, whose meshes are closed. Ending living ones by messages takes Monarch 1 to 6 s."""
    with suppress(Exception):
        await deaths.kill(deaths.living())


async def shutdown() -> None:
    """Kill the processes, and shut Monarch down, which removes its sockets."""
    await kill_ranks()
    with suppress(Exception):
        await asyncio.wait_for(shutdown_context(GOODBYE_SECONDS).as_asyncio(), CLOSE_SECONDS)
