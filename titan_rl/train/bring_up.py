"""Start all meshes of a run, and stop them whatever happens.

controller ── trainer mesh (dp, tp)                                    the first GPUs (preflight/placement.py)
           ├─ generator replicas (tp) each                             the next ones
           ├─ environments                              no GPU
           └─ reference, teacher, reward model, critic (dp, tp) each   the next ones, if the algorithm needs them
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

from monarch.actor import shutdown_context, this_host

from titan_rl.actors.endpoint import without_lines
from titan_rl.actors.environment_rank import EnvironmentSettings
from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.actors.vllm.launch_env import BATCH_INVARIANT
from titan_rl.agents.episode_loop import LoopSettings
from titan_rl.agents.episodes import Limits
from titan_rl.config.auto import BLOCK_TOKENS
from titan_rl.config.sections import Config
from titan_rl.meshes import deaths, fork_servers, keepers
from titan_rl.meshes.environment_mesh import EnvironmentMesh, EnvironmentPolicy
from titan_rl.meshes.faults import Watch
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.hosts import Berth, Host
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.meshes.peer_snapshots import PeerSnapshots
from titan_rl.meshes.replica import GeneratorPolicy
from titan_rl.meshes.snapshot_store import Snapshots
from titan_rl.preflight.plan import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.record.terminal import Terminal
from titan_rl.train.berths import Berths, joined_hosts, resources
from titan_rl.wire.errors import RunError
from titan_rl.wire.gpus import PLANNED, visible_devices
from titan_rl.wire.types import RoleName
from titan_rl.wire.vllm_params import verify_complete

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads both
CLOSE_SECONDS = 5.0  # for a clean end; what takes longer is killed with the controller
HURRIED_SECONDS = 0.5
GOODBYE_SECONDS = 0.3  # for Monarch's last messages, to processes that are dead. Monarch itself takes 0.3 at exit


@dataclass(frozen=True, slots=True)
class Meshes:
    """Every mesh of a run. None: the algorithm needs none, or the trainers hold the role's weights themselves."""

    trainers: ModelMesh
    generators: GeneratorMesh | None = None
    reference: ModelMesh | None = None
    teacher: ModelMesh | None = None
    reward_model: ModelMesh | None = None
    critic: ModelMesh | None = None
    environments: EnvironmentMesh | None = None
    colocated: bool = False  # generators and trainers take turns on the same devices
    on_gpus: bool = False  # which are GPUs
    hosts: Sequence[Host] = ()  # of the run
    berths: Berths | None = None  # where meshes are started again

    async def turn_of_trainers(self) -> None:
        """Put colocated engines to sleep until they are given new weights."""
        if self.colocated and self.generators is not None:
            await self.generators.sleep()

    async def leave_gpus_to_trainers(self) -> None:
        """End the trainers, which start again next, and wait for the replicas that are being started on the GPUs that
        they share: vLLM measures how much memory is free, which nothing else may change meanwhile."""
        if self.colocated and self.on_gpus and self.generators is not None:
            await self.trainers.kill()
            await self.generators.settled()

    def named(self, name: str) -> ModelMesh | None:
        """Return a mesh that is respawned as a whole; the generator mesh replaces its replicas itself."""
        return next((mesh for mesh in self.all if isinstance(mesh, ModelMesh) and mesh.name == name), None)

    @property
    def all(self) -> "list[ModelMesh | GeneratorMesh | EnvironmentMesh]":
        roles = (self.reference, self.teacher, self.reward_model, self.critic)
        every = (self.trainers, self.generators, self.environments, *roles)
        return [mesh for mesh in every if mesh is not None]


Launch = Callable[[Setup, Terminal, Incidents, Callable[[], bool]], AbstractAsyncContextManager[tuple[Meshes, Watch]]]
"""Starts all meshes of a run: `launch`, or a simulation of it."""


@asynccontextmanager
async def launch(
    setup: Setup, terminal: Terminal, incidents: Incidents, hurries: Callable[[], bool] = lambda: False
) -> AsyncIterator[tuple[Meshes, Watch]]:
    """Start all meshes, and stop them whatever happens. When a rank dies, what the watch drives raises an error that
    names it; but dead generators and environments are replaced by their mesh. If a stop `hurries`, busy ranks are
    killed."""
    fork_servers.warn = terminal.warn
    deaths.kill_seconds = deaths.KILL_SECONDS[setup.device]
    # A host whose agent dies is lost (remote_host.py).
    watch = Watch(tended=["generator", "environment", "agent", keepers.MESH])
    meshes: Meshes | None = None

    def back() -> None:
        if meshes is not None and meshes.generators is not None:
            meshes.generators.regrow()

    async with joined_hosts(setup, terminal.warn, back) as hosts:
        try:
            berths = Berths(setup, hosts)
            started = await watch.drive(_start(berths, setup, terminal, incidents))
            meshes = replace(started, hosts=hosts, berths=berths)
            yield meshes, watch
        except RunError as error:
            raise await watch.explained(error) from None
        finally:
            watch.close()
            if meshes is not None:
                asynchronous = setup.config.checkpoint.async_mode != "disabled"  # closing waits for the last checkpoint
                seconds = setup.config.comm.train_timeout_seconds if asynchronous else CLOSE_SECONDS
                seconds = HURRIED_SECONDS if hurries() else seconds  # then the last checkpoint was waited for
                with suppress(Exception):  # nothing may mask the error that ended the run
                    await asyncio.wait_for(asyncio.gather(*(mesh.close() for mesh in meshes.all)), seconds)


