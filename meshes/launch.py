"""Bring the meshes of a run up together, and take them down whatever happens.

controller ── trainer mesh (dp, tp)            the first GPUs
           └─ generator replicas (tp) each     the next ones
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from monarch.actor import HostMesh, shutdown_context, this_host

from titan_rl.actors import vllm_cpu
from titan_rl.actors.engine import EngineSettings
from titan_rl.actors.quiet import without_lines
from titan_rl.clock import Clock
from titan_rl.meshes.faults import RunError, Watch
from titan_rl.meshes.generators import GeneratorMesh
from titan_rl.meshes.trainers import TrainerMesh
from titan_rl.setup import Setup
from titan_rl.terminal import Terminal
from titan_rl.weight_plan import verify_complete

CLOSE_SECONDS = 5.0  # a clean goodbye; what does not manage it in time is killed with the controller


@asynccontextmanager
async def launch(setup: Setup, clock: Clock, terminal: Terminal) -> AsyncIterator[tuple[TrainerMesh, GeneratorMesh]]:
    """Spawn and start both meshes, concurrently. A rank that dies at any time ends the body, by name."""
    body = asyncio.current_task()
    assert body is not None
    watch = Watch(body)
    meshes: list[TrainerMesh | GeneratorMesh] = []
    try:
        with without_lines(b"Monarch internal logs are being written"):
            host = this_host()
        trainers, generators = await asyncio.gather(
            _trainers(host, setup, clock, terminal), _generators(host, setup, terminal)
        )
        meshes += [trainers, generators]
        yield trainers, generators
    except RunError as error:
        raise await watch.cause(error) from None
    except asyncio.CancelledError:
        if not watch.failures:
            raise  # Ctrl-C
        body.uncancel()
        raise await watch.cause(watch.failures[0]) from None
    finally:
        watch.close()
        with suppress(Exception):  # on the way out, nothing may mask what ended the run
            await asyncio.wait_for(asyncio.gather(*(mesh.close() for mesh in meshes)), CLOSE_SECONDS)


async def _trainers(host: HostMesh, setup: Setup, clock: Clock, terminal: Terminal) -> TrainerMesh:
    env = _visible(setup.device, first=0, count=setup.config.parallelism.world_size)
    with terminal.phase("trainer: processes, model, optimizer"):
        mesh = await TrainerMesh.spawn(host, setup.config, setup.shape, env, clock)
        await mesh.start()
    return mesh


async def _generators(host: HostMesh, setup: Setup, terminal: Terminal) -> GeneratorMesh:
    config, g = setup.config, setup.config.generator
    settings = EngineSettings(
        model_dir=str(setup.model_folder),
        max_model_len=g.max_model_len or config.training.seq_len,
        dtype=g.dtype,
        max_num_seqs=g.max_num_seqs,
        tensor_parallel_degree=g.tensor_parallel_degree,
        kv_cache_memory_mb=g.kv_cache_memory_mb,
        gpu_memory_utilization=g.gpu_memory_utilization,
        block_size=g.block_size,
        enable_prefix_caching=g.enable_prefix_caching,
        enforce_eager=g.enforce_eager,
        seed=config.debug.seed,
    )
    first, tp = config.parallelism.world_size, g.tensor_parallel_degree
    with terminal.phase("generator: processes, vLLM engine"):
        mesh = await GeneratorMesh.spawn(
            host,
            settings,
            replicas=g.replicas,
            env=vllm_cpu.ENV if setup.device == "cpu" else {},
            env_of=lambda at: _visible(setup.device, first=first + at["replica"] * tp, count=tp),
            init_seconds=config.comm.init_timeout_seconds,
            seconds=config.comm.train_timeout_seconds,
        )
        for rank in await mesh.start():
            verify_complete(rank.shapes, setup.shape, tp)
    return mesh


def _visible(device: str, *, first: int, count: int) -> dict[str, str]:
    """The GPUs that a mesh's processes see, in rank order; none on CPU, even where the host has some."""
    gpus = ",".join(str(i) for i in range(first, first + count)) if device == "cuda" else ""
    return {"CUDA_VISIBLE_DEVICES": gpus}


async def shutdown() -> None:
    """Say goodbye to Monarch, which takes its sockets along."""
    with suppress(Exception):
        await asyncio.wait_for(shutdown_context().as_asyncio(), CLOSE_SECONDS)
