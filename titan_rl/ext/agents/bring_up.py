"""Starts the processes that play rollouts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from titan_rl.ext.agents.endpoint_seats import endpoints_of
from titan_rl.ext.agents.environment_mesh import EnvironmentMesh, EnvironmentPolicy
from titan_rl.ext.agents.environment_rank import EnvironmentSettings
from titan_rl.ext.agents.episode_loop import LoopSettings
from titan_rl.ext.agents.episodes import Limits
from titan_rl.ext.agents.players import Seats
from titan_rl.ext.agents.seat_folders import record_models
from titan_rl.ext.agents.seat_models import MODEL, models_of, places_of
from titan_rl.meshes import deaths
from titan_rl.meshes.faults import Watch
from titan_rl.meshes.hosts import Host, local_host
from titan_rl.preflight.plan import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.record.terminal import Terminal
from titan_rl.train.bring_up import closed_at_end
from titan_rl.wire.types import IMAGES


@asynccontextmanager
async def launch_environments(
    setup: Setup, terminal: Terminal, incidents: Incidents
) -> AsyncIterator[tuple[EnvironmentMesh, Watch]]:
    """Start the environments alone. Lost processes are replaced."""
    deaths.kill_seconds = deaths.KILL_SECONDS[setup.device]
    watch = Watch(tended=["environment"])
    async with closed_at_end(watch) as to_close:
        host = local_host()
        environments = await watch.drive(environments_of(lambda _: host, setup, terminal, incidents))
        to_close.append(environments)
        yield environments, watch


async def environments_of(
    host_of: Callable[[int], Host], setup: Setup, terminal: Terminal, incidents: Incidents | None
) -> EnvironmentMesh:
    """Start the environments of a run, and the models that play some of their seats."""
    e, models = setup.config.environment, models_of(setup)
    if models and incidents is not None:
        for seat, digest in (await asyncio.to_thread(record_models, e, setup.folder)).items():
            terminal.note(f"{seat} is played by {e.endpoints[seat]['folder']}, whose digest is {digest}")
    started = {seat: (model.url, MODEL, model.key) for model in models for seat in model.seats}
    limits = Limits(e.max_turns, e.max_tokens, e.turn_seconds, e.rollout_seconds)
    agent, context = bool(setup.config.task.agent), setup.config.longest_rollout
    loop = LoopSettings(
        setup.config.rollout_code,
        e.concurrency,
        limits,
        agent,
        e.python,
        e.args,
        context,
        seats=Seats(tuple(e.seats), frozenset([*e.frozen_seats, *e.endpoints]), tuple(endpoints_of(e, started))),
    )
    chat = setup.tokenizer.chat_settings if setup.config.task.template == "chat" else None
    images = str(setup.folder / IMAGES) if setup.config.model.vision != "none" else ""
    ends = setup.sampling.stop_token_ids
    settings = EnvironmentSettings(loop, setup.model_folder, ends, chat, setup.config.sandbox, images)
    patience = setup.config.comm.init_timeout_seconds, setup.config.fault.hang_seconds
    policy = EnvironmentPolicy(e.processes, *patience, e.lockstep, agent, incidents)
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(setup.config.hosts.threads)}

    async def spawned() -> EnvironmentMesh:
        with terminal.phase("environment: processes"):
            return await EnvironmentMesh.spawn(host_of, settings, policy, variables)

    starting = (model.start(place, terminal, incidents) for model, place in zip(models, places_of(setup), strict=True))
    mesh, _ = await asyncio.gather(spawned(), asyncio.gather(*starting))
    mesh.play_with(models)
    return mesh