async def _start(berths: Berths, setup: Setup, terminal: Terminal, incidents: Incidents) -> Meshes:
    """Start all meshes. Generators that share the trainers' GPUs start before them: vLLM measures how much memory is
    free, which nothing else may change meanwhile."""
    config = setup.resolved
    shapes = {**setup.role_shapes, "critic": setup.shape.with_value_head()}

    async def started(role: RoleName) -> ModelMesh:
        trains = role in ("trainer", "critic")
        with terminal.phase(f"{role}: processes, model{', optimizer' if trains else ''}"):
            env = {PLANNED: setup.device, **_allocator_env(setup)}
            mesh = ModelMesh(partial(berths.of_model, role), role, config, shapes.get(role, setup.shape), env)
            await mesh.start()
        return mesh

    starting: dict[str, Callable[[], Awaitable[Any]]] = {"trainers": partial(started, "trainer")}
    if setup.config.samples_rollouts:
        starting["generators"] = partial(_generators, berths.of_replica, setup, terminal, incidents)
        if setup.config.rollout_code:
            starting["environments"] = partial(_environments, berths.of_environment, setup, terminal, incidents)
    for role in config.roles:
        starting[role] = partial(started, cast(RoleName, role))
    meshes: dict[str, Any] = {}
    others = [name for name in starting if name != "generators"]
    for names in (["generators"], others) if _share_gpus(setup) else (starting,):
        meshes |= zip(names, await asyncio.gather(*(starting[name]() for name in names)), strict=True)
    return Meshes(**meshes, colocated=config.placement.kind == "colocated", on_gpus=setup.device == "cuda")


async def start_snapshots(config: Config, meshes: Meshes, incidents: Incidents, terminal: Terminal) -> Snapshots:
    """Return the run's snapshots: in this process's memory if all trained ranks find it, else with keepers."""
    trainers, critic = meshes.trainers, meshes.critic
    if not config.fault.snapshot_interval or all(mesh.near for mesh in (trainers, critic) if mesh is not None):
        return Snapshots(trainers, critic, incidents.note)
    ends = keepers.Keepers(meshes.hosts, config.comm.init_timeout_seconds, config.comm.train_timeout_seconds)
    snapshots = PeerSnapshots(trainers, critic, ends, incidents.note, config.fault.snapshot_gbps)
    with terminal.phase("snapshots: keepers"):
        copies, how = await snapshots.start()
    terminal.note(f"snapshots: copies of {', of '.join(copies)}; by {how}")
    return snapshots


@asynccontextmanager
async def launch_loaded(
    setup: Setup, terminal: Terminal
) -> AsyncIterator[tuple[GeneratorMesh, EnvironmentMesh | None, Watch]]:
    """Start generators that have loaded the weights in setup.model_folder, and the environments, without trainers; stop
    them whatever happens. Nothing that is lost is replaced: the watch raises an error that names it."""
    deaths.kill_seconds = deaths.KILL_SECONDS[setup.device]
    watch = Watch(tended=[])
    meshes: list[GeneratorMesh | EnvironmentMesh] = []
    try:
        with without_lines(b"Monarch internal logs are being written"):
            host = Host(this_host())

        def seated(replica: int, _: bool) -> Berth:
            tp = setup.config.generator.tensor_parallel_degree
            devices = visible_devices()[replica * tp : (replica + 1) * tp] if setup.device == "cuda" else []
            return Berth(host, tp, resources(setup, "generator", devices))

        generators = await watch.drive(_generators(seated, setup, terminal, None, loaded=True))
        meshes.append(generators)
        environments = None
        if setup.config.rollout_code:
            environments = await watch.drive(_environments(lambda _: host, setup, terminal, None))
            meshes.append(environments)
        yield generators, environments, watch
    except RunError as error:
        raise await watch.explained(error) from None
    finally:
        watch.close()
        with suppress(Exception):  # nothing may mask the error that ended it
            await asyncio.wait_for(asyncio.gather(*(mesh.close() for mesh in meshes)), CLOSE_SECONDS)


@asynccontextmanager
async def launch_environments(
    setup: Setup, terminal: Terminal, incidents: Incidents
) -> AsyncIterator[tuple[EnvironmentMesh, Watch]]:
    """Start the environments alone, and stop them whatever happens. Lost processes are replaced."""
    deaths.kill_seconds = deaths.KILL_SECONDS[setup.device]
    watch, mesh = Watch(tended=["environment"]), None
    try:
        with without_lines(b"Monarch internal logs are being written"):
            host = Host(this_host())
        mesh = await watch.drive(_environments(lambda _: host, setup, terminal, incidents))
        yield mesh, watch
    except RunError as error:
        raise await watch.explained(error) from None
    finally:
        watch.close()
        if mesh is not None:
            with suppress(Exception):  # nothing may mask the error that ended it
                await asyncio.wait_for(mesh.close(), CLOSE_SECONDS)


def generator_policy(config: Config, incidents: Incidents | None) -> GeneratorPolicy:
    return GeneratorPolicy(
        init_seconds=config.comm.init_timeout_seconds,
        seconds=config.comm.train_timeout_seconds,
        hang_seconds=config.fault.hang_seconds,
        incidents=incidents,
        min_replicas=config.fault.min_replicas,
    )


async def _generators(
    berth_of: Callable[[int, bool], Berth],
    setup: Setup,
    terminal: Terminal,
    incidents: Incidents | None,
    *,
    loaded: bool = False,
) -> GeneratorMesh:
    """Start the engines, which get their weights by weight sync, or have `loaded` them from setup.model_folder."""
    config = setup.resolved
    g = config.generator
    shares = _share_gpus(setup) and not loaded
    settings = EngineSettings(
        **{**asdict(g), "max_model_len": g.max_model_len or config.training.seq_len},
        model_dir=str(setup.model_folder),
        block_size=BLOCK_TOKENS[setup.device],
        sleeps=config.placement.kind == "colocated" and not loaded,
        load_format="auto" if loaded else "dummy",
        head_dtype=config.model.head_dtype,
        seed=config.debug.seed,
        records_kept=config.rollout.truncates and not loaded,
    )
    tp = g.tensor_parallel_degree
    with terminal.phase("generator: processes, vLLM engine"):
        mesh = await GeneratorMesh.spawn(
            berth_of,
            settings,
            replicas=g.replicas,
            env=_engine_env(setup),
            policy=generator_policy(config, incidents),
        )
        ranks = await mesh.start()
        for rank in ranks:
            verify_complete(rank.shapes, setup.shape, tp)
        if loaded:
            await mesh.connect([[] for _ in range(tp)])
            await mesh.pull(0)
        if shares:
            await mesh.sleep()  # the trainers' turn to start; the first weights wake it
    if setup.device == "cuda":
        terminal.note(f"generator: vLLM's {ranks[0].runner} model runner")
    return mesh


async def _environments(
    host_of: Callable[[int], Host], setup: Setup, terminal: Terminal, incidents: Incidents | None
) -> EnvironmentMesh:
    e = setup.config.environment
    limits = Limits(e.max_turns, e.max_tokens, e.turn_seconds, e.rollout_seconds)
    agent, training = bool(setup.config.task.agent), setup.config.training
    context = min(setup.config.generator.max_model_len or training.seq_len, training.seq_len + 1)
    loop = LoopSettings(setup.config.rollout_code, e.concurrency, limits, agent, e.python, e.args, context)
    chat = setup.tokenizer.chat_settings if setup.config.task.template == "chat" else None
    settings = EnvironmentSettings(loop, setup.model_folder, setup.sampling.stop_token_ids, chat, setup.config.sandbox)
    patience = setup.config.comm.init_timeout_seconds, setup.config.fault.hang_seconds
    policy = EnvironmentPolicy(e.processes, *patience, e.lockstep, agent, incidents)
    with terminal.phase("environment: processes"):
        return await EnvironmentMesh.spawn(
            host_of, settings, policy, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(setup.config.hosts.threads)}
        )


def _share_gpus(setup: Setup) -> bool:
    """Return True if generators and trainers use the same GPUs."""
    return setup.device == "cuda" and setup.config.placement.kind == "colocated" and setup.config.samples_rollouts


def _allocator_env(setup: Setup) -> dict[str, str]:
    """Return the launch environment of a model's rank on a GPU: segments that grow leave fewer gaps than fixed ones
    between activations of other lengths. A setting of the user's stays."""
    if setup.device == "cpu" or any(name in os.environ for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0]: "expandable_segments:True"}


def _engine_env(setup: Setup) -> dict[str, str]:
    if setup.device == "cpu":
        return vllm_cpu.ENV
    return BATCH_INVARIANT if setup.config.debug.deterministic else {}


async def shutdown() -> None:
    """Kill the processes, whose meshes are closed, and shut Monarch down, which removes its sockets. Ending living
    processes by messages takes Monarch 1 to 6 s."""
    with suppress(Exception):
        await deaths.kill(deaths.living())
        await asyncio.wait_for(shutdown_context(GOODBYE_SECONDS).as_asyncio(), CLOSE_SECONDS)
